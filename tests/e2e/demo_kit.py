"""Runs the demo's command line the way a shell does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HANDBOOK = Path(__file__).resolve().parents[2] / "examples" / "data" / "lighthouse-handbook.md"


@dataclass(frozen=True)
class Finished:
    """What a command left behind."""

    code: int
    out: str
    err: str

    def report(self) -> dict:
        """Return the one JSON object that is all of standard output."""
        return json.loads(self.out)


def run_cli(*arguments: str | Path, through: Sequence[str] = ("-m", "akvcache")) -> Finished:
    """Run ``akvcache`` in a process of its own."""
    done = subprocess.run(
        [sys.executable, *through, *map(str, arguments)], capture_output=True, text=True, timeout=280, check=False
    )
    return Finished(done.returncode, done.stdout, done.stderr)
