"""akvcache behind the `Engine` protocol, on an event loop that runs while a call does."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from contextlib import AsyncExitStack

from akvcache import CacheEngine, EngineConfig, StoreResult

from .connectors import connect
from .engine_kit import NAMESPACE, drop_host, make_nvme, touched
from .engines import Setup
from .workload import CHUNK_TOKENS, KV


class AkvCache:
    """The engine with its defaults: SHA-256 keys, checksums, a pool as large as the other engines have."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._loop = asyncio.new_event_loop()
        self._exits = AsyncExitStack()
        self._connector, self._store_kv, self._retrieve_kv = connect(setup.source, setup.kv)
        self._kept: StoreResult | None = None
        self._engine = self._loop.run_until_complete(self._open())

    async def _open(self) -> CacheEngine[object]:
        size = self._setup.size
        tiers = []
        if self._setup.tier == "disk":
            direct = "" if self._setup.direct else "&direct=off"
            tiers.append(make_nvme(self._setup.directory, 8 << 30, direct))
        pool = int(2.5 * size)
        config = EngineConfig(
            chunk_tokens=CHUNK_TOKENS, host_bytes=pool, write_queue_bytes=size + (1 << 20), strict=True
        )
        opening = CacheEngine.open(config, connector=self._connector, namespace=NAMESPACE, tiers=tiers)
        engine = await self._exits.enter_async_context(opening)
        await touched()
        return engine

    def warm(self) -> None:
        """See `Engine.warm`. Opening touched the pool."""

    def store(self, tokens: Sequence[int], kv: KV) -> None:
        """See `Engine.store`."""
        self._kept = self._loop.run_until_complete(self._engine.store(tokens, self._store_kv))
        assert self._kept.new_tokens == len(tokens), self._kept

    def persist(self) -> None:
        """See `Engine.persist`."""
        assert self._kept is not None
        if self._setup.tier == "disk":
            durable = self._loop.run_until_complete(self._kept.durable())
            assert durable.durable_tokens == self._kept.total_tokens, durable

    def lookup(self, tokens: Sequence[int]) -> int:
        """See `Engine.lookup`."""
        return self._loop.run_until_complete(self._engine.lookup(tokens)).hit_tokens

    def drop_host(self) -> None:
        """See `Engine.drop_host`."""
        self._loop.run_until_complete(drop_host(self._engine))

    def retrieve(self, tokens: Sequence[int], kv: KV) -> int:
        """See `Engine.retrieve`."""
        return self._loop.run_until_complete(self._engine.retrieve(tokens, self._retrieve_kv)).loaded_tokens

    def clear(self) -> None:
        """See `Engine.clear`."""
        self._loop.run_until_complete(self._engine.clear())

    def close(self) -> None:
        """See `Engine.close`."""
        self._loop.run_until_complete(self._exits.aclose())
        self._loop.close()
        shutil.rmtree(self._setup.directory, ignore_errors=True)
