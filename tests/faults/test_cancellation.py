"""Every call, cancelled at every one of its awaits: nothing stays behind, nothing moves afterwards (CX-01, 03..06)."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import numpy as np
import pytest
from akvcache_nvme import NvmeBackend

from akvcache import CacheEngine, CacheNamespace, StopReason
from akvcache.testing import (
    FakeDevice,
    FakeDeviceConnector,
    FaultyBackend,
    MemoryBackend,
    MemoryStore,
    RegionKV,
    Stepping,
    Stop,
)
from tests.faults.kit import (
    CHUNK,
    BlockingConnector,
    CountedBackend,
    How,
    Rig,
    When,
    cancel_at,
    config_for,
    rig,
    until,
)

Call = Callable[[Rig, str], Awaitable[object]]

pytestmark = pytest.mark.asyncio
every_way = pytest.mark.parametrize("how", How)
every_moment = pytest.mark.parametrize("when", When)


# -- what is cancelled: each call gets a prompt of its own ---------------------------------------------------------


async def lookup(r: Rig, label: str) -> None:
    await r.engine.lookup(r.tokens(label, 4))


async def leasing_lookup(r: Rig, label: str) -> None:
    async with (await r.engine.lookup(r.tokens(label, 4), lease_s=60)).lease:
        pass


async def store(r: Rig, label: str) -> None:
    await r.engine.store(r.tokens(label, 5), r.fill(label, 5))


async def durable_store(r: Rig, label: str) -> None:
    kept = await r.engine.store(r.tokens(label, 5), r.fill(label, 5))
    await kept.durable()


async def retrieve_from_host(r: Rig, label: str) -> None:
    await r.engine.retrieve(r.tokens(label, 4), r.blank(1))


async def prefetch(r: Rig, label: str) -> None:
    await r.engine.prefetch(r.tokens(label, 4))


async def flush(r: Rig, label: str) -> None:
    await r.engine.store(r.tokens(label, 5), r.fill(label, 5))
    await r.engine.flush()


CALLS: dict[str, tuple[Call, str]] = {
    "lookup": (lookup, "tiers"),
    "leasing_lookup": (leasing_lookup, "tiers"),
    "store": (store, "nowhere"),
    "durable": (durable_store, "nowhere"),
    "retrieve_host": (retrieve_from_host, "host"),
    "retrieve_tiers": (retrieve_from_host, "tiers"),
    "prefetch": (prefetch, "tiers"),
    "flush": (flush, "nowhere"),
}


async def lay(r: Rig, label: str, where: str) -> None:
    """Put the first chunks of a prompt where the call will find them."""
    if where != "nowhere":
        await r.store(label, 4)
        await r.engine.flush()
    if where == "tiers":
        await r.push_out()


@every_moment
@every_way
@pytest.mark.parametrize("name", CALLS)
async def test_a_call_cancelled_at_every_await_leaves_nothing(name: str, how: How, when: When) -> None:
    call, where = CALLS[name]
    async with rig([MemoryBackend(), MemoryBackend(MemoryStore())]) as r:
        for point in itertools.count(1):
            label = f"{name} {point}"
            await lay(r, label, where)
            reached = await cancel_at(point, lambda label=label: call(r, label), how, when)
            for region in range(r.kv.num_regions):
                r.blank(region)
            await r.rest()
            for region in range(r.kv.num_regions):
                assert np.array_equal(r.kv.read(region), r.noise), "written after the call had ended"
            await r.retrieve(label, 5)
            await r.works(f"after {label}")
            if not reached:
                break
        assert point > 1


@every_moment
@every_way
@pytest.mark.parametrize("name", ["store", "retrieve_tiers", "prefetch"])
async def test_a_call_cancelled_while_the_pool_is_full_leaves_nothing(name: str, how: How, when: When) -> None:
    call, where = CALLS[name]
    async with rig([MemoryBackend()], num_slots=4, staging_reserve=1, memory_wait_s=0.02) as r:
        await r.store("leased", 3)
        for point in itertools.count(1):
            label = f"{name} {point}"
            await lay(r, label, where)
            await r.engine.prefetch(r.tokens("leased", 3))
            found = await r.engine.lookup(r.tokens("leased", 3), lease_s=60)
            staged = r.host.pool.try_lease(1)  # the last slot, so that the call has to wait for one
            assert staged is not None
            asyncio.get_running_loop().call_later(0.01, staged.release)
            reached = await cancel_at(point, lambda label=label: call(r, label), how, when)
            staged.release()
            assert found.lease is not None
            found.lease.release()
            await r.rest()
            await r.works(f"after {label}")
            if not reached:
                break
        assert point > 1


async def clear(r: Rig) -> None:
    await r.engine.clear()


async def change_weights(r: Rig) -> None:
    await r.engine.set_weights_version("next")


@every_moment
@every_way
@pytest.mark.parametrize("call", [clear, change_weights])
async def test_a_change_of_everything_cancelled_at_every_await(
    call: Callable[[Rig], Awaitable[None]], how: How, when: When
) -> None:
    for point in itertools.count(1):
        async with rig([MemoryBackend(), MemoryBackend()]) as r:
            await r.store("old", 4)
            store = asyncio.create_task(r.engine.store(r.tokens("meanwhile", 5), r.fill("meanwhile", 5, 2)))
            await asyncio.sleep(0)
            reached = await cancel_at(point, lambda r=r: call(r), how, when)
            await store
            await r.rest()
            await r.retrieve("old", 4)
            await r.retrieve("meanwhile", 5)
            await r.engine.clear()
            assert await r.hit("old", 4) == 0
            await r.works("after")
        if not reached:
            break
    assert point > 1


@every_moment
@every_way
async def test_closing_cancelled_at_every_await_closes(how: How, when: When) -> None:
    for point in itertools.count(1):
        medium = MemoryStore()
        backend = CountedBackend(medium)
        async with AsyncExitStack() as stack:
            r = await stack.enter_async_context(rig([backend]))
            await r.store("kept", 4)
            reached = await cancel_at(point, r.engine.aclose, how, when)
            assert r.context.supervisor.num_tasks == 0
            assert backend.closed == 1
        async with rig([MemoryBackend(medium)]) as r:
            assert (await r.retrieve("kept", 4)).loaded_tokens == 4 * CHUNK
        if not reached:
            break
    assert point > 1


@every_moment
@every_way
async def test_opening_cancelled_at_every_await_leaves_nothing(how: How, when: When) -> None:
    kv = RegionKV()
    for point in itertools.count(1):
        backends = [CountedBackend(), CountedBackend()]
        stack = AsyncExitStack()

        async def open_it(backends: list[CountedBackend] = backends, stack: AsyncExitStack = stack) -> None:
            opening = CacheEngine.open(
                config_for(kv, 8), connector=kv.connector, namespace=CacheNamespace(model="m"), tiers=backends
            )
            await stack.enter_async_context(opening)

        reached = await cancel_at(point, open_it, how, when)
        await stack.aclose()
        assert all(backend.closed >= backend.opened for backend in backends)
        if not reached:
            break
    assert point > 1


# -- copies that run on, whatever happens to the caller --------------------------------------------------------------


async def cancel(task: asyncio.Task[object], how: How, scope: anyio.CancelScope) -> None:
    if how is How.SCOPE:
        scope.cancel()
    else:
        task.cancel()
        if how is How.TWICE:
            await asyncio.sleep(0)
            task.cancel()


async def ends_with_the_copy(
    r: Rig, device: BlockingConnector, call: Callable[[], Awaitable[object]], how: How
) -> None:
    """Cancel `call` while its copy is under way: it ends after the copy, not before."""
    scope = anyio.CancelScope()

    async def run() -> None:
        with scope:
            await call()
            return
        raise asyncio.CancelledError

    device.entered.clear()
    device.go.clear()
    task: asyncio.Task[object] = asyncio.create_task(run())
    await device.entered.wait()
    await cancel(task, how, scope)
    assert await r.hit("a lookup goes on meanwhile", 2) == 0
    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done(), "the call ended while its copy was running"
    device.go.set()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("how", [How.NATIVE, How.TWICE, How.SCOPE])
async def test_a_store_cancelled_during_its_copy_reads_nothing_afterwards(how: How) -> None:
    """CX-03: what the source holds after the call has raised is never published."""
    made: list[BlockingConnector] = []
    async with rig([MemoryBackend()], connector=lambda kv: made.append(BlockingConnector(kv)) or made[0]) as r:
        await ends_with_the_copy(r, made[0], lambda: r.engine.store(r.tokens("s", 4), r.fill("s", 4)), how)
        copies = made[0].copies
        r.blank(0)
        await r.rest()
        assert made[0].copies == copies
        loaded = await r.retrieve("s", 4)
        assert loaded.loaded_tokens <= 2 * CHUNK  # what the running copy brought, whole and right
        await r.works("after")


@pytest.mark.parametrize("how", [How.NATIVE, How.TWICE, How.SCOPE])
async def test_a_retrieve_cancelled_during_its_copy_writes_nothing_afterwards(how: How) -> None:
    made: list[BlockingConnector] = []
    async with rig([MemoryBackend()], connector=lambda kv: made.append(BlockingConnector(kv)) or made[0]) as r:
        await r.store("s", 6)
        await ends_with_the_copy(r, made[0], lambda: r.engine.retrieve(r.tokens("s", 6), r.blank(1)), how)
        r.blank(1)
        await r.rest()
        assert np.array_equal(r.kv.read(1), r.noise)
        assert (await r.retrieve("s", 6)).loaded_tokens == 6 * CHUNK


async def test_slots_of_a_running_copy_are_not_given_to_others() -> None:
    """CX-01 for the device: the pool is exhausted while the copy of a cancelled retrieve still reads its slots."""
    made: list[BlockingConnector] = []
    async with rig(num_slots=4, connector=lambda kv: made.append(BlockingConnector(kv)) or made[0]) as r:
        device = made[0]
        await r.store("a", 4)
        device.entered.clear()
        device.go.clear()
        task = asyncio.create_task(r.engine.retrieve(r.tokens("a", 2), r.blank(1)))
        await device.entered.wait()
        task.cancel()
        lease = await r.host.acquire(4, timeout_s=0.05)
        assert lease is not None
        assert len(lease) == 2, "a slot was taken from under a running copy"
        for slot in lease.slots:
            slot.frame[:] = bytes(len(slot.frame))
        lease.release()
        device.go.set()
        await asyncio.wait([task])
        assert task.cancelled()
        assert np.array_equal(r.kv.read(1)[: 2 * CHUNK], r.rows("a", 2)), "the copy read a slot that had been reused"
        await r.rest()


@pytest.mark.parametrize("how", [How.NATIVE, How.TWICE, How.SCOPE])
async def test_slots_of_a_running_read_are_not_given_to_others(how: How) -> None:
    """CX-01: a tier read outlives its caller and writes into its own slot only."""
    backend = FaultyBackend(MemoryBackend())
    async with rig([backend], num_slots=4, staging_reserve=1) as r:
        await r.store("slow", 2)
        await r.push_out()
        scope = anyio.CancelScope()

        async def run() -> None:
            with scope:
                await r.engine.retrieve(r.tokens("slow", 2), r.blank(1))

        backend.hold("read")
        task: asyncio.Task[object] = asyncio.create_task(run())
        await backend.reached("read", 2)
        await cancel(task, how, scope)
        await asyncio.wait([task], timeout=1)
        assert task.done(), "a caller has to wait for a tier it has given up on"
        lease = await r.host.acquire(4, timeout_s=0.05)
        assert lease is not None
        assert len(lease) == 1
        pattern = bytes(range(256)) * (len(lease.slots[0].frame) // 256)
        lease.slots[0].frame[:] = pattern
        backend.release()
        await until(lambda: all(r.host.filling(key) is None for key in r.keys("slow", 2)))
        assert bytes(lease.slots[0].frame) == pattern, "a late read wrote into somebody else's slot"
        lease.release()
        await r.rest()
        assert (await r.retrieve("slow", 2)).by_tier == {"host": 2 * CHUNK}, "the late read was thrown away"


async def test_a_stalled_device_holds_up_only_those_who_wait_for_it() -> None:
    device = FakeDevice()
    async with rig([MemoryBackend()], connector=lambda kv: FakeDeviceConnector(kv.connector, device)) as r:
        await r.store("s", 4)
        await r.engine.flush()
        device.stepping = Stepping.MANUAL
        retrieve = asyncio.create_task(r.engine.retrieve(r.tokens("s", 4), r.blank(1)))
        store = asyncio.create_task(r.engine.store(r.tokens("t", 3), r.fill("t", 3)))
        await until(lambda: len(device.copy) >= 6)
        retrieve.cancel()
        store.cancel()
        assert await r.hit("s", 4) == 4
        assert (await r.engine.prefetch(r.tokens("s", 4))).ready_tokens == 4 * CHUNK
        assert not retrieve.done()
        assert not store.done()
        device.stepping = Stepping.AUTO
        device.run()
        await asyncio.wait([retrieve, store])
        assert retrieve.cancelled()
        assert store.cancelled()
        r.blank(0)
        r.blank(1)
        await r.rest()
        assert np.array_equal(r.kv.read(1), r.noise)
        await r.retrieve("t", 3)
        await r.works("after")


# -- a real file system ---------------------------------------------------------------------------------------------


async def test_random_cancellations_leave_no_file_behind(tmp_path: Path) -> None:
    """CX-06: descriptors (watched in every test), unfinished files and the pool are as before."""
    rng = random.Random(6)
    backend = NvmeBackend(tmp_path / "cache", capacity_bytes=1 << 20)
    async with rig([backend]) as r:
        for number in range(100):
            call, where = CALLS[rng.choice(sorted(CALLS))]
            label = f"nvme {number}"
            await lay(r, label, where)
            point, how = rng.randrange(1, 12), rng.choice(list(How))
            await cancel_at(point, lambda label=label, call=call: call(r, label), how, rng.choice(list(When)))
            for region in range(r.kv.num_regions):
                r.blank(region)
            await r.rest()
            await r.retrieve(label, 5)
        assert not [path for path in (tmp_path / "cache" / "tmp").rglob("*") if path.is_file() and path.stat().st_size]
    async with rig([NvmeBackend(tmp_path / "cache", capacity_bytes=1 << 20)]) as r:
        kept = [await r.retrieve(f"nvme {number}", 5) for number in range(100)]
        assert sum(loaded.loaded_tokens for loaded in kept) > 0
        assert all(loaded.stopped in (None, StopReason.MISSING) for loaded in kept)


# -- late completions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", Stop)
@pytest.mark.parametrize("op", ["contains", "read", "write"])
async def test_a_late_completion_is_harmless(op: str, stop: Stop) -> None:
    """CX-04: each call ends once; what arrives for one that has ended is ignored."""
    backend = FaultyBackend(MemoryBackend())
    async with rig([backend]) as r:
        await r.store("a", 3)
        await r.push_out()
        backend.hold(op, stop)
        if op == "write":
            call = asyncio.create_task(_durable(r, "b"))
        else:
            call = asyncio.create_task(r.engine.retrieve(r.tokens("a", 3), r.blank(1)))
        await backend.reached(op)
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        r.blank(1)
        backend.release()
        await r.rest()
        assert np.array_equal(r.kv.read(1), r.noise)
        assert (await r.retrieve("a", 3)).loaded_tokens == 3 * CHUNK
        await r.works("after")


async def _durable(r: Rig, label: str) -> object:
    return await (await r.engine.store(r.tokens(label, 3), r.fill(label, 3))).durable()


async def test_cancelled_prefetches_use_up_nothing() -> None:
    """CX-05: after 100 prefetches cancelled at all stages, one more works and the pool is whole."""
    backend = FaultyBackend(MemoryBackend())
    async with rig([backend], num_slots=6) as r:
        await r.store("p", 4)
        await r.engine.flush()
        for round_ in range(100):
            await r.push_out()
            backend.hold("read" if round_ % 2 else "contains")
            task = asyncio.create_task(r.engine.prefetch(r.tokens("p", 4)))
            for _ in range(round_ % 12):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            backend.release()
            await r.rest()
        ready = await r.engine.prefetch(r.tokens("p", 4))
        assert (ready.ready_tokens, ready.stopped) == (4 * CHUNK, None)


async def test_a_follower_of_a_cancelled_leader_is_served() -> None:
    """The load of a chunk belongs to all who want it: the one who asked first may leave."""
    backend = FaultyBackend(MemoryBackend())
    async with rig([backend]) as r:
        await r.store("shared", 3)
        await r.push_out()
        backend.hold("read")
        leader = asyncio.create_task(r.engine.retrieve(r.tokens("shared", 3), r.blank(1)))
        await backend.reached("read", 3)
        follower = asyncio.create_task(r.retrieve("shared", 3, region=2))
        await until(lambda: sum(hold.owner.startswith("retrieve") for hold in r.host.index.holds) == 2)
        leader.cancel()
        await asyncio.wait([leader])
        backend.release()
        assert (await follower).loaded_tokens == 3 * CHUNK
        assert backend.calls["read"] == 3, "a chunk was read twice"
        await r.rest()


async def test_calls_in_flight_at_closing_end_without_a_foreign_cancellation() -> None:
    """Closing gives up on a device that hangs; the call learns of it as a result, not as its own cancellation."""
    device = FakeDevice(Stepping.MANUAL)
    async with rig(
        connector=lambda kv: FakeDeviceConnector(kv.connector, device), close_timeout_s=0.05, io_timeout_s=0.05
    ) as r:
        store = asyncio.create_task(r.engine.store(r.tokens("s", 3), r.fill("s", 3)))
        await until(lambda: len(device.copy) > 0)
        await r.engine.aclose()
        kept = await store
        assert kept.stored_tokens == 0
        assert kept.stopped in (StopReason.CLOSED, StopReason.TRANSFER_ERROR)
