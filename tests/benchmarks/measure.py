"""Timing, alternation and tables that both benchmarks share."""

from __future__ import annotations

import asyncio
import json
import platform
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

GB = 1e9
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement: wall and CPU seconds of the whole process."""

    wall_s: float
    cpu_s: float


class Stopwatch:
    """``with Stopwatch() as watch: ...`` leaves the sample in ``watch.sample``."""

    sample: Sample

    def __enter__(self) -> Stopwatch:
        self._cpu = time.process_time()
        self._wall = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        wall = time.perf_counter() - self._wall
        self.sample = Sample(wall, time.process_time() - self._cpu)


Case = Callable[[], Awaitable[Sample]]
"""Prepares, times its core with a `Stopwatch`, cleans up, and returns the sample."""


async def alternate(rounds: int, cases: Mapping[str, Case], *, rotate: bool = True) -> dict[str, list[Sample]]:
    """Run every case once per round; one more round before that is not counted.

    Args:
        rounds: Counted rounds.
        cases: What alternates.
        rotate: Begin each round with the next case; False where a case needs the one before it.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in cases}
    order = list(cases)
    for number in range(rounds + 1):
        shift = number % len(order) if rotate else 0
        for name in order[shift:] + order[:shift]:
            sample = await cases[name]()
            if number:
                samples[name].append(sample)
    return samples


def median_wall(samples: Sequence[Sample]) -> float:
    """Return the median wall time in seconds."""
    return statistics.median(sample.wall_s for sample in samples)


def median_cpu(samples: Sequence[Sample]) -> float:
    """Return the median CPU time in seconds."""
    return statistics.median(sample.cpu_s for sample in samples)


def speed_ratio(samples: Sequence[Sample], baseline: Sequence[Sample]) -> float:
    """Return the median over rounds of baseline time / measured time: 1.0 is as fast as the baseline."""
    return statistics.median(b.wall_s / s.wall_s for s, b in zip(samples, baseline, strict=True))


def spread(samples: Sequence[Sample], scale: float = 1e3, unit: str = "ms") -> str:
    """Return ``median (min..max) unit``."""
    walls = sorted(sample.wall_s * scale for sample in samples)
    return f"{statistics.median(walls):.1f} ({walls[0]:.1f}..{walls[-1]:.1f}) {unit}"


class Heartbeat:
    """A task that sleeps `period_s` again and again and records how late it woke."""

    def __init__(self, period_s: float = 0.001) -> None:
        self._period_s = period_s
        self.late_s: list[float] = []

    async def __aenter__(self) -> Heartbeat:
        self._task = asyncio.create_task(self._beat())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _beat(self) -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(self._period_s)
            self.late_s.append(time.perf_counter() - start - self._period_s)

    def quantile_ms(self, share: float) -> float:
        """Return the lateness that `share` of the beats did not exceed, in milliseconds."""
        late = sorted(self.late_s)
        return late[min(len(late) - 1, int(share * len(late)))] * 1e3

    @property
    def max_ms(self) -> float:
        """Longest lateness in milliseconds."""
        return max(self.late_s) * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the result table; `ok` is None where there is no target."""

    what: str
    measured: str
    baseline: str = ""
    ratio: float | None = None
    target: str = ""
    ok: bool | None = None


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return an aligned table; the first column left, the others right."""
    rows = [list(header), *map(list, lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    rows.insert(1, ["-" * width for width in widths])
    cut = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in cut)


def row_table(rows: Sequence[Row]) -> str:
    """Return `rows` as an aligned table."""
    verdict = {True: "yes", False: "NO", None: ""}
    lines = [
        (r.what, r.measured, r.baseline, "" if r.ratio is None else f"{r.ratio:.2f}", r.target, verdict[r.ok])
        for r in rows
    ]
    return table(("what", "measured", "baseline", "ratio", "target", "ok"), lines)


def machine() -> dict[str, str]:
    """Return what the figures depend on."""
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    threads = Path("/proc/cpuinfo").read_text().count("\nprocessor") + 1
    memory = Path("/proc/meminfo").read_text().split()[1]
    return {
        "cpu": f"{threads} x {cpu}",
        "memory": f"{int(memory) / 2**20:.1f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load at start": load(),
    }


def load() -> str:
    """Return the machine's load over the last minute, this process included.

    A figure taken while others use the cores says little: ratios alternate, so they drift less, but they spread.
    """
    return Path("/proc/loadavg").read_text().split()[0]


def write_json(path: Path, document: Mapping[str, object]) -> None:
    """Write `document`, dataclasses included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, default=asdict) + "\n")
