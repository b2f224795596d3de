"""The contract suite: every promise of `akvcache.backend`, as tests that any backend can inherit.

::

    class TestMyBackend(BackendContract):
        @pytest.fixture(autouse=True)
        def storage(self, tmp_path):
            self.root = tmp_path

        async def open_backend(self, context):
            backend = MyBackend(self.root)
            await backend.open(context)
            return backend

        def raw_get(self, key): ...   # straight from the storage, past the backend
        def raw_set(self, key, data): ...

Needs pytest and pytest-asyncio.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

import pytest

from akvcache.backend import Backend, BackendContext
from akvcache.frame import frame_bytes
from akvcache.keys import ChunkKey
from akvcache.layout import PAGE_BYTES
from akvcache.testing.frames import aligned_buffer, make_frame, make_keys, make_namespace_id, make_payload

__all__ = ("BackendContract",)

_LARGEST_PAYLOAD: Final = 6 << 20
_PAYLOADS: Final = (1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 65_536, (1 << 20) + 17, _LARGEST_PAYLOAD)
_PAYLOAD: Final = 3 * PAGE_BYTES - 5
_FRAME: Final = frame_bytes(_PAYLOAD)
_CANARY: Final = 0xA5


def _frames(keys: Sequence[ChunkKey], nbytes: int = _PAYLOAD) -> dict[ChunkKey, memoryview]:
    return {key: make_frame(key, make_payload(nbytes, seed)) for seed, key in enumerate(keys)}


async def _write(backend: Backend, frames: Mapping[ChunkKey, memoryview]) -> None:
    for key, frame in frames.items():
        await backend.write(key, frame)


@pytest.mark.asyncio
class BackendContract(abc.ABC):
    """Inherit, and give storage; `akvcache.testing.CapacityContract` has more for backends that evict."""

    @abc.abstractmethod
    async def open_backend(self, context: BackendContext) -> Backend:
        """Return an opened backend; called again in one test, on the same storage."""

    @abc.abstractmethod
    def raw_get(self, key: ChunkKey) -> bytes | None:
        """Return what the storage holds for `key`, without the backend's help. Runs in a thread."""

    @abc.abstractmethod
    def raw_set(self, key: ChunkKey, data: bytes) -> None:
        """Replace what the storage holds for a stored `key`, behind the backend's back. Runs in a thread."""

    @asynccontextmanager
    async def opened(self, *, namespace: str = "test") -> AsyncGenerator[Backend]:
        """Open, attach `namespace`, close."""
        backend = await self.open_backend(BackendContext(frame_bytes=frame_bytes(_LARGEST_PAYLOAD)))
        try:
            await backend.attach(make_namespace_id(namespace), {"model": namespace})
            yield backend
        finally:
            await backend.aclose()

    async def read(self, backend: Backend, key: ChunkKey, nbytes: int = _FRAME) -> bytes | None:
        """Return what a reader gets who expects `nbytes`."""
        into = aligned_buffer(nbytes)
        size = await backend.read(key, into)
        return None if size is None else bytes(into[:size])

    async def scan(self, backend: Backend, namespace: str = "test") -> dict[ChunkKey, int]:
        """Return the size of every entry of a namespace."""
        return {chunk.key: chunk.stored_bytes async for chunk in backend.scan(make_namespace_id(namespace))}

    async def _raw_get(self, key: ChunkKey) -> bytes | None:
        return await asyncio.get_running_loop().run_in_executor(None, self.raw_get, key)

    async def _raw_set(self, key: ChunkKey, data: bytes) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.raw_set, key, data)

    async def test_it_says_what_it_is(self) -> None:
        async with self.opened() as backend:
            assert backend.name
            assert backend.name == backend.name.lower()
            assert backend.capabilities.max_reads >= 1
            assert backend.capabilities.max_writes >= 1

    @pytest.mark.parametrize("payload_bytes", _PAYLOADS)
    async def test_a_frame_comes_back_byte_for_byte(self, payload_bytes: int) -> None:
        [key] = make_keys(1)
        frame = make_frame(key, make_payload(payload_bytes))
        async with self.opened() as backend:
            await backend.write(key, frame)
            assert await self._raw_get(key) == bytes(frame)
            assert await self.read(backend, key, len(frame)) == bytes(frame)
            assert list(await backend.contains([key])) == [True]

    async def test_a_key_with_a_short_digest_is_a_key(self) -> None:
        frames = _frames(make_keys(3, digest_bytes=16))
        async with self.opened() as backend:
            await _write(backend, frames)
            assert [await self.read(backend, key) for key in frames] == [bytes(frame) for frame in frames.values()]
            assert await self.scan(backend) == dict.fromkeys(frames, _FRAME)

    async def test_absence_is_a_value(self) -> None:
        absent, present = make_keys(2)
        async with self.opened() as backend:
            await _write(backend, _frames([present]))
            assert await self.read(backend, absent) is None
            assert list(await backend.contains([absent])) == [False]
            assert list(await backend.contains([])) == []
            assert await backend.delete(absent) is False

    async def test_contains_answers_for_each_key_in_order(self) -> None:
        keys = make_keys(6)
        async with self.opened() as backend:
            await _write(backend, _frames([*keys[:3], keys[4]]))
            assert [list(await backend.contains([key])) for key in keys] == [[True]] * 3 + [[False], [True], [False]]
            found = await backend.contains(keys)
            assert list(found[:4]) == [True, True, True, False]
            assert len(found) == 6
            assert found[5] is False  # after the first absent chunk (4) may be either: one round trip less

    async def test_contains_changes_nothing(self) -> None:
        keys = make_keys(4)
        async with self.opened() as backend:
            await _write(backend, _frames(keys[:1]))
            for _ in range(3):
                await backend.contains(keys)
            assert await self.scan(backend) == {keys[0]: _FRAME}
            assert [await self._raw_get(key) is None for key in keys] == [False, True, True, True]

    async def test_a_stored_key_is_left_as_it_is(self) -> None:
        [key] = make_keys(1)
        first, second = make_frame(key, make_payload(_PAYLOAD, 1)), make_frame(key, make_payload(9 * PAGE_BYTES, 2))
        async with self.opened() as backend:
            await backend.write(key, first)
            await backend.write(key, second)
            assert await self.read(backend, key, len(second)) == bytes(first)
            assert await self._raw_get(key) == bytes(first)
            assert await self.scan(backend) == {key: len(first)}

    async def test_a_deleted_key_is_gone_and_can_come_back(self) -> None:
        key, other = make_keys(2)
        async with self.opened() as backend:
            await _write(backend, _frames([key, other]))
            assert await backend.delete(key) is True
            assert await backend.delete(key) is False
            assert await self.read(backend, key) is None
            assert list(await backend.contains([key])) == [False]
            assert await self._raw_get(key) is None
            assert await self.scan(backend) == {other: _FRAME}
            again = make_frame(key, make_payload(_PAYLOAD, 9))
            await backend.write(key, again)
            assert await self.read(backend, key) == bytes(again)

    async def test_scan_gives_exactly_what_is_stored(self) -> None:
        keys = make_keys(5) + make_keys(5, label="other prompt")
        sizes = {key: frame_bytes(1 + at * PAGE_BYTES) for at, key in enumerate(keys)}
        async with self.opened() as backend:
            assert await self.scan(backend) == {}
            for at, key in enumerate(keys):
                await backend.write(key, make_frame(key, make_payload(1 + at * PAGE_BYTES)))
            assert await self.scan(backend) == sizes
            await backend.delete(keys[3])
            del sizes[keys[3]]
            assert await self.scan(backend) == sizes

    async def test_scan_survives_entries_that_come_and_go(self) -> None:
        keys = make_keys(8)
        late = make_keys(8, label="late")
        frames = _frames([*keys, *late])
        async with self.opened() as backend:
            await _write(backend, {key: frames[key] for key in keys})
            seen: list[ChunkKey] = []
            async for chunk in backend.scan(make_namespace_id()):
                seen.append(chunk.key)
                await backend.delete(keys[len(seen) % 8])
                await backend.write(late[len(seen) % 8], frames[late[len(seen) % 8]])
            assert set(seen) <= set(frames)
            assert len(seen) == len(set(seen))

    @pytest.mark.parametrize("room", [PAGE_BYTES, _FRAME - PAGE_BYTES, _FRAME, _FRAME + PAGE_BYTES, 4 * _FRAME])
    async def test_a_buffer_of_any_length_gets_the_true_size(self, room: int) -> None:
        [key] = make_keys(1)
        frame = make_frame(key, make_payload(_PAYLOAD))
        async with self.opened() as backend:
            await backend.write(key, frame)
            await self._check_read(backend, key, bytes(frame), room)

    @pytest.mark.parametrize(
        "size",
        [0, 1, 511, PAGE_BYTES - 1, PAGE_BYTES, _FRAME - PAGE_BYTES, _FRAME - 1, _FRAME + 1, _FRAME + PAGE_BYTES],
    )
    async def test_a_damaged_entry_is_reported_by_its_size(self, size: int) -> None:
        [key] = make_keys(1)
        frame = make_frame(key, make_payload(_PAYLOAD))
        damaged = bytes(frame)[:size] + b"\x5a" * max(0, size - len(frame))
        async with self.opened() as backend:
            await backend.write(key, frame)
            await self._raw_set(key, damaged)
            await self._check_read(backend, key, damaged, _FRAME)
            assert await backend.delete(key) is True
            await backend.write(key, frame)
            assert await self.read(backend, key) == bytes(frame)

    async def _check_read(self, backend: Backend, key: ChunkKey, stored: bytes, room: int) -> None:
        """Read into the middle of a larger buffer: the size is true, the bytes are right, the rest is untouched."""
        arena = aligned_buffer(room + 2 * PAGE_BYTES)
        arena[:] = bytes([_CANARY]) * len(arena)
        into = arena[PAGE_BYTES : PAGE_BYTES + room]
        assert await backend.read(key, into) == len(stored)
        fitting = min(room, len(stored))
        assert bytes(into[:fitting]) == stored[:fitting]
        outside = bytes(arena[:PAGE_BYTES]) + bytes(arena[PAGE_BYTES + room :])
        assert outside == bytes([_CANARY]) * (2 * PAGE_BYTES)

    async def test_calls_for_many_keys_run_at_once(self) -> None:
        keys = make_keys(32)
        frames = _frames(keys)

        async def use(backend: Backend, key: ChunkKey) -> None:
            await backend.write(key, frames[key])
            assert list(await backend.contains([key])) == [True]
            assert await self.read(backend, key) == bytes(frames[key])
            backend.touch([key])
            if keys.index(key) % 2:
                assert await backend.delete(key) is True

        async with self.opened() as backend:
            async with asyncio.TaskGroup() as group:
                for key in keys:
                    group.create_task(use(backend, key))
            assert await self.scan(backend) == dict.fromkeys(keys[::2], _FRAME)

    async def test_writers_of_one_key_leave_one_whole_version(self) -> None:
        [key] = make_keys(1)
        versions = [make_frame(key, make_payload(_PAYLOAD, seed)) for seed in range(64)]
        async with self.opened() as backend:
            async with asyncio.TaskGroup() as group:
                for version in versions:
                    group.create_task(backend.write(key, version))
            stored = await self._raw_get(key)
            assert stored in [bytes(version) for version in versions]
            assert await self.read(backend, key) == stored
            assert await self.scan(backend) == {key: _FRAME}

    async def test_readers_see_nothing_or_everything(self) -> None:
        keys = make_keys(3)
        payload_bytes = 256 << 10
        frames = _frames(keys, payload_bytes)
        writing = True

        async def write_and_delete(backend: Backend) -> None:
            nonlocal writing
            for turn in range(24):
                await backend.write(keys[turn % 3], frames[keys[turn % 3]])
                await backend.delete(keys[(turn - 1) % 3])
            writing = False

        async def read(backend: Backend, key: ChunkKey) -> None:
            while writing:
                assert await self.read(backend, key, len(frames[key])) in (None, bytes(frames[key]))
                assert await self._raw_get(key) in (None, bytes(frames[key]))

        async with self.opened() as backend, asyncio.TaskGroup() as group:
            group.create_task(write_and_delete(backend))
            for key in keys * 2:
                group.create_task(read(backend, key))

    async def test_a_cancelled_write_leaves_nothing_half_visible(self) -> None:
        keys = make_keys(24)
        payload_bytes = 1 << 20
        frames = _frames(keys, payload_bytes)
        async with self.opened() as backend:
            for steps, key in enumerate(keys):
                async with asyncio.TaskGroup() as group:
                    task = group.create_task(backend.write(key, frames[key]))
                    for _ in range(steps):
                        await asyncio.sleep(0)
                    task.cancel()
                assert await self._raw_get(key) in (None, bytes(frames[key]))
                assert await self.read(backend, key, len(frames[key])) in (None, bytes(frames[key]))
            for key in keys:
                await backend.write(key, frames[key])
                assert await self.read(backend, key, len(frames[key])) == bytes(frames[key])
            assert await self.scan(backend) == {key: len(frames[key]) for key in keys}

    async def test_a_cancelled_read_harms_nobody(self) -> None:
        [key] = make_keys(1)
        frame = make_frame(key, make_payload(1 << 20))
        into = [aligned_buffer(len(frame)) for _ in range(24)]  # each stays with its call, which may go on
        async with self.opened() as backend:
            await backend.write(key, frame)
            for steps, buffer in enumerate(into):
                async with asyncio.TaskGroup() as group:
                    task = group.create_task(backend.read(key, buffer))
                    for _ in range(steps):
                        await asyncio.sleep(0)
                    task.cancel()
            assert await self.read(backend, key, len(frame)) == bytes(frame)
            assert await self._raw_get(key) == bytes(frame)
            assert await backend.delete(key) is True

    async def test_a_persistent_backend_finds_everything_again(self) -> None:
        keys = make_keys(4)
        frames = _frames(keys)
        async with self.opened() as backend:
            if not backend.capabilities.persistent:
                pytest.skip(f"{backend.name} is not persistent")
            await _write(backend, frames)
            await backend.delete(keys[3])
        async with self.opened() as backend:
            assert await self.scan(backend) == dict.fromkeys(keys[:3], _FRAME)
            assert list(await backend.contains(keys)) == [True, True, True, False]
            for key in keys[:3]:
                assert await self.read(backend, key) == bytes(frames[key])
            await backend.write(keys[3], frames[keys[3]])
            assert await backend.delete(keys[0]) is True
        async with self.opened() as backend:
            assert await self.scan(backend) == dict.fromkeys(keys[1:], _FRAME)

    async def test_touch_ignores_what_it_does_not_know(self) -> None:
        keys = make_keys(3)
        async with self.opened() as backend:
            await _write(backend, _frames(keys[:1]))
            backend.touch([])
            backend.touch(keys)
            backend.touch(make_keys(2, namespace="never attached"))
            assert await self.scan(backend) == {keys[0]: _FRAME}

    async def test_closing_twice_is_closing_once(self) -> None:
        async with self.opened() as backend:
            await backend.aclose()
            await backend.aclose()

    async def test_namespaces_never_mix(self) -> None:
        [here], [there] = make_keys(1, namespace="here"), make_keys(1, namespace="there")
        frames = _frames([here, there])
        async with self.opened(namespace="here") as backend:
            await backend.attach(make_namespace_id("there"), {"model": "there"})
            await backend.write(here, frames[here])
            assert list(await backend.contains([there])) == [False]
            assert await self.read(backend, there) is None
            assert await backend.delete(there) is False
            await backend.write(there, frames[there])
            assert await self.read(backend, here) == bytes(frames[here])
            assert await self.read(backend, there) == bytes(frames[there])
            assert await self.scan(backend, "here") == {here: _FRAME}
            assert await self.scan(backend, "there") == {there: _FRAME}
            assert await backend.delete(here) is True
            assert await self.read(backend, there) == bytes(frames[there])
