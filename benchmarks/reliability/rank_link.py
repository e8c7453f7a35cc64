"""torchrun over two network namespaces, the link between them cut in the middle of a run: both
sides end with a message, and the resumed run is the undisturbed one to the byte. Needs root."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import outcome
from tests import killing

LIMIT, PORT = 60.0, 29511
NAMES, PLACES = ("advbayes-a", "advbayes-b"), ("10.231.7.1", "10.231.7.2")
SETTINGS = killing.SMALL | {"defense": "mix", "epochs": "400", "checkpoint_every": "50"}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def two_hosts() -> Iterator[None]:
    """Two namespaces, each with its end of one link and nothing else."""
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            "adv0",
            "netns",
            NAMES[0],
            "type",
            "veth",
            "peer",
            "adv0",
            "netns",
            NAMES[1],
        )
        for name, place in zip(NAMES, PLACES, strict=True):
            ip("-n", name, "addr", "add", f"{place}/24", "dev", "adv0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "adv0", "up")
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False)


def train(run: Path, logs: list[Path]) -> list[subprocess.Popen[bytes]]:
    """One torchrun in each namespace."""
    argv = ["--resume", str(run)]
    if not (run / "config.toml").exists():
        argv = [*killing.flags(SETTINGS), "--out", str(run)]
    started = []
    for host, name in enumerate(NAMES):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        torchrun += [f"--node-rank={host}", "--nproc-per-node=1", f"--master-addr={PLACES[0]}"]
        torchrun += [f"--master-port={PORT}", "-m", "advbayes", "train", *argv, "--quiet"]
        with logs[host].open("ab") as log:
            started.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name, *torchrun],
                    stdout=log,
                    stderr=log,
                    env=os.environ | {"GLOO_SOCKET_IFNAME": "adv0", "OMP_NUM_THREADS": "1"},
                )
            )
    return started


def steps(run: Path) -> int:
    path = run / "history.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def main() -> None:
    start = time.time()
    with tempfile.TemporaryDirectory() as name, two_hosts():
        folder = Path(name)
        logs = [folder / "a", folder / "b"]
        whole = [host.wait() for host in train(folder / "whole", logs)]
        wanted = killing.state_of(folder / "whole") if whole == [0, 0] else {}
        run = folder / "run"
        hosts = train(run, logs)
        while steps(run) < 100 and all(host.poll() is None for host in hosts):
            time.sleep(0.05)
        ip("-n", NAMES[0], "link", "set", "adv0", "down")
        began, ends = time.monotonic(), [0.0, 0.0]
        while not all(ends) and time.monotonic() - began < 10 * LIMIT:
            time.sleep(0.05)
            for k, host in enumerate(hosts):
                if not ends[k] and host.poll() is not None:
                    ends[k] = time.monotonic() - began
        codes = [host.poll() for host in hosts]
        for host in hosts:
            host.kill()
        cut_at = steps(run)
        messages = ["out of reach" in log.read_text() for log in logs]
        ip("-n", NAMES[0], "link", "set", "adv0", "up")
        resumed = [host.wait() for host in train(run, logs)]
        exact = resumed == [0, 0] and killing.state_of(run) == wanted
        text = {log.name: log.read_text()[-3000:] for log in logs}
    passed = all(messages) and exact and min(ends) > 0 and max(ends) < LIMIT
    outcome.write(
        "rank_link",
        wanted="both sides end with a message within 60 s of the cut, the resumed run to the byte",
        passed=passed,
        seed=None,
        seconds=time.time() - start,
        seconds_to_the_end=[round(end, 1) for end in ends],
        exit_codes=codes,
        messages=messages,
        steps_on_disk_at_the_cut=cut_at,
        resumed_exactly=exact,
        settings=SETTINGS,
        how="torchrun --nnodes=2 in two network namespaces with one veth pair, `ip link set down`",
        **({} if passed else {"logs": text}),
    )


if __name__ == "__main__":
    main()
