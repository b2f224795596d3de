"""The host pool: alignment, prefix leases, fair waiting, nothing lost."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Sequence

import numpy as np
import pytest

from akvcache.buffers import Arena, HostPool, Slot, SlotLease
from akvcache.errors import ConfigurationError, InvariantError, UsageError

SLOT = 8192


class Cache:
    """Slots that can be had back, as the index has them.

    Attributes:
        slots: What is cached.
    """

    def __init__(self, pool: HostPool, count: int) -> None:
        lease = pool.try_lease(count)
        assert lease is not None
        self.slots = [lease.take() for _ in range(count)]
        lease.release()
        pool.bind(self)

    def reclaimable(self) -> int:
        return len(self.slots)

    def reclaim(self, count: int) -> Sequence[Slot]:
        given, self.slots = self.slots[:count], self.slots[count:]
        return given


def pool_of(num_slots: int) -> HostPool:
    return HostPool(num_slots=num_slots, slot_bytes=SLOT)


def indices(lease: SlotLease | None) -> list[int]:
    assert lease is not None
    return [slot.index for slot in lease.slots]


async def turns(count: int = 5) -> None:
    """Let tasks that are ready run."""
    for _ in range(count):
        await asyncio.sleep(0)


class TestArena:
    def test_slots_are_page_aligned_disjoint_and_writable(self) -> None:
        pool = pool_of(5)
        lease = pool.try_lease(5)
        assert lease is not None
        addresses = []
        for value, slot in enumerate(lease.slots):
            view = np.frombuffer(slot.frame, dtype=np.uint8)
            view[:] = value
            addresses.append(view.ctypes.data)
        assert all(address % 4096 == 0 for address in addresses)
        assert sorted(addresses)[0] % (2 << 20) == 0, "the arena begins on a huge page"
        for value, slot in enumerate(lease.slots):
            assert len(slot.frame) == SLOT
            assert set(slot.frame) == {value}

    def test_prefault_leaves_the_bytes_alone_and_stops_when_told(self) -> None:
        arena = Arena(3 << 20)
        arena.view[:4] = b"kept"
        arena.prefault()
        assert bytes(arena.view[:4]) == b"kept"
        arena.stop_prefault()
        arena.prefault()
        assert bytes(arena.view[:4]) == b"kept"

    def test_more_than_the_machine_has_says_how_much_there_is(self) -> None:
        with pytest.raises(ConfigurationError, match=r"host_bytes is \d+, this machine has \d+ bytes of memory"):
            Arena(1 << 60)

    def test_a_refused_mapping_is_a_configuration_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_args: object, **_kwargs: object) -> None:
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr(mmap, "mmap", refuse)
        with pytest.raises(ConfigurationError, match="cannot map a host pool of 8192 bytes"):
            Arena(SLOT)

    def test_a_pool_without_a_slot_says_what_one_takes(self) -> None:
        with pytest.raises(ConfigurationError, match="0 chunks of 8192 bytes"):
            pool_of(0)


class TestTryLease:
    def test_it_grants_a_prefix_of_what_was_asked_for(self) -> None:
        pool = pool_of(3)
        lease = pool.try_lease(5)
        assert lease is not None
        assert (len(lease), pool.num_free, pool.num_leases) == (3, 0, 1)
        assert pool.try_lease(1) is None
        lease.release()
        assert (pool.num_free, pool.num_leases) == (3, 0)

    def test_free_slots_go_before_cached_ones(self) -> None:
        pool = pool_of(4)
        cache = Cache(pool, 2)
        lease = pool.try_lease(3)
        assert len(indices(lease)) == 3
        assert len(cache.slots) == 1

    def test_a_reserve_stays_obtainable(self) -> None:
        pool = pool_of(4)
        lease = pool.try_lease(4, keep=1)
        assert len(indices(lease)) == 3
        assert pool.try_lease(1, keep=1) is None
        assert len(indices(pool.try_lease(1))) == 1

    def test_a_reserve_counts_what_can_be_reclaimed(self) -> None:
        pool = pool_of(4)
        Cache(pool, 4)
        assert len(indices(pool.try_lease(4, keep=1))) == 3

    def test_a_reclaimer_that_gives_less_than_it_promised_shortens_the_grant(self) -> None:
        pool = pool_of(2)
        cache = Cache(pool, 2)
        cache.reclaim = lambda _count: []  # type: ignore[method-assign]
        assert pool.try_lease(2) is None
        assert pool.num_leases == 0


class TestLeaseObject:
    def test_taken_slots_are_the_takers(self) -> None:
        pool = pool_of(3)
        lease = pool.try_lease(3)
        assert lease is not None
        slot = lease.take()
        lease.release()
        assert (pool.num_free, pool.num_leases) == (2, 0)
        pool.give([slot])
        assert pool.num_free == 3

    def test_a_released_lease_is_stale(self) -> None:
        lease = pool_of(2).try_lease(2)
        assert lease is not None
        lease.release()
        lease.release()
        assert "released" in repr(lease)
        with pytest.raises(UsageError, match="stale lease"):
            _ = lease.slots
        with pytest.raises(UsageError, match="stale lease"):
            lease.take()

    def test_an_empty_lease_has_nothing_to_take(self) -> None:
        lease = pool_of(1).try_lease(1)
        assert lease is not None
        lease.take()
        with pytest.raises(UsageError, match="holds no slot"):
            lease.take()

    @pytest.mark.asyncio
    async def test_leaving_the_block_gives_everything_back(self) -> None:
        pool = pool_of(2)
        lease = await pool.lease(2, timeout_s=1)
        assert lease is not None
        async with lease:
            assert pool.num_free == 0
        assert pool.num_free == 2

    def test_giving_a_slot_back_twice_is_our_bug_and_is_caught(self) -> None:
        pool = pool_of(1)
        lease = pool.try_lease(1)
        assert lease is not None
        slot = lease.take()
        pool.give([slot])
        with pytest.raises(InvariantError, match="2 free"):
            pool.give([slot])


class TestWaiting:
    @pytest.mark.asyncio
    async def test_what_comes_back_in_time_is_granted(self) -> None:
        pool = pool_of(2)
        first = pool.try_lease(2)
        assert first is not None
        waiting = asyncio.create_task(pool.lease(2, timeout_s=5))
        await turns()
        assert (waiting.done(), pool.num_waiters) == (False, 1)
        first.release()
        assert len(indices(await waiting)) == 2
        assert pool.num_waiters == 0

    @pytest.mark.asyncio
    async def test_nothing_in_time_is_none(self) -> None:
        pool = pool_of(1)
        kept = pool.try_lease(1)
        assert await pool.lease(1, timeout_s=0.01) is None
        assert await pool.lease(1, timeout_s=0) is None
        assert (pool.num_waiters, pool.num_leases) == (0, 1)
        assert kept is not None

    @pytest.mark.asyncio
    async def test_first_come_first_served_and_a_later_small_one_does_not_overtake(self) -> None:
        pool = pool_of(1)
        held = pool.try_lease(1)
        assert held is not None
        order: list[str] = []

        async def wait(name: str, count: int) -> None:
            lease = await pool.lease(count, timeout_s=5)
            assert lease is not None
            order.append(name)
            lease.release()

        tasks = [asyncio.create_task(wait(name, count)) for name, count in (("a", 3), ("b", 1), ("c", 1))]
        await turns()
        assert pool.try_lease(1) is None, "others wait"
        held.release()
        await asyncio.gather(*tasks)
        assert order == ["a", "b", "c"]

    @pytest.mark.asyncio
    async def test_loads_go_ahead_of_stores(self) -> None:
        pool = pool_of(3)
        held = [pool.try_lease(1) for _ in range(3)]
        order: list[str] = []

        async def wait(name: str, keep: int) -> None:
            lease = await pool.lease(1, timeout_s=5, keep=keep)
            assert lease is not None
            order.append(name)
            lease.release()

        store = asyncio.create_task(wait("store", 1))
        await turns()
        load = asyncio.create_task(wait("load", 0))
        await turns()
        for lease in held:
            assert lease is not None
            lease.release()
        await asyncio.gather(store, load)
        assert order == ["load", "store"]

    @pytest.mark.asyncio
    async def test_slots_that_become_reclaimable_serve_waiters(self) -> None:
        pool = pool_of(1)
        cache = Cache(pool, 1)
        slots, cache.slots = cache.slots, []
        waiting = asyncio.create_task(pool.lease(1, timeout_s=5))
        await turns()
        cache.slots = slots
        assert pool.try_lease(1) is None, "somebody has waited longer"
        pool.serve()
        assert indices(await waiting) == [0]

    @pytest.mark.asyncio
    async def test_a_cancelled_wait_leaves_no_trace(self) -> None:
        pool = pool_of(1)
        held = pool.try_lease(1)
        assert held is not None
        waiting = asyncio.create_task(pool.lease(1, timeout_s=5))
        await turns()
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert pool.num_waiters == 0
        held.release()
        assert (pool.num_free, pool.num_leases) == (1, 0)

    @pytest.mark.asyncio
    async def test_a_grant_that_crosses_a_cancellation_goes_to_the_next(self) -> None:
        pool = pool_of(1)
        held = pool.try_lease(1)
        assert held is not None
        first = asyncio.create_task(pool.lease(1, timeout_s=5))
        second = asyncio.create_task(pool.lease(1, timeout_s=5))
        await turns()
        held.release()  # grants to the first ...
        first.cancel()  # ... which never hears of it
        assert len(indices(await second)) == 1
        assert first.cancelled()

    @pytest.mark.asyncio
    async def test_a_waiter_cancelled_in_the_same_turn_is_passed_over(self) -> None:
        pool = pool_of(1)
        held = pool.try_lease(1)
        assert held is not None
        first = asyncio.create_task(pool.lease(1, timeout_s=5))
        second = asyncio.create_task(pool.lease(1, timeout_s=5))
        await turns()
        first.cancel()  # its future is cancelled at once, its task ends later
        held.release()
        assert len(indices(await second)) == 1
        await asyncio.wait([first])
        assert (pool.num_free, pool.num_leases) == (0, 1)

    @pytest.mark.asyncio
    async def test_a_grant_that_crosses_the_timeout_is_not_lost(self) -> None:
        pool = pool_of(1)
        held = pool.try_lease(1)
        assert held is not None
        waiting = asyncio.create_task(pool.lease(1, timeout_s=0.02))
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        loop.call_at(loop.time() + 0.02, lambda: (held.release(), done.set_result(None)))
        await done
        lease = await waiting
        if lease is not None:
            lease.release()
        assert (pool.num_free, pool.num_leases, pool.num_waiters) == (1, 0, 0)

    @pytest.mark.asyncio
    async def test_a_hundred_waiters_and_random_sizes_lose_nothing(self) -> None:
        pool = pool_of(7)
        in_use: set[int] = set()

        async def work(number: int) -> None:
            lease = await pool.lease(1 + number % 5, timeout_s=5, keep=number % 3)
            assert lease is not None
            mine = set(indices(lease))
            assert not mine & in_use, "a slot has one owner"
            in_use.update(mine)
            await turns(number % 4)
            in_use.difference_update(mine)
            lease.release()

        await asyncio.gather(*(work(number) for number in range(100)))
        assert (pool.num_free, pool.num_leases, pool.num_waiters) == (7, 0, 0)
        assert repr(pool) == "<HostPool 7/7 free, 0 leases, 0 waiting>"


def test_a_closed_pool_grants_nothing() -> None:
    pool = pool_of(2)
    pool.close()
    assert pool.num_free == 0
    assert pool.try_lease(1) is None
