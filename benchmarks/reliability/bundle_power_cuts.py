"""Cut the power at every step of a save, on a disk that promises no more than POSIX does.

A save is recorded as a list of changes. After a cut, a change that no `fsync` covered may be there
or not, independently of all others; a written block may be whole, half or missing. For each step,
many such disks are built and read: a bundle must be the old one or the new one, and the new one
    once the save has returned; a log must hold every record that was acknowledged.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import outcome
from tests import faults

from advbayes.store import RecordLog, read_bundle

SEED = 0
RANDOM_DISKS = 12  # for each step, besides the systematic ones


@dataclass
class Change:
    """One change, what it acts on, and the step at which an `fsync` made it durable."""

    kind: str  # data, size, names
    inode: int  # of the file, or of the folder whose names change
    step: int
    offset: int = 0
    content: bytes = b""
    names: dict[str, int | None] = field(default_factory=dict)  # name -> inode, None: removed
    durable: int | None = None


class Recorder:
    """Watches the calls of a save below a folder."""

    def __init__(self, base: Path) -> None:
        self.base = base.resolve()
        self.changes: list[Change] = []
        self.step = 0
        self.open: dict[int, tuple[int, list[int]]] = {}
        self.folders: dict[int, dict[str, int]] = {}
        self.files: dict[int, bytes] = {}
        self._scan(self.base)
        self.root = self.base.stat().st_ino

    def _scan(self, folder: Path) -> None:
        names = self.folders.setdefault(folder.stat().st_ino, {})
        for entry in folder.iterdir():
            names[entry.name] = entry.stat().st_ino
            if entry.is_dir():
                self._scan(entry)
            else:
                self.files[entry.stat().st_ino] = entry.read_bytes()

    def record(self, action: Callable[[], object]) -> None:
        originals = {name: getattr(os, name) for name in (*faults.CALLS, "lseek")}

        def wrapped(name: str) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                before = self._before(name, args)
                result = originals[name](*args, **options)
                self._after(name, args, result, before)
                return result

            return call

        for name in originals:
            setattr(os, name, wrapped(name))
        try:
            action()
        finally:
            for name, original in originals.items():
                setattr(os, name, original)

    def _before(self, name: str, args: tuple[Any, ...]) -> int | None:
        if name in ("replace", "rename", "unlink", "open"):
            try:
                return os.stat(args[0], follow_symlinks=False).st_ino
            except OSError:
                return None
        return None

    def _place(self, path: Any) -> tuple[int, str]:
        path = Path(os.path.abspath(path))
        return path.parent.stat().st_ino, path.name

    def _add(self, kind: str, inode: int, **more: Any) -> None:
        self.step += 1
        self.changes.append(Change(kind, inode, self.step, **more))

    def _after(self, name: str, args: tuple[Any, ...], result: Any, before: int | None) -> None:
        if name == "open":
            inode = os.fstat(result).st_ino
            self.open[result] = (inode, [0])
            if before is None:
                parent, own = self._place(args[0])
                self._add("names", parent, names={own: inode})
        elif name == "mkdir":
            parent, own = self._place(args[0])
            self._add("names", parent, names={own: os.stat(args[0]).st_ino})
            self.folders.setdefault(os.stat(args[0]).st_ino, {})
        elif name == "close":
            self.open.pop(args[0], None)
        elif name == "lseek" and args[0] in self.open:
            self.open[args[0]][1][0] = result
        elif name == "write" and args[0] in self.open:
            inode, position = self.open[args[0]]
            self._add("data", inode, offset=position[0], content=bytes(args[1][:result]))
            position[0] += result
        elif name == "ftruncate" and args[0] in self.open:
            self._add("size", self.open[args[0]][0], offset=args[1])
        elif name in ("replace", "rename"):
            (parent, old), (other, new) = self._place(args[0]), self._place(args[1])
            if parent == other:
                self._add("names", parent, names={old: None, new: before})
            else:  # either folder may reach the disk without the other
                self._add("names", other, names={new: before})
                self._add("names", parent, names={old: None})
        elif name in ("unlink", "rmdir"):
            parent, own = self._place(args[0])
            self._add("names", parent, names={own: None})
        elif name == "fsync" and args[0] in self.open:
            self.step += 1
            inode = self.open[args[0]][0]
            for change in self.changes:
                if change.inode == inode and change.durable is None:
                    change.durable = self.step

    def disk(self, step: int, chance: Callable[[Change], float], target: Path) -> None:
        """What may be found after a cut at a step: durable changes, and each other one by `chance`
        (0, part, 1)."""
        files = dict(self.files)
        folders = {inode: dict(names) for inode, names in self.folders.items()}
        for change in self.changes:
            if change.step > step:
                break
            share = 1.0 if change.durable is not None and change.durable <= step else chance(change)
            if share == 0:
                continue
            if change.kind == "names":
                for name, inode in change.names.items():
                    folders[change.inode].pop(name, None)
                    if inode is not None:
                        folders[change.inode][name] = inode
            elif change.kind == "size":
                files[change.inode] = files.get(change.inode, b"")[: change.offset].ljust(
                    change.offset, b"\0"
                )
            else:
                content = change.content[: round(share * len(change.content))]
                old = files.get(change.inode, b"").ljust(change.offset, b"\0")
                files[change.inode] = (
                    old[: change.offset] + content + old[change.offset + len(content) :]
                )
        self._build(self.root, folders, files, target)

    def _build(
        self, inode: int, folders: dict[int, dict[str, int]], files: dict[int, bytes], target: Path
    ) -> None:
        target.mkdir()
        for name, child in folders[inode].items():
            if child in folders:
                self._build(child, folders, files, target / name)
            else:
                (target / name).write_bytes(files.get(child, b""))


def disks(recorder: Recorder, step: int, draw: random.Random) -> list[Callable[[Change], float]]:
    """Nothing, everything, everything but one, one alone, halves of files, and random choices."""
    pending = [
        c for c in recorder.changes if c.step <= step and (c.durable is None or c.durable > step)
    ]
    chosen: list[Callable[[Change], float]] = [
        lambda change: 0.0,
        lambda change: 1.0,
        # names reached the disk, contents did not
        lambda change: 1.0 if change.kind == "names" else 0.0,
        lambda change: 1.0 if change.kind == "names" else 0.5,
    ]
    for one in pending:
        chosen.append(lambda change, one=one: float(change is one))
        chosen.append(lambda change, one=one: float(change is not one))
    for _ in range(RANDOM_DISKS if pending else 0):
        shares = {id(change): draw.choice((0.0, 0.5, 1.0)) for change in pending}
        chosen.append(lambda change, shares=shares: shares[id(change)])
    return chosen


def trial(
    base: Path,
    action: Callable[[], object],
    check: Callable[[Path, bool], None],
    draw: random.Random,
) -> tuple[int, int, list[str]]:
    """Steps, disks and failures of one recorded action."""
    recorder = Recorder(base)
    recorder.record(action)
    count, failures = 0, []
    last = recorder.step
    for step in range(last + 1):
        for chance in disks(recorder, step, draw):
            count += 1
            target = base.parent / "disk"
            recorder.disk(step, chance, target)
            try:
                check(target, step == last)
            except Exception as error:
                failures.append(f"step {step}: {error!r}")
            shutil.rmtree(target)
    return last + 1, count, failures


def main() -> None:
    start = time.time()
    draw = random.Random(SEED)
    steps, count = {}, {}
    failures: list[str] = []
    for form in ("checkpoint", "checkpoint.advbayes"):
        for before in (True, False):
            name = f"{form}, {'replaced' if before else 'new'}"
            with tempfile.TemporaryDirectory() as folder:
                base = Path(folder) / "base"
                base.mkdir()
                if before:
                    faults.small_bundle(base / form, 1)

                def check(disk: Path, done: bool, form: str = form, before: bool = before) -> None:
                    there = (disk / form).exists()
                    version = (
                        faults.small_version(read_bundle(disk / form))
                        if there or before or done
                        else 0
                    )
                    assert version == 2 or (not done and version == (1 if before else 0)), (
                        f"version {version}"
                    )

                steps[name], count[name], found = trial(
                    base,
                    lambda base=base, form=form: faults.small_bundle(base / form, 2),
                    check,
                    draw,
                )
                failures += [f"{name}: {failure}" for failure in found]
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        base.mkdir()
        old = [{"step": step, "note": "x" * 300} for step in range(5)]
        new = [{"step": step, "note": "y" * 300} for step in range(5, 12)]
        RecordLog(base / "log").append(*old)

        def whole(disk: Path, done: bool) -> None:
            read = RecordLog(disk / "log").read()
            assert read == (old + new)[: len(read)], "other records"
            assert len(read) >= len(old) + (len(new) if done else 0), f"{len(read)} records"
            RecordLog(disk / "log").append({"step": 99})
            assert RecordLog(disk / "log").read() == [*read, {"step": 99}]

        steps["log"], count["log"], found = trial(
            base, lambda: RecordLog(base / "log").append(*new), whole, draw
        )
        failures += [f"log: {failure}" for failure in found]
    outcome.write(
        "bundle_power_cuts",
        wanted="after any power cut the old or the new bundle, the new one once saved; every "
        "acknowledged record",
        passed=not failures,
        seed=SEED,
        seconds=time.time() - start,
        steps=steps,
        disks=count,
        failures=failures[:20],
    )


if __name__ == "__main__":
    main()
