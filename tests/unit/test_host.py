"""The host tier: arrivals that end once, leases with an owner and an end, a reserve that leases cannot take."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence

import pytest

from akvcache.buffers import HostPool
from akvcache.host import HostLease, HostTier
from akvcache.index import Entry
from akvcache.keys import ChunkKey
from akvcache.planner import HOST
from akvcache.policy import LruPolicy
from akvcache.results import StopReason
from akvcache.telemetry import Telemetry
from akvcache.testing import VirtualClock, make_keys

A = make_keys(8, label="a")
B = make_keys(8, label="b")


class Rig:
    """A host tier of a few slots under a clock that stands still."""

    def __init__(self, num_slots: int = 4, reserve: int = 0) -> None:
        self.clock = VirtualClock()
        self.pool = HostPool(num_slots=num_slots, slot_bytes=4096)
        self.host = HostTier(
            pool=self.pool, policy=LruPolicy(100), clock=self.clock, telemetry=Telemetry(), reserve=reserve
        )

    def begin(self, key: ChunkKey) -> tuple[Entry, asyncio.Future[StopReason | None]]:
        lease = self.pool.try_lease(1)
        assert lease is not None
        try:
            return self.host.begin(key, lease.take(), 16)
        finally:
            lease.release()

    def add(self, keys: Sequence[ChunkKey]) -> list[Entry]:
        tick = self.host.index.touch(keys)
        entries = [self.begin(key)[0] for key in keys]
        for entry in entries:
            assert self.host.publish(entry, tick)
        return entries

    def lease(self, keys: Sequence[ChunkKey], seconds: float = 30, *tiers: str) -> HostLease:
        sources = [([HOST] if self.host.resident(key) else []) + list(tiers) for key in keys]
        return self.host.lease(keys, [16 * (i + 1) for i in range(len(keys))], sources, seconds)

    def present(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return [self.host.resident(key) is not None for key in keys]


class TestArrivals:
    @pytest.mark.asyncio
    async def test_publishing_ends_the_arrival_and_makes_the_chunk_visible(self) -> None:
        rig = Rig()
        entry, arrival = rig.begin(A[0])
        assert rig.host.filling(A[0]) == (entry, arrival)
        assert rig.host.resident(A[0]) is None
        assert rig.host.publish(entry)
        assert await arrival is None
        assert rig.host.filling(A[0]) is None
        assert rig.host.resident(A[0]) is entry

    @pytest.mark.asyncio
    async def test_abandoning_tells_why_and_gives_the_slot_back(self) -> None:
        rig = Rig()
        entry, arrival = rig.begin(A[0])
        rig.host.abandon(entry, StopReason.CORRUPT)
        assert await arrival is StopReason.CORRUPT
        assert rig.host.filling(A[0]) is None
        assert rig.pool.num_free == 4

    @pytest.mark.asyncio
    async def test_clear_ends_what_is_being_filled_and_it_never_becomes_visible(self) -> None:
        rig = Rig()
        rig.add(A[:2])
        entry, arrival = rig.begin(A[2])
        assert rig.host.clear() == 3
        assert not rig.host.publish(entry)
        assert await arrival is StopReason.CLEARED
        assert rig.present(A[:3]) == [False] * 3
        assert rig.pool.num_free == 4

    @pytest.mark.asyncio
    async def test_a_chunk_filled_anew_after_clear_is_not_ended_by_the_old_one(self) -> None:
        rig = Rig()
        old, _ = rig.begin(A[0])
        rig.host.clear()
        new, arrival = rig.begin(A[0])
        assert not rig.host.publish(old)
        assert not arrival.done()
        assert rig.host.filling(A[0]) == (new, arrival)
        rig.host.publish(new)
        assert await arrival is None


class TestSlots:
    @pytest.mark.asyncio
    async def test_a_full_pool_evicts_the_oldest_tail_for_a_newcomer(self) -> None:
        rig = Rig(4)
        rig.add(A[:2])
        rig.add(B[:2])
        lease = await rig.host.acquire(1, timeout_s=1)
        assert lease is not None
        assert rig.present(A[:2] + B[:2]) == [True, False, True, True]

    @pytest.mark.asyncio
    async def test_a_store_leaves_the_reserve_and_a_load_takes_it(self) -> None:
        rig = Rig(4, reserve=1)
        store = await rig.host.acquire(9, timeout_s=1)
        assert store is not None
        assert len(store) == 3
        assert await rig.host.acquire(1, timeout_s=0.01) is None
        assert rig.pool.try_lease(1) is not None

    @pytest.mark.asyncio
    async def test_a_hold_given_up_serves_who_waits_for_a_slot(self) -> None:
        rig = Rig(2)
        hold = rig.host.hold("retrieve")
        for entry in rig.add(A[:2]):
            hold.add(entry)
        waiting = asyncio.create_task(rig.host.acquire(2, timeout_s=5))
        await asyncio.sleep(0)
        hold.release()
        lease = await waiting
        assert lease is not None
        assert len(lease) == 2
        assert rig.present(A[:2]) == [False, False]

    @pytest.mark.asyncio
    async def test_owners_have_names_of_their_own(self) -> None:
        rig = Rig()
        assert rig.host.hold("store").owner != rig.host.hold("store").owner


class TestLeases:
    @pytest.mark.asyncio
    async def test_a_lease_protects_until_released(self) -> None:
        rig = Rig(4)
        rig.add(A[:4])
        lease = rig.lease(A[:3])
        assert (lease.live, lease.tokens, list(lease.keys)) == (True, 48, A[:3])
        assert all(rig.host.is_protected(key) for key in A[:3])
        assert not rig.host.is_protected(A[3])
        got = await rig.host.acquire(4, timeout_s=0.01)
        assert got is not None
        assert len(got) == 1
        lease.release()
        assert (lease.live, lease.released, rig.host.num_leases) == (False, True, 0)
        assert not rig.host.is_protected(A[0])
        more = await rig.host.acquire(4, timeout_s=0.01)
        assert more is not None
        assert len(more) == 3

    @pytest.mark.asyncio
    async def test_release_counts_once(self) -> None:
        rig = Rig(4)
        [entry] = rig.add(A[:1])
        one, two = rig.lease(A[:1]), rig.lease(A[:1])
        assert entry.holds == 2
        one.release()
        one.release()
        assert entry.holds == 1
        assert rig.host.is_protected(A[0])
        two.release()
        assert entry.holds == 0
        assert not rig.host.is_protected(A[0])

    @pytest.mark.asyncio
    async def test_leaving_the_block_releases(self) -> None:
        rig = Rig(4)
        rig.add(A[:1])
        async with rig.lease(A[:1]) as lease:
            assert lease.live
        assert lease.released
        assert "ended" in repr(lease)

    @pytest.mark.asyncio
    async def test_time_ends_a_lease_for_whoever_needs_the_slot(self) -> None:
        rig = Rig(2)
        rig.add(A[:2])
        lease = rig.lease(A[:2], 30)
        rig.clock.advance(29.9)
        assert lease.live
        assert await rig.host.acquire(1, timeout_s=0.01) is None
        rig.clock.advance(0.2)
        assert not lease.live
        assert not lease.released, "nobody needed the slot yet"
        assert await rig.host.acquire(1, timeout_s=0.01) is not None
        assert lease.released
        lease.release()
        assert rig.host.num_leases == 0

    @pytest.mark.asyncio
    async def test_only_leases_whose_time_is_over_end(self) -> None:
        rig = Rig(4)
        rig.add(A[:4])
        short, long = rig.lease(A[:2], 10), rig.lease(A[2:4], 60)
        rig.clock.advance(10)
        rig.host.expire()
        assert (short.released, long.released) == (True, False)
        assert long.live
        rig.clock.advance(50)
        rig.host.expire()
        assert long.released

    @pytest.mark.asyncio
    async def test_a_lease_ends_by_itself_and_wakes_who_waits(self) -> None:
        """On the real clock: nobody has to ask."""
        pool = HostPool(num_slots=1, slot_bytes=4096)
        host = HostTier(pool=pool, policy=LruPolicy(9), clock=LoopClock(), telemetry=Telemetry(), reserve=0)
        slots = pool.try_lease(1)
        assert slots is not None
        host.publish(host.begin(A[0], slots.take(), 16)[0])
        slots.release()
        lease = host.lease(A[:1], [16], [[HOST]], 0.05)
        granted = await host.acquire(1, timeout_s=5)
        assert granted is not None
        assert lease.released

    @pytest.mark.asyncio
    async def test_a_lease_that_nobody_keeps_is_dropped_without_a_trace(self) -> None:
        rig = Rig(2)
        rig.add(A[:2])
        rig.lease(A[:2], 5)
        gc.collect()
        rig.clock.advance(6)
        assert await rig.host.acquire(2, timeout_s=0.01) is not None
        assert rig.host.num_leases == 0

    @pytest.mark.asyncio
    async def test_the_reserve_cannot_be_leased(self) -> None:
        rig = Rig(4, reserve=1)
        rig.add(A[:4])
        lease = rig.lease(A[:4])
        assert lease.tokens == 48
        assert rig.pool.try_lease(1) is not None, "a load still finds a slot"

    @pytest.mark.asyncio
    async def test_a_second_lease_of_the_same_chunks_costs_no_slot(self) -> None:
        rig = Rig(4, reserve=1)
        rig.add(A[:3])
        first, second = rig.lease(A[:3]), rig.lease(A[:3])
        assert first.tokens == second.tokens == 48
        assert rig.pool.try_lease(1) is not None

    @pytest.mark.asyncio
    async def test_chunks_that_an_operation_holds_for_a_moment_do_not_eat_the_reserve(self) -> None:
        rig = Rig(4, reserve=1)
        hold = rig.host.hold("retrieve")
        for entry in rig.add(A[:4]):
            hold.add(entry)
        lease = rig.lease(A[:4])
        hold.release()
        assert rig.pool.try_lease(1) is not None, "leases leave the reserve, whatever is held meanwhile"
        assert lease.tokens == 48

    @pytest.mark.asyncio
    async def test_a_chunk_of_a_lower_tier_is_protected_there(self) -> None:
        rig = Rig(4)
        rig.add(A[:1])
        lease = rig.lease(A[:3], 30, "nvme")
        assert lease.tokens == 48
        assert rig.host.is_protected(A[2])
        assert rig.host.index.reclaimable == 0

    @pytest.mark.asyncio
    async def test_a_lease_ends_before_a_chunk_that_no_tier_can_protect(self) -> None:
        rig = Rig(4, reserve=2)
        rig.add(A[:4])
        assert rig.lease(A[:4]).tokens == 32

    @pytest.mark.asyncio
    async def test_a_lease_knows_who_granted_it(self) -> None:
        rig, other = Rig(), Rig()
        rig.add(A[:1])
        lease = rig.lease(A[:1])
        assert lease.belongs_to(rig.host)
        assert not lease.belongs_to(other.host)

    @pytest.mark.asyncio
    async def test_an_empty_lease_is_harmless(self) -> None:
        rig = Rig()
        lease = rig.lease([])
        assert (lease.tokens, lease.live) == (0, True)
        lease.release()
        assert rig.host.num_leases == 0

    @pytest.mark.asyncio
    async def test_clear_ends_all_leases(self) -> None:
        rig = Rig()
        rig.add(A[:2])
        leases = [rig.lease(A[:2]), rig.lease(A[:1])]
        rig.host.clear()
        assert all(lease.released for lease in leases)
        assert rig.host.num_leases == 0
        assert rig.pool.num_free == 4
        assert repr(rig.host).endswith("0 leases>")


class LoopClock:
    """The running loop's time."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()
