"""Invariant 3 on a real file system: after SIGKILL at any instant, every visible chunk is whole and right (CB-06)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_what_a_killed_engine_leaves_behind_is_right(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.kill9_processes", str(tmp_path / "cache"), "9"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
