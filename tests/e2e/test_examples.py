"""Every example runs as a user would run it, and shows what it says it shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHOWN = {
    "await_example.py": ["stored 3200 on disk 3200", "loaded 3200", "equal True"],
    "sync_example.py": ["stored 960 of 1000", "loaded 960 from {'host': 960}", "equal True"],
    "custom_backend.py": ["loaded 512", "'sqlite'", "True"],
}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_runs(path: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    at = -1
    for text in SHOWN[path.name]:
        at = done.stdout.find(text, at + 1)
        assert at >= 0, f"{text!r} is not in {done.stdout!r}"
    assert list(tmp_path.iterdir()) == []
