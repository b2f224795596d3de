"""The reference backend keeps the contract, and so does it behind a `FaultyBackend` with nothing planned."""

from __future__ import annotations

import pytest

from akvcache.backend import Backend, BackendContext
from akvcache.keys import ChunkKey
from akvcache.testing import CapacityContract, FaultyBackend, MemoryBackend, MemoryStore


class TestMemoryBackend(CapacityContract):
    @pytest.fixture(autouse=True)
    def storage(self) -> None:
        self.store = MemoryStore()

    def wrap(self, backend: MemoryBackend) -> Backend:
        return backend

    async def open_backend(self, context: BackendContext) -> Backend:
        backend = self.wrap(MemoryBackend(self.store))
        await backend.open(context)
        return backend

    async def open_bounded_backend(self, context: BackendContext, capacity_bytes: int) -> Backend:
        backend = self.wrap(MemoryBackend(self.store, capacity_bytes=capacity_bytes))
        await backend.open(context)
        return backend

    def raw_get(self, key: ChunkKey) -> bytes | None:
        return self.store.frames.get(key)

    def raw_set(self, key: ChunkKey, data: bytes) -> None:
        self.store.frames[key] = data


class TestPassThroughFaultyBackend(TestMemoryBackend):
    def wrap(self, backend: MemoryBackend) -> Backend:
        return FaultyBackend(backend, seed=7)
