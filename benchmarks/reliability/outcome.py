"""Where a reliability script writes what it found, with all that is needed to run it again."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, os.fspath(ROOT))  # for tests.faults


def machine() -> dict[str, object]:
    """What ran it."""
    return {
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def commit() -> str:
    """The commit of the working tree, with a mark when package or tests differ from it."""
    run = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    clean = subprocess.run(
        ["git", "diff", "--quiet", "HEAD", "--", "src", "tests"], cwd=ROOT, check=False
    )
    return run.stdout.strip() + ("" if clean.returncode == 0 else " (changed)")


def write(
    name: str, *, wanted: str, passed: bool, seed: int | None, seconds: float, **figures: object
) -> None:
    """`results/NAME.json`, and one line on the screen."""
    result = {
        "name": name,
        "wanted": wanted,
        "passed": passed,
        "figures": figures,
        "seed": seed,
        "seconds": round(seconds, 2),
        "command": shlex.join(
            ["python", os.fspath(Path(sys.argv[0]).resolve().relative_to(ROOT)), *sys.argv[1:]]
        ),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
    }
    target = Path(__file__).parent / "results" / f"{name}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{'passed' if passed else 'FAILED'}: {name}: {json.dumps(figures)}")
    if not passed:
        raise SystemExit(1)
