"""A lookup's lease keeps its promise, and ends: by release, by time, by clear."""

from __future__ import annotations

import asyncio

import pytest
import torch

from akvcache import CacheEngine, StopReason, UsageError
from akvcache.frame import frame_bytes
from akvcache.testing import FaultyBackend, MemoryBackend, MemoryStore, VirtualClock
from tests.doubles import GatedConnector
from tests.support import CHUNK, MODEL, PagedKV, config_for, open_engine

T = CHUNK


def timed_engine(kv: PagedKV, num_slots: int, clock: VirtualClock, **options: object):
    """Return the context manager of an engine whose leases follow `clock`."""
    config = config_for(kv, num_slots, **options)
    return CacheEngine.open(config, connector=kv.connector, namespace=MODEL, tiers=[], clock=clock)


class TestPromise:
    @pytest.mark.asyncio
    async def test_with_a_lease_the_promised_tokens_come(self) -> None:
        """LR-01."""
        kv = PagedKV(20 * T)
        async with open_engine(kv, 6) as engine:
            await engine.store(*kv.part(0, 5))
            before = kv.rows(0, 5 * T)
            found = await engine.lookup(kv.part(0, 5)[0], lease_s=30)
            assert found.lease is not None
            assert (found.hit_tokens, found.lease.tokens) == (5 * T, 5 * T)
            async with found.lease as lease:
                pressed = await engine.store(*kv.part(5, 11))
                assert (pressed.stored_tokens, pressed.stopped) == (T, StopReason.MEMORY_PRESSURE)
                kv.wipe()
                loaded = await engine.retrieve(*kv.part(0, 5), lease=lease)
                assert (loaded.loaded_tokens, loaded.stopped) == (5 * T, None)
                assert torch.equal(kv.rows(0, 5 * T), before)

    @pytest.mark.asyncio
    async def test_without_a_lease_a_shorter_prefix_comes(self) -> None:
        kv = PagedKV(20 * T)
        async with open_engine(kv, 6) as engine:
            await engine.store(*kv.part(0, 5))
            assert (await engine.lookup(kv.part(0, 5)[0])).hit_tokens == 5 * T
            await engine.store(*kv.part(5, 9))  # one slot is free, so the tail of three chunks goes
            loaded = await engine.retrieve(*kv.part(0, 5))
            assert (loaded.loaded_tokens, loaded.hit_tokens) == (2 * T, 2 * T)
            assert loaded.stopped is StopReason.MISSING

    @pytest.mark.asyncio
    async def test_a_lease_protects_in_the_lower_tier_too(self) -> None:
        kv = PagedKV(20 * T)
        frame = frame_bytes(kv.connector.layout.payload_bytes(T))
        store = MemoryStore()
        async with open_engine(kv, 4, [MemoryBackend(store, capacity_bytes=6 * frame)]) as engine:
            await (await engine.store(*kv.part(0, 6))).durable()
            await (await engine.store(*kv.part(6, 7))).durable()
            assert (await engine.lookup(kv.part(0, 6)[0])).hit_tokens == 5 * T, "the newcomer took the tail's place"
            found = await engine.lookup(kv.part(0, 6)[0], lease_s=30)
            assert found.lease is not None
            async with found.lease as lease:
                assert lease.tokens == 5 * T
                for i in range(7, 15):
                    await (await engine.store(*kv.part(i, i + 1))).durable()
                assert (await engine.retrieve(*kv.part(0, 6), lease=lease)).loaded_tokens == 5 * T
            for i in range(15, 20):
                await (await engine.store(*kv.part(i, i + 1))).durable()
            await engine.flush()
        async with open_engine(kv, 4, [MemoryBackend(store)]) as engine:
            assert (await engine.lookup(kv.part(0, 6)[0])).hit_tokens < 5 * T, "released, it leaves as any other"

    @pytest.mark.asyncio
    async def test_a_chunk_that_is_being_copied_is_not_evicted(self) -> None:
        """CB-07, RL-07: the copy takes longer than everything else."""
        kv = PagedKV(20 * T)
        kv.connector = gated = GatedConnector(kv.connector)  # type: ignore[assignment]
        async with open_engine(kv, 4) as engine:
            await engine.store(*kv.part(0, 3))
            before = kv.rows(0, 3 * T)
            kv.wipe()
            gated.hold()
            retrieving = asyncio.create_task(engine.retrieve(*kv.part(0, 3)))
            await gated.reached()
            pressing = asyncio.create_task(engine.store(*kv.part(3, 9)))
            await gated.reached(2)
            gated.release()
            loaded, kept = await asyncio.gather(retrieving, pressing)
            assert loaded.loaded_tokens == 3 * T
            assert torch.equal(kv.rows(0, 3 * T), before)
            assert kept.stored_tokens >= T

    @pytest.mark.asyncio
    async def test_a_lease_of_no_hit_is_harmless(self) -> None:
        kv = PagedKV(4 * T)
        async with open_engine(kv, 4) as engine:
            found = await engine.lookup(kv.tokens, lease_s=1)
            assert found.lease is not None
            async with found.lease as lease:
                assert lease.tokens == 0
                assert (await engine.retrieve(kv.tokens, kv.slots, lease=lease)).loaded_tokens == 0

    @pytest.mark.asyncio
    async def test_no_lease_unless_asked_for(self) -> None:
        kv = PagedKV(4 * T)
        async with open_engine(kv, 4) as engine:
            assert (await engine.lookup(kv.tokens)).lease is None


class TestEnd:
    @pytest.mark.asyncio
    async def test_release_counts_once_whoever_calls_it(self) -> None:
        """RL-03: released by the retrieving task, again, and by another task."""
        kv = PagedKV(12 * T)
        async with open_engine(kv, 4) as engine:
            await engine.store(*kv.part(0, 4))
            one = (await engine.lookup(kv.part(0, 4)[0], lease_s=30)).lease
            two = (await engine.lookup(kv.part(0, 4)[0], lease_s=30)).lease
            assert one is not None
            assert two is not None
            await engine.retrieve(*kv.part(0, 4), lease=one)
            one.release()
            one.release()

            async def elsewhere() -> None:
                one.release()

            await asyncio.create_task(elsewhere())
            assert (await engine.store(*kv.part(4, 8))).stored_tokens == 0, "the other lease still protects"
            two.release()
            assert (await engine.store(*kv.part(4, 8))).stored_tokens == 4 * T

    @pytest.mark.asyncio
    async def test_leases_that_nobody_uses_end_by_their_deadline(self) -> None:
        """RL-01: many lookups, no retrieve, no release."""
        kv = PagedKV(30 * T)
        clock = VirtualClock()
        async with timed_engine(kv, 10, clock) as engine:
            await engine.store(*kv.part(0, 10))
            leases = [(await engine.lookup(kv.part(0, 10)[0], lease_s=20)).lease for _ in range(1000)]
            blocked = await engine.store(*kv.part(10, 20))
            assert (blocked.stored_tokens, blocked.stopped) == (0, StopReason.MEMORY_PRESSURE)
            clock.advance(20)
            assert not any(lease.live for lease in leases if lease is not None)
            kept = await engine.store(*kv.part(10, 20))
            assert (kept.stored_tokens, kept.stopped) == (10 * T, None)
            assert all(lease.released for lease in leases if lease is not None)

    @pytest.mark.asyncio
    async def test_an_ended_lease_is_no_error_and_no_promise(self) -> None:
        kv = PagedKV(12 * T)
        clock = VirtualClock()
        async with timed_engine(kv, 4, clock) as engine:
            await engine.store(*kv.part(0, 4))
            lease = (await engine.lookup(kv.part(0, 4)[0], lease_s=5)).lease
            clock.advance(6)
            await engine.store(*kv.part(4, 6))
            loaded = await engine.retrieve(*kv.part(0, 4), lease=lease)
            assert (loaded.loaded_tokens, loaded.stopped) == (2 * T, StopReason.MISSING)

    @pytest.mark.asyncio
    async def test_no_lease_is_longer_than_the_engine_allows(self) -> None:
        kv = PagedKV(8 * T)
        clock = VirtualClock()
        async with timed_engine(kv, 4, clock, max_lease_s=10) as engine:
            await engine.store(*kv.part(0, 4))
            lease = (await engine.lookup(kv.part(0, 4)[0], lease_s=1e9)).lease
            assert lease is not None
            assert lease.deadline == clock.now() + 10

    @pytest.mark.asyncio
    async def test_a_lease_expires_by_itself_on_the_real_clock(self) -> None:
        kv = PagedKV(8 * T)
        async with open_engine(kv, 4, memory_wait_s=5) as engine:
            await engine.store(*kv.part(0, 4))
            await engine.lookup(kv.part(0, 4)[0], lease_s=0.05)
            assert (await engine.store(*kv.part(4, 8))).stored_tokens == 4 * T, "the store waited for the expiry"

    @pytest.mark.asyncio
    async def test_the_lease_of_another_engine_is_refused(self) -> None:
        kv = PagedKV(4 * T)
        async with open_engine(kv, 4) as engine, open_engine(kv, 4) as other:
            await other.store(kv.tokens, kv.slots)
            lease = (await other.lookup(kv.tokens, lease_s=5)).lease
            with pytest.raises(UsageError, match="granted by another engine"):
                await engine.retrieve(kv.tokens, kv.slots, lease=lease)
            assert (await other.retrieve(kv.tokens, kv.slots, lease=lease)).loaded_tokens == 4 * T

    @pytest.mark.asyncio
    async def test_a_lease_that_outlives_its_engine_is_released_quietly(self) -> None:
        kv = PagedKV(4 * T)
        async with open_engine(kv, 4) as engine:
            await engine.store(kv.tokens, kv.slots)
            lease = (await engine.lookup(kv.tokens, lease_s=50)).lease
        assert lease is not None
        assert lease.released
        lease.release()

    @pytest.mark.asyncio
    async def test_clear_ends_leases(self) -> None:
        kv = PagedKV(8 * T)
        async with open_engine(kv, 4) as engine:
            await engine.store(*kv.part(0, 4))
            lease = (await engine.lookup(kv.part(0, 4)[0], lease_s=50)).lease
            await engine.clear()
            assert lease is not None
            assert lease.released
            assert (await engine.store(*kv.part(4, 8))).stored_tokens == 4 * T


class TestReserve:
    @pytest.mark.asyncio
    async def test_a_pool_full_of_leased_chunks_still_loads(self) -> None:
        """HG-01: staging has a reserve that no lease can take."""
        kv = PagedKV(40 * T)
        store = MemoryStore()
        async with open_engine(kv, 64, [MemoryBackend(store)]) as engine:
            await engine.store(*kv.part(0, 20))
            await engine.store(*kv.part(20, 40))
        before = kv.rows()
        async with open_engine(kv, 8, [MemoryBackend(store)]) as engine:
            await engine.prefetch(kv.part(0, 20)[0])
            found = await engine.lookup(kv.part(0, 20)[0], lease_s=60)
            assert found.lease is not None
            assert found.lease.tokens == 20 * T, "what host memory cannot hold is protected in the tier"
            kv.wipe()
            loaded = await engine.retrieve(*kv.part(20, 40), deadline_s=5)
            assert (loaded.loaded_tokens, loaded.stopped) == (20 * T, None)
            assert torch.equal(kv.rows(20 * T), before[:, 20 * T :])

    @pytest.mark.asyncio
    async def test_leases_during_loads_leave_the_reserve_too(self) -> None:
        kv = PagedKV(20 * T)
        store = MemoryStore()
        async with open_engine(kv, 64, [MemoryBackend(store)]) as engine:
            await engine.store(*kv.part(0, 8))
            await engine.store(*kv.part(8, 16))
        kv.connector = gated = GatedConnector(kv.connector)  # type: ignore[assignment]
        async with open_engine(kv, 8, [MemoryBackend(store)]) as engine:
            gated.hold()
            loading = asyncio.create_task(engine.retrieve(*kv.part(0, 8)))
            await gated.reached()
            lease = (await engine.lookup(kv.part(0, 8)[0], lease_s=60)).lease
            gated.release()
            await loading
            assert lease is not None
            more = (await engine.lookup(kv.part(0, 8)[0], lease_s=60)).lease
            assert more is not None
            assert (await engine.retrieve(*kv.part(8, 16))).loaded_tokens == 8 * T

    @pytest.mark.asyncio
    async def test_with_every_slot_in_use_a_load_ends_within_its_deadline(self) -> None:
        kv = PagedKV(20 * T)
        store = MemoryStore()
        async with open_engine(kv, 64, [MemoryBackend(store)]) as engine:
            await engine.store(*kv.part(0, 4))
            await engine.store(*kv.part(4, 8))
        backend = FaultyBackend(MemoryBackend(store))
        kv.connector = gated = GatedConnector(kv.connector)  # type: ignore[assignment]
        async with open_engine(kv, 4, [backend], memory_wait_s=0.05, staging_reserve=0) as engine:
            gated.hold()
            first = asyncio.create_task(engine.retrieve(*kv.part(0, 4)))
            await gated.reached()  # all four slots are in flight, the first one on its way to the device
            blocked = await engine.retrieve(*kv.part(4, 8))
            assert (blocked.loaded_tokens, blocked.stopped) == (0, StopReason.MEMORY_PRESSURE)
            late = await engine.retrieve(*kv.part(4, 8), deadline_s=0.02)
            assert (late.loaded_tokens, late.stopped) == (0, StopReason.DEADLINE)
            gated.release()
            assert (await first).loaded_tokens == 4 * T
            assert (await engine.retrieve(*kv.part(4, 8))).loaded_tokens == 4 * T
