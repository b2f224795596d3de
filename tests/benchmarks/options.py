"""What the command line of `bench.py` says, as the cases read it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Options:
    """Parameters of a run.

    Attributes:
        rounds: Counted rounds of each measurement.
        quick: Smaller amounts of data, for a look.
        directory: Empty directory on a real disk.
    """

    rounds: int
    quick: bool
    directory: Path
