"""Device copies that fail, hang or are late: a short mask, nothing published, no slot free too early."""

from __future__ import annotations

import asyncio

import pytest
import torch

from akvcache import StopReason
from akvcache.testing import (
    CopyFault,
    FakeDevice,
    FakeDeviceConnector,
    MemoryBackend,
    Stepping,
)
from tests.faults.kit import CHUNK, BlockingConnector, FailingConnector, rig, until

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("kind", [CopyFault.RAISE, CopyFault.BREAK])
@pytest.mark.parametrize("wave", [0, 1, 2])
async def test_a_retrieve_whose_copy_fails_ends_before_it(kind: CopyFault, wave: int) -> None:
    """CB-12, RL-08: the mask covers the waves before it, nothing is held, the next one works."""
    made: list[FailingConnector] = []
    async with rig(connector=lambda kv: made.append(FailingConnector(kv)) or made[0], copy_threads=1) as r:
        await r.store("p", 6)
        made[0].fail_after(wave, kind)
        loaded = await r.retrieve("p", 6)
        good = made[0].good_chunks
        assert wave <= good < 6
        assert (loaded.loaded_tokens, loaded.stopped) == (good * CHUNK, StopReason.TRANSFER_ERROR)
        await r.rest()
        assert (await r.retrieve("p", 6)).loaded_tokens == 6 * CHUNK


@pytest.mark.parametrize("kind", [CopyFault.RAISE, CopyFault.BREAK])
@pytest.mark.parametrize("wave", [0, 1, 2])
async def test_a_store_whose_copy_fails_keeps_what_was_copied(kind: CopyFault, wave: int) -> None:
    made: list[FailingConnector] = []
    async with rig(
        [MemoryBackend()], connector=lambda kv: made.append(FailingConnector(kv)) or made[0], copy_threads=1
    ) as r:
        made[0].fail_after(wave, kind)
        kept = await r.store("p", 6)
        good = made[0].good_chunks
        assert wave <= good < 6
        assert (kept.stored_tokens, kept.stopped) == (good * CHUNK, StopReason.TRANSFER_ERROR)
        await r.rest()
        assert (await r.retrieve("p", 6)).loaded_tokens == good * CHUNK
        kept = await r.store("p", 6)
        assert (kept.stored_tokens, kept.stopped) == (6 * CHUNK, None)
        assert (await r.retrieve("p", 6)).loaded_tokens == 6 * CHUNK


@pytest.mark.parametrize("direction", ["store", "retrieve"])
async def test_a_copy_that_never_ends_takes_the_engine_out_of_use(direction: str) -> None:
    """No hang: the call ends at its limit, the engine answers as an empty cache, closing works."""
    device = FakeDevice()
    async with rig(
        [MemoryBackend()],
        connector=lambda kv: FakeDeviceConnector(kv.connector, device),
        copy_timeout_s=0.05,
        close_timeout_s=0.05,
        io_timeout_s=0.05,
    ) as r:
        await r.store("p", 3)
        device.stepping = Stepping.MANUAL
        if direction == "store":
            kept = await r.engine.store(r.tokens("q", 3), r.fill("q", 3))
            assert (kept.stored_tokens, kept.stopped) == (0, StopReason.TRANSFER_ERROR)
        else:
            loaded = await r.engine.retrieve(r.tokens("p", 3), r.blank(1))
            assert (loaded.loaded_tokens, loaded.stopped) == (0, StopReason.TRANSFER_ERROR)
            assert not loaded.mask.any()
        assert "took longer" in (r.engine.health().degraded or "")
        assert (await r.engine.lookup(r.tokens("p", 3))).stopped is StopReason.UNHEALTHY
        assert (await r.engine.store(r.tokens("p", 3), r.kv.slots(0))).stopped is StopReason.UNHEALTHY
        assert r.inspected.leftovers()["tasks"] == 1, "the copy was forgotten while the device still runs it"


@pytest.mark.parametrize("kind", [CopyFault.RAISE, CopyFault.BREAK])
async def test_a_wave_of_which_all_parts_fail_is_one_failure(kind: CopyFault) -> None:
    made: list[FakeDeviceConnector[torch.Tensor]] = []
    async with rig(connector=lambda kv: made.append(FakeDeviceConnector(kv.connector, FakeDevice())) or made[0]) as r:
        made[0].fail_next(kind)
        made[0].fail_next(kind)
        assert (await r.store("p", 2)).stopped is StopReason.TRANSFER_ERROR
        await r.rest()
        await r.works("after")


@pytest.mark.parametrize("direction", ["store", "retrieve"])
@pytest.mark.parametrize("kind", [CopyFault.RAISE, CopyFault.BREAK])
async def test_a_wave_of_which_one_part_fails_ends_with_its_other_part(kind: CopyFault, direction: str) -> None:
    """RL-08: threads share a wave; a slot is not free while the other thread's copy still uses it."""
    made: list[FakeDeviceConnector[torch.Tensor]] = []
    async with rig(connector=lambda kv: made.append(FakeDeviceConnector(kv.connector, FakeDevice())) or made[0]) as r:
        await r.store("p", 2)
        made[0].fail_next(kind)
        made[0].fail_next(CopyFault.HANG)
        if direction == "store":
            call = asyncio.create_task(r.engine.store(r.tokens("q", 2), r.fill("q", 2)))
        else:
            call = asyncio.create_task(r.engine.retrieve(r.tokens("p", 2), r.blank(1)))
        await until(lambda: len(made[0].hung) == 1)
        await asyncio.wait([call], timeout=0.02)
        assert not call.done(), "the call ended while the device was still copying"
        lease = await r.host.acquire(r.host.pool.num_slots, timeout_s=0.01)
        assert lease is not None
        assert len(lease) == r.host.pool.num_slots - 2
        lease.release()
        made[0].hung[0].complete()
        made[0].device.run()
        assert (await call).stopped is StopReason.TRANSFER_ERROR
        await r.rest()
        await r.works("after")


@pytest.mark.parametrize("direction", ["store", "retrieve"])
async def test_a_copy_thread_that_hangs_keeps_its_slots_until_it_ends(direction: str) -> None:
    made: list[BlockingConnector] = []
    async with rig(connector=lambda kv: made.append(BlockingConnector(kv)) or made[0], copy_timeout_s=0.05) as r:
        device = made[0]
        await r.store("p", 2)
        device.go.clear()
        if direction == "store":
            stopped = (await r.engine.store(r.tokens("q", 2), r.fill("q", 2))).stopped
        else:
            stopped = (await r.engine.retrieve(r.tokens("p", 2), r.blank(1))).stopped
        assert stopped is StopReason.TRANSFER_ERROR
        lease = await r.host.acquire(r.host.pool.num_slots, timeout_s=0.01)
        assert lease is not None
        assert len(lease) == r.host.pool.num_slots - 2, "a slot was taken from under a copy that still runs"
        lease.release()
        device.go.set()
        await r.rest()


async def test_a_copy_starts_after_what_computes_its_source() -> None:
    """CB-11: the source is filled late, on the compute stream; store and retrieve run at once on one device."""
    device = FakeDevice()
    async with rig(connector=lambda kv: FakeDeviceConnector(kv.connector, device)) as r:
        await r.store("q", 4)
        device.stepping = Stepping.MANUAL
        slots = r.blank(0)
        device.compute.enqueue(lambda: r.kv.write(0, r.rows("p", 4)))
        store = asyncio.create_task(r.engine.store(r.tokens("p", 4), slots))
        load = asyncio.create_task(r.retrieve("q", 4))
        await until(lambda: len(device.copy) >= 6)
        device.stepping = Stepping.AUTO
        device.run()
        assert (await store).stored_tokens == 4 * CHUNK
        assert (await load).loaded_tokens == 4 * CHUNK
        r.blank(0)
        assert (await r.retrieve("p", 4)).loaded_tokens == 4 * CHUNK
        await r.rest()
