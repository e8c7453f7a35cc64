"""Load sixty hostile files, each in a process of its own that watches every interpreter event and
its memory."""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import outcome
from tests import faults

from advbayes.store import StoreError, load

LIMIT = 100_000_000
FORBIDDEN = (
    "exec",
    "compile",
    "import",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "subprocess.Popen",
    "pickle.find_class",
)
WRITING = (
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.link",
    "os.symlink",
    "os.truncate",
    "shutil.copyfile",
    "os.chmod",
)


def attempt(path: Path) -> dict[str, object]:
    """Load in a child; what it did."""
    reading, writing = os.pipe()

    def child() -> None:
        events: list[str] = []

        def watch(event: str, arguments: tuple[object, ...]) -> None:
            if event in FORBIDDEN or event in WRITING:
                events.append(event)
            elif (
                event == "open"
                and isinstance(arguments[2], int)
                and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            ):
                events.append(f"open {arguments[0]!r} for writing")

        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        sys.addaudithook(watch)
        start, error, typed = time.time(), "", False
        try:
            load(path)
        except BaseException as caught:
            error, typed = str(caught), isinstance(caught, StoreError)
        seconds = time.time() - start
        seen = list(events)
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        result = {
            "error": error,
            "typed": typed,
            "events": seen,
            "memory": grown,
            "seconds": round(seconds, 3),
        }
        os.write(writing, json.dumps(result).encode())

    status = faults.forked(child)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    return (
        json.loads(text)
        if status == 0
        else {"error": f"died with {status}", "typed": False, "events": [], "memory": 0}
    )


def main() -> None:
    start = time.time()
    with tempfile.TemporaryDirectory() as folder:
        inside = Path(folder) / "files"
        inside.mkdir()
        canary = Path(folder) / "canary"
        made = faults.hostile(inside, canary)
        # whatever loading imports is imported here
        load(outcome.ROOT / "tests" / "data" / "schema1.advbayes")
        before = sorted(map(str, Path(folder).rglob("*")))
        found = {name: attempt(path) for name, path in made.items()}
        clear = {
            name: bool(one["typed"]) and str(made[name]) in str(one["error"])
            for name, one in found.items()
        }
        untouched = sorted(map(str, Path(folder).rglob("*"))) == before and not canary.exists()
        messages = {
            name: str(one["error"]).replace(str(inside), "FILES")[:200]
            for name, one in found.items()
        }
    memory = max(int(str(one["memory"])) for one in found.values())
    outcome.write(
        "bundle_hostile",
        wanted="60 clear errors, nothing executed, nothing written, memory under 100 MB",
        passed=len(found) == 60
        and all(clear.values())
        and untouched
        and memory < LIMIT
        and not any(one["events"] for one in found.values()),
        seed=None,
        seconds=time.time() - start,
        files=len(found),
        clear_errors=sum(clear.values()),
        forbidden_events={name: one["events"] for name, one in found.items() if one["events"]},
        nothing_written=untouched,
        peak_memory_growth_bytes=memory,
        slowest_seconds=max(float(str(one.get("seconds", 0))) for one in found.values()),
        messages=messages,
    )


if __name__ == "__main__":
    main()
