"""Who wrote a lock or a temporary file, and whether that process is still alive."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

_TAG = re.compile(r"([0-9]{1,10})-([0-9a-f]{8})-([0-9a-z]{1,32})")


@dataclass(frozen=True)
class Owner:
    """A process: its id, its host and when it started (ids are reused, starting times are not).

    >>> me = current()
    >>> me.alive(), Owner(me.pid, me.host, me.place, "0x0").alive(), Owner(me.pid, "other", "ffffffff", "0x0").alive()
    (True, False, None)
    """

    pid: int
    host: str
    place: str  # 8 hex digits for (host, pid namespace): where `pid` means something
    started: str  # boot and clock tick, "0" where the system does not tell

    def alive(self) -> bool | None:
        """Whether the process still runs; None when it cannot be known from here."""
        if self.place != _place():
            return None
        return _alive(self.pid, self.started)

    @property
    def tag(self) -> str:
        """The part of this that a file name carries."""
        return f"{self.pid}-{self.place}-{self.started}"


def current() -> Owner:
    """This process.

    >>> current().pid == os.getpid()
    True
    """
    pid = os.getpid()
    return Owner(pid, platform.node() or "unknown", _place(), _started(pid) or "0")


def dead_tag(tag: str) -> bool:
    """Whether a `tag` was written here by a process that is certainly gone.

    >>> dead_tag(current().tag), dead_tag("not a tag")
    (False, False)
    """
    match = _TAG.fullmatch(tag)
    return match is not None and match[2] == _place() and not _alive(int(match[1]), match[3])


def _alive(pid: int, started: str) -> bool:
    if pid <= 0 or pid > 2**31 - 1:
        return False
    if sys.platform == "win32":
        return True  # signal 0 is not a question there; rather refuse than steal
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it exists and belongs to another user
    now = _started(pid)
    return now is None or started == "0" or now == started


@functools.cache
def _place() -> str:
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return hashlib.sha256(f"{platform.node()}/{namespace}".encode()).hexdigest()[:8]


@functools.cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").replace("-", "")[:8]
    except OSError:
        return "0"


def _started(pid: int) -> str | None:
    """Boot and clock tick at which a process started: field 22 of /proc/PID/stat, counted after the name."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        return f"{_boot()}x{int(stat.rpartition(b')')[2].split()[19])}"
    except (OSError, IndexError, ValueError):
        return None
