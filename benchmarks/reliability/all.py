"""Run every reliability script on one commit, one after the other.

A worktree holds the commit, so that nothing changes on the way. A script whose record is of that
commit already is left out: the same command, with --commit where there are newer ones, resumes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Each record with the script that writes it, the quick ones first.
SCRIPTS = {
    "bundle_damage": ["bundle_damage.py"],
    "bundle_full_disk": ["bundle_full_disk.py"],
    "purifier_damage": ["purifier_damage.py"],
    "bundle_power_cuts": ["bundle_power_cuts.py"],
    "bundle_hostile": ["bundle_hostile.py"],
    "run_configs": ["run_configs.py"],
    "bundle_fuzz": ["bundle_fuzz.py"],
    "run_faults": ["run_faults.py"],
    "run_twice": ["run_twice.py"],
    "threads": ["threads.py"],
    "bundle_kills": ["bundle_kills.py"],
    "bundle_rivals": ["bundle_rivals.py"],
    "run_kills": ["run_kills.py"],
    "run_signals": ["run_signals.py"],
    "run_signals_early": ["run_signals.py", "early"],
    "run_rivals": ["run_rivals.py"],
    "purifier_kills": ["purifier_kills.py"],
    "rank_link": ["rank_link.py"],  # needs root, for network namespaces
    "rank_kills": ["rank_kills.py"],
}


def git(*words: str) -> str:
    """What a git command says."""
    run = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def is_of(commit: str, record: Path) -> bool:
    """Whether a record passed on a commit."""
    if not record.exists():
        return False
    held = json.loads(record.read_text())
    return bool(held["passed"]) and held["commit"] == commit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--only", nargs="*", choices=SCRIPTS, default=list(SCRIPTS))
    asked = parser.parse_args()
    commit = git("rev-parse", asked.commit)
    left = [name for name in asked.only if not is_of(commit, HERE / "results" / f"{name}.json")]
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "advbayes"
        git("worktree", "add", "--detach", os.fspath(tree), commit)
        try:
            inside = tree / HERE.relative_to(ROOT)
            for number, name in enumerate(left, 1):
                print(f"{number} of {len(left)}: {name}", flush=True)
                script, *words = SCRIPTS[name]
                record = inside / "results" / f"{name}.json"
                record.unlink(missing_ok=True)
                environment = {**os.environ, "PYTHONPATH": os.fspath(tree / "src")}
                command = [sys.executable, os.fspath(inside / script), *words]
                if subprocess.run(command, cwd=tree, env=environment, check=False).returncode:
                    failed.append(name)
                if record.exists():
                    shutil.copy(record, HERE / "results")
        finally:
            git("worktree", "remove", "--force", os.fspath(tree))
    print(f"{len(left) - len(failed)} of {len(left)} passed on {commit}", *failed)
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
