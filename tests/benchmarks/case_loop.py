"""How long the event loop is away: during 1 GiB of traffic, and while 100 requests wait for memory."""

from __future__ import annotations

import asyncio
import statistics

import numpy as np

from akvcache.connector import NullConnector
from akvcache.layout import KVLayout

from .connectors import connect
from .engine_kit import drop_host, make_nvme, opened, slots_bytes
from .measure import Heartbeat, Row
from .options import Options
from .workload import CHUNK_TOKENS, TOKEN_BYTES, FlatKV, prompt

STALL_TARGET_MS = 20.0
LAG_TARGET_MS = 5.0
WAITING = 100
CHUNKS_EACH = 4


async def run_stall(options: Options) -> list[Row]:
    """Measure the longest stall while a prompt of 512 MiB is stored to the disk tier and retrieved from it."""
    num_tokens = 4096 if options.quick else 16384
    num_chunks = num_tokens // CHUNK_TOKENS
    rounds = 3 if options.quick else 5
    source, destination = FlatKV(num_tokens, seed=8), FlatKV(num_tokens)
    connector, store_kv, retrieve_kv = connect(source, destination)
    capacity = 2 * slots_bytes(connector.layout, CHUNK_TOKENS, num_chunks)
    generator = np.random.default_rng(9)
    beats: list[Heartbeat] = []
    tiers = [make_nvme(options.directory, capacity)]
    async with opened(connector, chunk_tokens=CHUNK_TOKENS, num_chunks=num_chunks, tiers=tiers) as engine:
        for _ in range(rounds + 1):
            tokens = prompt(num_tokens, generator)
            async with Heartbeat() as beat:
                kept = await engine.store(tokens, store_kv)
                await kept.durable()
            await drop_host(engine)
            async with Heartbeat() as back:
                loaded = await engine.retrieve(tokens, retrieve_kv)
            assert loaded.loaded_tokens == num_tokens, loaded
            beat.late_s += back.late_s
            beats.append(beat)
    async with Heartbeat() as idle:
        await asyncio.sleep(1.0)
    traffic = 2 * num_tokens * TOKEN_BYTES / 2**30
    return [_lag_row(f"longest loop stall, {traffic:g} GiB of NVMe traffic", beats[1:], idle, STALL_TARGET_MS, 1.0)]


async def run_pressure(options: Options) -> list[Row]:
    """Measure the loop's lag while 100 stores wait for slots that a lease keeps from them."""
    layout = KVLayout.mha(num_layers=1, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    beats = [await _wait_for_memory(layout) for _ in range(3 if options.quick else 7)]
    async with Heartbeat() as idle:
        await asyncio.sleep(1.0)
    return [_lag_row(f"loop lag p99, {WAITING} stores waiting for memory", beats, idle, LAG_TARGET_MS, 0.99)]


async def _wait_for_memory(layout: KVLayout) -> Heartbeat:
    generator = np.random.default_rng(10)
    async with opened(NullConnector(layout), chunk_tokens=CHUNK_TOKENS, num_chunks=64, memory_wait_s=30.0) as engine:
        held = prompt(66 * CHUNK_TOKENS, generator)
        await engine.store(held, None)
        found = await engine.lookup(held, lease_s=60)
        assert found.lease is not None
        prompts = [prompt(CHUNKS_EACH * CHUNK_TOKENS, generator) for _ in range(WAITING)]
        async with Heartbeat() as beat:
            waiting = asyncio.gather(*(engine.store(tokens, None) for tokens in prompts))
            await asyncio.sleep(0.5)
            assert not waiting.done()
            found.lease.release()
            results = await waiting
        assert all(kept.stored_tokens for kept in results), results
    return beat


def _lag_row(what: str, beats: list[Heartbeat], idle: Heartbeat, target: float, share: float) -> Row:
    lags = [beat.quantile_ms(share) for beat in beats]
    median = statistics.median(lags)
    return Row(
        what=what,
        measured=f"{median:.1f} ({min(lags):.1f}..{max(lags):.1f}) ms",
        baseline=f"idle {idle.quantile_ms(share):.1f} ms",
        target=f"<= {target:g} ms",
        ok=median <= target,
    )
