"""akvcache against the physical limits of the machine it runs on: one table of ratios, all measured in one run.

Run by `make bench`. Every ratio is measured against a baseline that alternates with it, round by round: it is the
median over the rounds of baseline time / measured time, so 1.00 is as fast as the machine can go.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from . import case_control, case_host, case_keys, case_loop, case_nvme
from .measure import Row, load, machine, row_table, write_json
from .options import Options
from .raw_disk import filesystem_of

CASES: Mapping[str, Callable[[Options], Awaitable[list[Row]]]] = {
    "keys": case_keys.run,
    "control": case_control.run,
    "host": case_host.run,
    "nvme": case_nvme.run,
    "overlap": case_nvme.run_overlap,
    "stall": case_loop.run_stall,
    "pressure": case_loop.run_pressure,
}


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", default=",".join(CASES), help="any of %(default)s")
    parser.add_argument("--rounds", type=int, default=9, help="counted rounds of each measurement")
    parser.add_argument("--quick", action="store_true", help="3 rounds and less data, for a look")
    parser.add_argument("--dir", type=Path, default=Path(".cache/bench"), help="on a real disk, not tmpfs")
    parser.add_argument("--json", type=Path, default=None, help="write the rows to this file")
    options = parser.parse_args(argv)
    unknown = set(options.only.split(",")) - set(CASES)
    if unknown:
        parser.error(f"unknown case {', '.join(sorted(unknown))}; known are {', '.join(CASES)}")
    return options


def main(argv: Sequence[str]) -> int:
    """Run the cases and print the table; return how many targets were missed."""
    parsed = arguments(argv)
    rounds = 3 if parsed.quick else parsed.rounds
    parsed.dir.mkdir(parents=True, exist_ok=True)
    about = {**machine(), "file system": filesystem_of(parsed.dir)}
    if about["file system"] in ("tmpfs", "ramfs"):
        sys.exit(f"{parsed.dir} is on {about['file system']}: give --dir a directory on a disk")
    print(", ".join(f"{name} {value}" for name, value in about.items()), file=sys.stderr)
    rows: list[Row] = []
    loads: dict[str, str] = {}
    for name in parsed.only.split(","):
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=parsed.dir) as directory:
            options = Options(rounds, parsed.quick, Path(directory).resolve())
            found = asyncio.run(CASES[name](options))
        print(f"{name}: {time.perf_counter() - start:.1f} s, load {load()}", file=sys.stderr, flush=True)
        loads[name] = load()
        rows += found
    print(row_table(rows))
    if parsed.json:
        write_json(parsed.json, {"machine": about, "load after": loads, "rounds": rounds, "rows": rows})
    return sum(row.ok is False for row in rows)


if __name__ == "__main__":
    print(f"{main(sys.argv[1:])} targets missed")
