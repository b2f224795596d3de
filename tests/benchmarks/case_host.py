"""The host tier on a CPU device: store and retrieve against a bare memcpy of the same bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from akvcache import CacheEngine

from .connectors import connect
from .engine_kit import opened
from .measure import GB, Case, Row, Sample, Stopwatch, alternate, median_cpu, median_wall, speed_ratio, spread
from .memory import huge_buffer
from .options import Options
from .workload import CHUNK_TOKENS, LAYOUTS, TOKEN_BYTES, FlatKV, prompt, spans

TARGET = 0.8


async def run(options: Options) -> list[Row]:
    """Measure both layouts."""
    num_tokens = 8192 if options.quick else 16384
    return [row for layout in LAYOUTS for row in await _layout(layout, num_tokens, options)]


async def _layout(layout: str, num_tokens: int, options: Options) -> list[Row]:
    source, destination = LAYOUTS[layout](num_tokens, seed=5), LAYOUTS[layout](num_tokens)
    connector, store_kv, retrieve_kv = connect(source, destination)
    generator = np.random.default_rng(6)
    tokens: list[int] = []

    async with opened(connector, chunk_tokens=CHUNK_TOKENS, num_chunks=num_tokens // CHUNK_TOKENS) as engine:

        async def store() -> Sample:
            tokens[:] = prompt(num_tokens, generator)
            await engine.clear()
            return await _store(engine, tokens, store_kv)

        async def retrieve() -> Sample:
            with Stopwatch() as watch:
                loaded = await engine.retrieve(tokens, retrieve_kv)
            assert loaded.loaded_tokens == num_tokens, loaded
            return watch.sample

        plain = FlatKV(num_tokens, seed=5).data.reshape(-1)
        slots = huge_buffer(plain.size)
        # One order only: a retrieve needs the store before it.
        chunks = [memoryview(chunk) for chunk in slots.reshape(-1, CHUNK_TOKENS * TOKEN_BYTES)]
        cases = {
            "store": store,
            "retrieve": retrieve,
            "in": _timed(lambda: np.copyto(slots, plain)),
            "gather": _timed(lambda: connector.gather(store_kv, spans(num_tokens), chunks)),
            "out": _timed(lambda: np.copyto(plain, slots)),
            "scatter": _timed(lambda: connector.scatter(retrieve_kv, spans(num_tokens), chunks)),
        }
        samples = await alternate(options.rounds, cases, rotate=False)
    assert destination.equals(source)
    size = num_tokens * TOKEN_BYTES / GB
    return [
        Row(
            what=f"host tier {what}, {layout}, {num_tokens} tokens",
            measured=f"{spread(samples[what])}, {median_cpu(samples[what]) / size:.2f} CPU s/GB",
            baseline=f"{spread(samples[copy])} memcpy, {median_wall(samples[move]) * 1e3:.1f} connector alone",
            ratio=(ratio := speed_ratio(samples[what], samples[copy])),
            target=f">= {TARGET}",
            ok=ratio >= TARGET,
        )
        for what, copy, move in (("store", "in", "gather"), ("retrieve", "out", "scatter"))
    ]


async def _store(engine: CacheEngine[object], tokens: list[int], kv: object) -> Sample:
    with Stopwatch() as watch:
        kept = await engine.store(tokens, kv)
    assert kept.new_tokens == len(tokens), kept
    return watch.sample


def _timed(copy: Callable[[], object]) -> Case:
    async def case() -> Sample:
        with Stopwatch() as watch:
            copy()
        return watch.sample

    return case
