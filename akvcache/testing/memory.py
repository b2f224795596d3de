"""The reference backend: a dict. What the contract means, in the fewest lines, and a double for engine tests.

It also checks its caller: a call out of order, a frame of a size the engine did not announce or a buffer off the page
grid is `InvariantError`, so that an engine test fails where the promise was broken.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np

from akvcache.backend import BackendContext, Capabilities, StoredChunk
from akvcache.errors import CapacityExhausted, InvariantError
from akvcache.keys import ChunkKey, NamespaceId, namespace_of
from akvcache.layout import PAGE_BYTES
from akvcache.policy import LruPolicy

__all__ = ("MemoryBackend", "MemoryStore")

_POLICY_CAPACITY: Final = 1024


class MemoryStore:
    """The medium under a `MemoryBackend`; outlives it, as a disk outlives the process that writes it.

    Attributes:
        frames: Stored bytes by key. Tests read and damage them here, behind the backend's back.
        manifests: What `attach` announced, by namespace.
    """

    def __init__(self) -> None:
        self.frames: dict[ChunkKey, bytes] = {}
        self.manifests: dict[NamespaceId, Mapping[str, object]] = {}

    def __repr__(self) -> str:
        return f"<MemoryStore {len(self.frames)} chunks, {self.stored_bytes} bytes>"

    @property
    def stored_bytes(self) -> int:
        """Bytes of all frames."""
        return sum(map(len, self.frames.values()))


class MemoryBackend:
    """Frames in a `MemoryStore`. Used from one event loop.

    Every call gives way to the loop once before it acts, then acts in one step: a cancelled call has done nothing.
    """

    def __init__(
        self, store: MemoryStore | None = None, *, capacity_bytes: int | None = None, name: str = "memory"
    ) -> None:
        """Describe a backend; nothing happens before `open`.

        Args:
            store: Medium to use; the backend then calls itself persistent, because whoever holds the medium can
                open it again. None keeps the frames in a store of its own.
            capacity_bytes: Bytes that fit; the least recently used prefix tail leaves first. None is unlimited.
            name: The tier's name.
        """
        self.store = MemoryStore() if store is None else store
        self._persistent = store is not None
        self._capacity_bytes = capacity_bytes
        self._name = name
        self._policy = LruPolicy(_POLICY_CAPACITY)
        self._attached: set[NamespaceId] = set()
        self._context: BackendContext | None = None
        self._in_flight = 0

    def __repr__(self) -> str:
        return f"<MemoryBackend {self._name!r} {self.store!r}>"

    @property
    def name(self) -> str:
        """See `Backend.name`."""
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        """See `Backend.capabilities`."""
        return Capabilities(persistent=self._persistent)

    async def open(self, context: BackendContext) -> None:
        """See `Backend.open`."""
        await asyncio.sleep(0)
        if self._context is not None:
            raise InvariantError(f"{self!r} is opened twice")
        self._context = context
        for key in self.store.frames:
            self._policy.insert(key)
        self._evict_down_to(self._capacity_bytes, None)

    async def attach(self, namespace_id: NamespaceId, manifest: Mapping[str, object]) -> None:
        """See `Backend.attach`."""
        with self._call():
            await asyncio.sleep(0)
            self._attached.add(namespace_id)
            self.store.manifests[namespace_id] = dict(manifest)

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """See `Backend.contains`."""
        with self._call(*keys):
            await asyncio.sleep(0)
            return [key in self.store.frames for key in keys]

    async def read(self, key: ChunkKey, into: memoryview) -> int | None:
        """See `Backend.read`."""
        with self._call(key):
            _check_aligned(into)
            await asyncio.sleep(0)
            frame = self.store.frames.get(key)
            if frame is None:
                return None
            fitting = min(len(frame), len(into))
            into[:fitting] = frame[:fitting]
            return len(frame)

    async def write(self, key: ChunkKey, frame: memoryview) -> None:
        """See `Backend.write`."""
        with self._call(key) as context:
            _check_aligned(frame)
            if not 0 < len(frame) <= context.frame_bytes or len(frame) % PAGE_BYTES:
                raise InvariantError(f"frame of {len(frame)} bytes, {context.frame_bytes} were announced")
            await asyncio.sleep(0)
            if key in self.store.frames:
                return
            if self._capacity_bytes is not None:
                self._evict_down_to(self._capacity_bytes - len(frame), key)
            self.store.frames[key] = bytes(frame)
            self._policy.insert(key)

    async def delete(self, key: ChunkKey) -> bool:
        """See `Backend.delete`."""
        with self._call(key):
            await asyncio.sleep(0)
            self._policy.forget(key)
            return self.store.frames.pop(key, None) is not None

    async def scan(self, namespace_id: NamespaceId) -> AsyncIterator[StoredChunk]:
        """See `Backend.scan`."""
        for key in list(self.store.frames):
            await asyncio.sleep(0)
            frame = self.store.frames.get(key)
            if frame is not None and namespace_of(key) == namespace_id:
                yield StoredChunk(key, len(frame))

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """See `Backend.touch`."""
        self._policy.touch(keys)

    async def aclose(self) -> None:
        """See `Backend.aclose`."""
        if self._in_flight:
            raise InvariantError(f"{self!r} is closed with {self._in_flight} calls in flight")
        self._context = None
        self._attached.clear()

    @contextmanager
    def _call(self, *keys: ChunkKey) -> Generator[BackendContext]:
        if self._context is None:
            raise InvariantError(f"{self!r} is not open")
        for key in keys:
            if namespace_of(key) not in self._attached:
                raise InvariantError(f"namespace {namespace_of(key).hex()} is not attached to {self!r}")
        self._in_flight += 1
        try:
            yield self._context
        finally:
            self._in_flight -= 1

    def _evict_down_to(self, limit_bytes: int | None, newcomer: ChunkKey | None) -> None:
        """Evict until the store holds at most `limit_bytes`; all of it or nothing."""
        excess = 0 if limit_bytes is None else self.store.stored_bytes - limit_bytes
        if excess <= 0:
            return
        assert self._context is not None
        is_protected = self._context.is_protected
        leaving: list[ChunkKey] = []
        for key in self._policy.victims(len(self._policy), lambda key: not is_protected(key), newcomer=newcomer):
            if excess <= 0:
                break
            leaving.append(key)
            excess -= len(self.store.frames.get(key, b""))
        if excess > 0:
            raise CapacityExhausted(backend=self._name, op="write", key=newcomer)
        for key in leaving:
            self._policy.forget(key)
            self.store.frames.pop(key, None)


def _check_aligned(buffer: memoryview) -> None:
    if np.frombuffer(buffer, dtype=np.uint8).ctypes.data % PAGE_BYTES:
        raise InvariantError("the buffer is not page-aligned")
