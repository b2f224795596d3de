"""The byte cap and the integrity of every visible chunk, with several processes and with kill -9."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mode", ["share", "kill"])
def test_processes_that_share_a_directory(tmp_path: Path, mode: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.nvme_processes", mode, str(tmp_path / "cache")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
