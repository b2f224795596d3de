"""The types that callers see hold under both checkers, in their strictest mode."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@pytest.mark.timeout(180)
@pytest.mark.parametrize("checker", [["mypy", "--strict"], ["basedpyright"]], ids=lambda c: c[0])
def test_callers_types(checker: list[str]) -> None:
    command = [sys.executable, "-m", *checker, str(HERE / "public_api.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
