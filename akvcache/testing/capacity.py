"""The contract suite of a backend that holds no more than a given number of bytes."""

from __future__ import annotations

import abc
from collections.abc import AsyncGenerator, Container, Sequence
from contextlib import asynccontextmanager
from typing import Final

import pytest

from akvcache.backend import Backend, BackendContext
from akvcache.errors import CapacityExhausted
from akvcache.frame import frame_bytes
from akvcache.keys import ChunkKey
from akvcache.layout import PAGE_BYTES
from akvcache.testing.contract import BackendContract
from akvcache.testing.frames import make_frame, make_keys, make_namespace_id, make_payload

__all__ = ("CapacityContract",)

_PAYLOAD: Final = 3 * PAGE_BYTES - 5
_FRAME: Final = frame_bytes(_PAYLOAD)
_CAPACITY_FRAMES: Final = 12
_CAPACITY: Final = _CAPACITY_FRAMES * _FRAME


@pytest.mark.asyncio
class CapacityContract(BackendContract):
    """Inherit instead of `BackendContract`."""

    @abc.abstractmethod
    async def open_bounded_backend(self, context: BackendContext, capacity_bytes: int) -> Backend:
        """Return an opened backend that evicts beyond `capacity_bytes`; called again on the same storage."""

    @asynccontextmanager
    async def bounded(self, capacity_bytes: int, *, protected: Container[ChunkKey] = ()) -> AsyncGenerator[Backend]:
        """Open with a capacity, attach, close."""
        context = BackendContext(frame_bytes=_FRAME, is_protected=lambda key: key in protected)
        backend = await self.open_bounded_backend(context, capacity_bytes)
        try:
            await backend.attach(make_namespace_id(), {})
            yield backend
        finally:
            await backend.aclose()

    async def write_prompts(self, backend: Backend, prompts: Sequence[int]) -> list[ChunkKey]:
        """Do what the engine does for prompts of one chunk, one after the other; return their keys."""
        keys = [make_keys(1, label=f"prompt {prompt}")[0] for prompt in prompts]
        for key, prompt in zip(keys, prompts, strict=True):
            backend.touch([key])
            await backend.write(key, make_frame(key, make_payload(_PAYLOAD, prompt)))
        return keys

    async def test_the_capacity_holds_and_the_newest_stays(self) -> None:
        async with self.bounded(_CAPACITY) as backend:
            for prompt in range(3 * _CAPACITY_FRAMES):
                [key] = await self.write_prompts(backend, [prompt])
                stored = await self.scan(backend)
                assert sum(stored.values()) <= _CAPACITY
                assert key in stored

    async def test_protected_chunks_survive_eviction(self) -> None:
        protected: list[ChunkKey] = []
        async with self.bounded(_CAPACITY, protected=protected) as backend:
            protected += await self.write_prompts(backend, range(3))
            await self.write_prompts(backend, range(3, 3 * _CAPACITY_FRAMES))
            for key in protected:
                assert await self.read(backend, key) == await self._raw_get(key) is not None

    async def test_without_room_a_write_says_so_and_nothing_is_lost(self) -> None:
        keys = [make_keys(1, label=f"prompt {prompt}")[0] for prompt in range(_CAPACITY_FRAMES + 1)]
        async with self.bounded(_CAPACITY, protected=keys) as backend:
            with pytest.raises(CapacityExhausted):
                await self.write_prompts(backend, range(len(keys)))
            stored = await self.scan(backend)
            assert 0 < len(stored) <= _CAPACITY_FRAMES
            assert set(stored) == set(keys[: len(stored)])

    async def test_a_smaller_capacity_holds_after_reopening(self) -> None:
        async with self.bounded(_CAPACITY) as backend:
            if not backend.capabilities.persistent:
                pytest.skip(f"{backend.name} is not persistent")
            await self.write_prompts(backend, range(_CAPACITY_FRAMES))
        async with self.bounded(_CAPACITY // 2) as backend:
            [key] = await self.write_prompts(backend, [99])
            stored = await self.scan(backend)
            assert sum(stored.values()) <= _CAPACITY // 2
            assert key in stored
