"""Scripts in a process of their own that need not load torch again: a fork of this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch


def start(script: str, out: int, err: int, *, anew: bool = False) -> int:
    """`python -c SCRIPT` that writes to these descriptors; its process id.

    Modules that are loaded stay loaded; with `anew` those of the package are loaded again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        _run(script, out, err, anew)
    return pid


@contextmanager
def limited(pid: int, seconds: float = 120) -> Iterator[None]:
    """Kills a child that has not been waited for by then."""
    late = threading.Timer(seconds, os.kill, (pid, signal.SIGKILL))
    late.start()
    try:
        yield
    finally:
        late.cancel()


def ran(script: str, *, anew: bool = False) -> subprocess.CompletedProcess[str]:
    """The same to its end: exit code and what it wrote."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = start(script, out.fileno(), err.fileno(), anew=anew)
        with limited(pid):
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for stream in (out, err):
            stream.seek(0)
        return subprocess.CompletedProcess(script, code, out.read(), err.read())


def _run(script: str, out: int, err: int, anew: bool) -> NoReturn:
    code = 1
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
        sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, closefd=False)
        torch.set_num_threads(1)  # a fork has none of its parent's threads
        if anew:
            for name in [name for name in sys.modules if name.split(".")[0] == "advbayes"]:
                del sys.modules[name]
        exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
