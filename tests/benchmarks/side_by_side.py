"""akvcache, LMCache and the floor without an engine, side by side: same work, same bytes, one run.

Run by `make bench-side-by-side` in the environment of scripts/lmcache_env.sh; with ``--engines ideal,akvcache`` any
environment will do. In every round each engine, in alternating order, takes a new random prompt and goes through

    lookup (a miss) · store · until written · lookup · [drop the host copies] · retrieve

then every byte that came back is compared with the source, and the engine is cleared. The first round is not counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from .engines import ENGINES, Engine, Setup
from .measure import GB, load, machine, table, write_json
from .workload import CHUNK_TOKENS, KV, LAYOUTS, TOKEN_BYTES, NullKV, prompt

T = TypeVar("T")
NATIVE = "lmcache fs_native"
CONTROL_CHUNKS = 312
STEPS = ("store", "written", "lookup", "retrieve")
"""Wall times kept per round; "written" runs from the begin of the store until the tier has everything."""


@dataclass
class Result:
    """All counted rounds of one engine on one case, in seconds."""

    rounds: list[dict[str, float]] = field(default_factory=list)

    def median(self, step: str) -> float:
        """Return the median of one step."""
        return statistics.median(times[step] for times in self.rounds)

    def ratio(self, step: str, other: Result) -> str:
        """Return how many times as fast as `other`: median, least and most over the rounds."""
        ratios = sorted(b[step] / a[step] for a, b in zip(self.rounds, other.rounds, strict=True))
        return f"{statistics.median(ratios):.2f}x ({ratios[0]:.2f}..{ratios[-1]:.2f})"


def _timed(function: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    value = function()
    return value, time.perf_counter() - start


def _round(engine: Engine, setup: Setup, tokens: Sequence[int]) -> dict[str, float]:
    """Take one prompt through one engine; raise if a token or byte is missing."""
    times: dict[str, float] = {}
    setup.kv.zero()
    if engine.lookup(tokens) != 0:
        raise AssertionError("a new prompt was found")
    cpu = time.process_time()
    _, times["store"] = _timed(lambda: engine.store(tokens, setup.source))
    _, wait = _timed(engine.persist)
    times["written"] = times["store"] + wait
    times["store_cpu"] = time.process_time() - cpu
    if setup.tier == "disk":
        engine.drop_host()
    hit, times["lookup"] = _timed(lambda: engine.lookup(tokens))
    cpu = time.process_time()
    loaded, times["retrieve"] = _timed(lambda: engine.retrieve(tokens, setup.kv))
    times["retrieve_cpu"] = time.process_time() - cpu
    if hit != len(tokens) or loaded != len(tokens) or not setup.kv.equals(setup.source):
        raise AssertionError(f"hit {hit} and loaded {loaded} of {len(tokens)} tokens, or the bytes differ")
    engine.clear()
    return times


def _native_round(setup: Setup) -> dict[str, float]:
    from .peer_lmcache import native_adapter

    store, load = native_adapter(setup.directory, setup.num_tokens, setup.direct)
    return {"store": store, "written": store, "lookup": 0.0, "retrieve": load}


def run_case(setups: Mapping[str, Setup], rounds: int, generator: np.random.Generator) -> dict[str, Result]:
    """Run all engines on one case, alternating inside each round."""
    engines = {name: ENGINES[name](setup) for name, setup in setups.items() if name != NATIVE}
    results = {name: Result() for name in setups}
    for engine in engines.values():
        engine.warm()
    try:
        for number in range(rounds + 1):
            tokens = prompt(next(iter(setups.values())).num_tokens, generator)
            names = list(setups)
            for name in names if number % 2 else reversed(names):
                setup = setups[name]
                times = _round(engines[name], setup, tokens) if name in engines else _native_round(setup)
                if number:
                    results[name].rounds.append(times)
    finally:
        for engine in engines.values():
            engine.close()
    return results


def report(case: str, num_bytes: int, results: Mapping[str, Result]) -> str:
    """Return the table of one case: medians, GB/s if bytes moved, and how many times as fast as each other engine."""
    size = num_bytes / GB
    lines = []
    for name, result in results.items():
        cells = [name]
        for step in STEPS:
            seconds = result.median(step)
            rate = f" {size / seconds:5.2f}" if size and step != "lookup" and seconds else ""
            cells.append(f"{seconds * 1e3:.{1 if size else 2}f}{rate}" if seconds else "-")
        cells.append(
            f"{result.median('retrieve_cpu') / size:.2f}" if size and "retrieve_cpu" in result.rounds[0] else "-"
        )
        lines.append(cells)
    ours = results.get("akvcache")
    for name, other in results.items() if ours else ():
        if other is not ours:
            cells = [f"akvcache / {name}"]
            cells += [ours.ratio(step, other) if other.median(step) else "-" for step in STEPS]
            lines.append([*cells, ""])
    header = ("engine", "store ms GB/s", "written ms GB/s", "lookup ms", "retrieve ms GB/s", "CPU s/GB")
    return f"{case}\n{table(header, lines)}\n"


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="side_by_side", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--engines", default="ideal,lmcache,akvcache", help="any of %(default)s")
    parser.add_argument("--tiers", default="control,cpu,disk")
    parser.add_argument("--tokens", default="8192,32768")
    parser.add_argument("--layouts", default="flat,paged")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--buffered", action="store_true", help="the disk through the page cache, not O_DIRECT")
    parser.add_argument(
        "--no-native", action="store_true", help="leave out LMCache's own `bench l2` on its C++ adapter"
    )
    parser.add_argument("--dir", type=Path, default=Path(".cache/side-by-side"), help="on a real disk, not tmpfs")
    parser.add_argument("--json", type=Path, default=None, help="write every round to this file")
    return parser.parse_args(argv)


@dataclass(frozen=True, slots=True)
class Case:
    """One table: a tier, a layout and a length."""

    name: str
    tier: str
    num_tokens: int
    source: KV
    destination: KV


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield what the command line asks for; caches of one layout and length are shared by the tiers."""
    tiers = options.tiers.split(",")
    if "control" in tiers:
        name = f"control plane, {CONTROL_CHUNKS} chunks of 1 MiB that nobody copies"
        yield Case(name, "control", CONTROL_CHUNKS * CHUNK_TOKENS, NullKV(), NullKV())
    names = {"cpu": "host memory", "disk": "disk, buffered" if options.buffered else "disk, O_DIRECT"}
    for layout in options.layouts.split(","):
        for num_tokens in map(int, options.tokens.split(",")):
            source, destination = LAYOUTS[layout](num_tokens, seed=11), LAYOUTS[layout](num_tokens)
            for tier in (tier for tier in tiers if tier in names):
                size = num_tokens * TOKEN_BYTES >> 20
                yield Case(
                    f"{names[tier]}, {layout}, {num_tokens} tokens ({size} MiB)", tier, num_tokens, source, destination
                )


def main(argv: Sequence[str]) -> None:
    """Run what the command line asks for."""
    options = arguments(argv)
    torch.set_num_threads(1)
    options.dir.mkdir(parents=True, exist_ok=True)
    about = machine()
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    names = options.engines.split(",")
    rounds: dict[str, object] = {}
    generator = np.random.default_rng(3)
    for case in cases(options):
        engines = [name for name in names if not (case.tier == "control" and name == "ideal")]
        if case.tier == "disk" and "lmcache" in names and not options.no_native:
            engines.append(NATIVE)
        with tempfile.TemporaryDirectory(dir=options.dir) as directory:
            setups = {
                name: Setup(
                    tier=case.tier,
                    directory=Path(directory).resolve() / name.replace(" ", "-"),
                    direct=not options.buffered,
                    num_tokens=case.num_tokens,
                    kv=case.destination,
                    source=case.source,
                )
                for name in engines
            }
            results = run_case(setups, options.rounds, generator)
        moved = 0 if case.tier == "control" else case.num_tokens * TOKEN_BYTES
        print(f"{report(case.name, moved, results)}load {load()}\n", flush=True)
        rounds[case.name] = {name: result.rounds for name, result in results.items()}
    if options.json:
        parameters = {name: str(value) for name, value in vars(options).items()}
        write_json(options.json, {"machine": about, "options": parameters, "rounds": rounds})


if __name__ == "__main__":
    # LMCache leaves threads that never end: stop without waiting for them.
    status = 1
    try:
        main(sys.argv[1:])
        status = 0
    except SystemExit as error:
        status = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)
