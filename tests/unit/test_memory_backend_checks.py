"""MemoryBackend fails loudly where its caller breaks the contract."""

from __future__ import annotations

import asyncio

import pytest

from akvcache.backend import BackendContext
from akvcache.errors import InvariantError
from akvcache.frame import frame_bytes
from akvcache.testing import MemoryBackend, MemoryStore, aligned_buffer, make_frame, make_keys, make_namespace_id

KEY = make_keys(1)[0]
CONTEXT = BackendContext(frame_bytes=frame_bytes(4096))


async def opened() -> MemoryBackend:
    backend = MemoryBackend()
    await backend.open(CONTEXT)
    await backend.attach(make_namespace_id(), {"model": "m"})
    return backend


@pytest.mark.asyncio
async def test_a_call_before_open_or_after_close_is_refused() -> None:
    backend = MemoryBackend()
    with pytest.raises(InvariantError, match="not open"):
        await backend.contains([KEY])
    backend = await opened()
    await backend.aclose()
    with pytest.raises(InvariantError, match="not open"):
        await backend.delete(KEY)


@pytest.mark.asyncio
async def test_opening_twice_is_refused() -> None:
    backend = await opened()
    with pytest.raises(InvariantError, match="opened twice"):
        await backend.open(CONTEXT)


@pytest.mark.asyncio
async def test_a_namespace_that_was_not_announced_is_refused() -> None:
    backend = await opened()
    with pytest.raises(InvariantError, match="not attached"):
        await backend.contains(make_keys(1, namespace="other"))


@pytest.mark.asyncio
async def test_a_buffer_off_the_page_grid_is_refused() -> None:
    backend = await opened()
    with pytest.raises(InvariantError, match="page-aligned"):
        await backend.read(KEY, aligned_buffer(8192)[8:])
    with pytest.raises(InvariantError, match="page-aligned"):
        await backend.write(KEY, aligned_buffer(12288)[8:8200])


@pytest.mark.parametrize("nbytes", [100, 4097, 12288])
@pytest.mark.asyncio
async def test_a_frame_of_another_size_is_refused(nbytes: int) -> None:
    backend = await opened()
    with pytest.raises(InvariantError, match=f"frame of {nbytes} bytes"):
        await backend.write(KEY, aligned_buffer(nbytes))


@pytest.mark.asyncio
async def test_closing_under_a_running_call_is_refused() -> None:
    backend = await opened()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(backend.write(KEY, make_frame(KEY, b"x")))
        await asyncio.sleep(0)
        with pytest.raises(InvariantError, match="1 calls in flight"):
            await backend.aclose()
    assert task.done()
    await backend.aclose()


def test_a_store_of_its_own_does_not_outlive_the_backend() -> None:
    assert not MemoryBackend().capabilities.persistent
    assert MemoryBackend(MemoryStore()).capabilities.persistent


@pytest.mark.asyncio
async def test_the_manifest_is_left_for_operators() -> None:
    backend = await opened()
    assert backend.store.manifests == {make_namespace_id(): {"model": "m"}}
