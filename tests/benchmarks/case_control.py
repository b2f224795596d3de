"""The control plane: chunks of 1 MiB that nobody copies, host tier only."""

from __future__ import annotations

import numpy as np

from akvcache.chunking import FixedChunker
from akvcache.connector import NullConnector
from akvcache.keys import CacheNamespace, KeySchema, RequestScope
from akvcache.layout import KVLayout
from akvcache.tokens import canonical_tokens

from .engine_kit import opened
from .measure import Row, Sample, Stopwatch, alternate, median_wall
from .options import Options
from .workload import CHUNK_TOKENS, prompt

NUM_CHUNKS = 312
TARGETS_US = {"store": 30.0, "store again": None, "lookup": 10.0, "retrieve": None}


async def run(options: Options) -> list[Row]:
    """Measure microseconds per chunk of a prompt of 80,000 tokens, keys included, tokens as a list."""
    layout = KVLayout.mha(num_layers=1, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    schema = KeySchema(namespace=CacheNamespace(), layout=layout, chunker=FixedChunker(CHUNK_TOKENS))
    num_tokens = NUM_CHUNKS * CHUNK_TOKENS
    generator = np.random.default_rng(7)
    tokens: list[int] = []
    async with opened(NullConnector(layout), chunk_tokens=CHUNK_TOKENS, num_chunks=NUM_CHUNKS) as engine:

        async def store() -> Sample:
            tokens[:] = prompt(num_tokens, generator)
            await engine.clear()
            with Stopwatch() as watch:
                kept = await engine.store(tokens, None)
            assert kept.new_tokens == num_tokens, kept
            return watch.sample

        async def store_again() -> Sample:
            with Stopwatch() as watch:
                kept = await engine.store(tokens, None)
            assert kept.existing_tokens == num_tokens, kept
            return watch.sample

        async def lookup() -> Sample:
            with Stopwatch() as watch:
                found = await engine.lookup(tokens)
            assert found.hit_tokens == num_tokens, found
            return watch.sample

        async def retrieve() -> Sample:
            with Stopwatch() as watch:
                loaded = await engine.retrieve(tokens, None)
            assert loaded.loaded_tokens == num_tokens, loaded
            return watch.sample

        async def keys() -> Sample:
            with Stopwatch() as watch:
                schema.run(canonical_tokens(tokens), RequestScope())
            return watch.sample

        cases = {"store": store, "store again": store_again, "lookup": lookup, "retrieve": retrieve, "keys": keys}
        samples = await alternate(max(options.rounds, 9), cases, rotate=False)
    keys_us = median_wall(samples["keys"]) / NUM_CHUNKS * 1e6
    rows = []
    for what, target in TARGETS_US.items():
        walls = sorted(sample.wall_s / NUM_CHUNKS * 1e6 for sample in samples[what])
        median = walls[len(walls) // 2]
        rows.append(
            Row(
                what=f"control plane: {what}, per chunk of {NUM_CHUNKS}",
                measured=f"{median:.1f} ({walls[0]:.1f}..{walls[-1]:.1f}) us",
                baseline=f"{keys_us:.1f} us of it keys",
                target=f"<= {target:g} us" if target else "",
                ok=median <= target if target else None,
            )
        )
    return rows
