"""The suite itself: each test below names a broken promise and the contract test that must notice it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from typing_extensions import override

from akvcache.backend import Backend, BackendContext, StoredChunk
from akvcache.errors import BackendError
from akvcache.keys import ChunkKey, NamespaceId
from akvcache.testing import CapacityContract, MemoryBackend, MemoryStore


class ContainsEverything(MemoryBackend):
    @override
    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return [True] * len(keys)


class ContainsTheSet(MemoryBackend):
    @override
    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        return sorted(await super().contains(keys), reverse=True)


class ContainsCreates(MemoryBackend):
    @override
    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        found = await super().contains(keys)
        for key in keys:
            self.store.frames.setdefault(key, b"")
        return found


class Overwrites(MemoryBackend):
    @override
    async def write(self, key: ChunkKey, frame: memoryview) -> None:
        self.store.frames[key] = bytes(frame)


class FlipsABit(MemoryBackend):
    @override
    async def write(self, key: ChunkKey, frame: memoryview) -> None:
        await super().write(key, frame)
        self.store.frames[key] = self.store.frames[key][:-1] + b"\x01"


class ReportsTheBuffer(MemoryBackend):
    @override
    async def read(self, key: ChunkKey, into: memoryview) -> int | None:
        size = await super().read(key, into)
        return None if size is None else min(size, len(into))


class RaisesWhenAbsent(MemoryBackend):
    @override
    async def read(self, key: ChunkKey, into: memoryview) -> int | None:
        if key not in self.store.frames:
            raise BackendError
        return await super().read(key, into)


class DeletesTwice(MemoryBackend):
    @override
    async def delete(self, key: ChunkKey) -> bool:
        await super().delete(key)
        return True


class ScansAllNamespaces(MemoryBackend):
    @override
    async def scan(self, namespace_id: NamespaceId) -> AsyncIterator[StoredChunk]:
        for key, frame in list(self.store.frames.items()):
            await asyncio.sleep(0)
            yield StoredChunk(key, len(frame))


class ScansWhileDictChanges(MemoryBackend):
    @override
    async def scan(self, namespace_id: NamespaceId) -> AsyncIterator[StoredChunk]:
        for key, frame in self.store.frames.items():
            yield StoredChunk(key, len(frame))


class WritesInTwoSteps(MemoryBackend):
    @override
    async def write(self, key: ChunkKey, frame: memoryview) -> None:
        if key in self.store.frames:
            return
        self.store.frames[key] = bytes(frame[: len(frame) // 2])
        for _ in range(3):
            await asyncio.sleep(0)
        self.store.frames[key] = bytes(frame)


class IgnoresTheNamespace(MemoryBackend):
    @override
    async def read(self, key: ChunkKey, into: memoryview) -> int | None:
        twins = [other for other in self.store.frames if other[16:] == key[16:]]
        return await super().read(twins[0], into) if twins else None


class ForgetsOnClose(MemoryBackend):
    @override
    async def aclose(self) -> None:
        await super().aclose()
        self.store.frames.clear()


class RefusesTheSecondClose(MemoryBackend):
    closed = False

    @override
    async def aclose(self) -> None:
        await super().aclose()
        if self.closed:
            raise BackendError
        self.closed = True


class TouchRaises(MemoryBackend):
    @override
    def touch(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self.store.frames[key]


class NeverEvicts(MemoryBackend):
    @override
    async def write(self, key: ChunkKey, frame: memoryview) -> None:
        self.store.frames.setdefault(key, bytes(frame))


class EvictsTheProtected(MemoryBackend):
    @override
    async def open(self, context: BackendContext) -> None:
        await super().open(BackendContext(frame_bytes=context.frame_bytes))


def suite_of(kind: type[MemoryBackend]) -> CapacityContract:
    class Suite(CapacityContract):
        store = MemoryStore()

        @override
        async def open_backend(self, context: BackendContext) -> Backend:
            backend = kind(self.store)
            await backend.open(context)
            return backend

        @override
        async def open_bounded_backend(self, context: BackendContext, capacity_bytes: int) -> Backend:
            backend = kind(self.store, capacity_bytes=capacity_bytes)
            await backend.open(context)
            return backend

        @override
        def raw_get(self, key: ChunkKey) -> bytes | None:
            return self.store.frames.get(key)

        @override
        def raw_set(self, key: ChunkKey, data: bytes) -> None:
            self.store.frames[key] = data

    return Suite()


@pytest.mark.parametrize(
    ("broken", "noticed_by", "arguments"),
    [
        (ContainsEverything, "test_absence_is_a_value", ()),
        (ContainsTheSet, "test_contains_answers_for_each_key_in_order", ()),
        (ContainsCreates, "test_contains_changes_nothing", ()),
        (Overwrites, "test_a_stored_key_is_left_as_it_is", ()),
        (FlipsABit, "test_a_frame_comes_back_byte_for_byte", (1,)),
        (ReportsTheBuffer, "test_a_buffer_of_any_length_gets_the_true_size", (4096,)),
        (ReportsTheBuffer, "test_a_damaged_entry_is_reported_by_its_size", (20_000,)),
        (RaisesWhenAbsent, "test_absence_is_a_value", ()),
        (DeletesTwice, "test_a_deleted_key_is_gone_and_can_come_back", ()),
        (ScansAllNamespaces, "test_namespaces_never_mix", ()),
        (ScansWhileDictChanges, "test_scan_survives_entries_that_come_and_go", ()),
        (WritesInTwoSteps, "test_readers_see_nothing_or_everything", ()),
        (WritesInTwoSteps, "test_a_cancelled_write_leaves_nothing_half_visible", ()),
        (IgnoresTheNamespace, "test_namespaces_never_mix", ()),
        (ForgetsOnClose, "test_a_persistent_backend_finds_everything_again", ()),
        (RefusesTheSecondClose, "test_closing_twice_is_closing_once", ()),
        (TouchRaises, "test_touch_ignores_what_it_does_not_know", ()),
        (NeverEvicts, "test_the_capacity_holds_and_the_newest_stays", ()),
        (NeverEvicts, "test_without_room_a_write_says_so_and_nothing_is_lost", ()),
        (NeverEvicts, "test_a_smaller_capacity_holds_after_reopening", ()),
        (EvictsTheProtected, "test_protected_chunks_survive_eviction", ()),
    ],
)
@pytest.mark.asyncio
async def test_a_broken_backend_is_noticed(
    broken: type[MemoryBackend], noticed_by: str, arguments: tuple[int, ...]
) -> None:
    await getattr(suite_of(MemoryBackend), noticed_by)(*arguments)
    with pytest.raises((Exception, pytest.fail.Exception)):
        await getattr(suite_of(broken), noticed_by)(*arguments)
