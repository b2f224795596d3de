"""Opening engines for measurement."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from akvcache import CacheEngine, CacheNamespace, EngineConfig
from akvcache.backend import Backend
from akvcache.connector import KVConnector
from akvcache.frame import frame_bytes
from akvcache.layout import KVLayout

NAMESPACE = CacheNamespace(model="benchmark", weights_version="1")
SPARE_SLOTS = 4
"""Slots beyond the workload: the staging reserve and a little more."""


def slots_bytes(layout: KVLayout, chunk_tokens: int, num_chunks: int) -> int:
    """Return the size of a host pool for `num_chunks` chunks and the spare ones."""
    return frame_bytes(layout.payload_bytes(chunk_tokens)) * (num_chunks + SPARE_SLOTS)


def make_nvme(directory: Path, capacity: int, options: str = "") -> Backend:
    """Return an unopened NVMe backend on `directory`, which it makes.

    The class is imported here, not found by its entry point: the environment with LMCache has no installed akvcache.
    """
    from akvcache_nvme import NvmeBackend

    directory.mkdir(parents=True, exist_ok=True)
    return NvmeBackend.from_url(f"nvme://{directory}?capacity={capacity}{options}")


@asynccontextmanager
async def opened(
    connector: KVConnector[object],
    *,
    chunk_tokens: int,
    num_chunks: int,
    tiers: Sequence[Backend] = (),
    memory_wait_s: float = 1.0,
) -> AsyncIterator[CacheEngine[object]]:
    """Open an engine whose pool holds `num_chunks` chunks, all of its memory touched."""
    pool = slots_bytes(connector.layout, chunk_tokens, num_chunks)
    config = EngineConfig(chunk_tokens=chunk_tokens, host_bytes=pool, memory_wait_s=memory_wait_s, strict=True)
    async with CacheEngine.open(config, connector=connector, namespace=NAMESPACE, tiers=tiers) as engine:
        await touched()
        yield engine


async def touched() -> None:
    """Wait until the memory of this process has stopped growing: a pool is touched in the background."""
    steady, before = 0, resident_bytes()
    while steady < 5:
        await asyncio.sleep(0.02)
        now = resident_bytes()
        steady, before = (steady + 1 if now - before < 1 << 20 else 0), now


def resident_bytes() -> int:
    """Return the memory of this process that is backed by pages."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def drop_host(engine: CacheEngine[object]) -> None:
    """Empty the host tier and no other: a change of weights does that, and changing back brings the tiers back."""
    await engine.set_weights_version("none")
    await engine.set_weights_version(NAMESPACE.weights_version)
