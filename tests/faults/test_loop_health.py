"""Invariant 6: the loop is nobody's working place, whatever flows (HG-10).

That no call blocks is asserted by blockbuster, which watches every test; how long the loop was busy at most depends on
the machine, so it is printed here and measured in the benchmarks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from akvcache import CacheEngine, CacheNamespace, EngineConfig
from akvcache.testing import RegionKV

CHUNK = 1024
CHUNKS = 128
BEAT_S = 0.002


@asynccontextmanager
async def beating(gaps: list[float]) -> AsyncGenerator[None]:
    """Note how late each beat of the loop is meanwhile."""
    loop = asyncio.get_running_loop()

    async def beat() -> None:
        while True:
            before = loop.time()
            await asyncio.sleep(BEAT_S)
            gaps.append(loop.time() - before - BEAT_S)

    heart = asyncio.create_task(beat())
    yield
    heart.cancel()
    await asyncio.wait([heart])


@pytest.mark.asyncio
async def test_the_loop_beats_on_while_256_mib_flow(tmp_path: Path) -> None:
    kv = RegionKV(num_regions=1, region_tokens=CHUNK * CHUNKS, num_layers=64, block_tokens=16)
    assert 2 * kv.region_tokens * kv.token_bytes == 256 << 20
    rng = np.random.default_rng(1)
    kv.write(0, rng.integers(0, 256, (kv.region_tokens, kv.token_bytes), dtype=np.uint8))
    before, slots, tokens = kv.read(0), kv.slots(0), rng.integers(0, 50_000, kv.region_tokens)
    config = EngineConfig(
        chunk_tokens=CHUNK,
        host_bytes="40MiB",
        wave_bytes="4MiB",
        window_bytes="16MiB",
        memory_wait_s=30,
        tiers=[f"nvme://{tmp_path / 'cache'}?capacity=256MiB"],
        strict=True,
    )
    gaps: list[float] = []
    async with CacheEngine.open(config, connector=kv.connector, namespace=CacheNamespace(model="loop")) as engine:
        async with beating(gaps):
            kept = await engine.store(tokens, slots)
            await kept.durable()
        assert kept.stored_tokens == kv.region_tokens
        kv.write(0, np.zeros_like(before))
        async with beating(gaps):
            loaded = await engine.retrieve(tokens, slots)
    assert loaded.loaded_tokens == kv.region_tokens
    assert np.array_equal(kv.read(0), before)
    assert len(gaps) > 10
    print(f"{len(gaps)} beats, largest gap {max(gaps) * 1e3:.1f} ms, mean {sum(gaps) / len(gaps) * 1e3:.2f} ms")
