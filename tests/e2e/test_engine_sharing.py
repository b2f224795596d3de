"""Nothing is moved twice: dedupe before copying, single flight, one prefix over several tiers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from akvcache import RetrieveResult, StopReason
from akvcache.keys import ChunkKey, depth_of
from akvcache.testing import FaultyBackend, MemoryBackend, MemoryStore
from tests.doubles import GatedConnector, WatchedConnector
from tests.support import CHUNK, PagedKV, depths, head_mask, open_engine

T = CHUNK


class CountingBackend(MemoryBackend):
    """Notes every question, read and write by the position of its chunk."""

    def __init__(self, store: MemoryStore | None = None, *, name: str = "memory") -> None:
        super().__init__(store, name=name)
        self.asked: list[list[int]] = []
        self.reads: list[int] = []
        self.writes: list[int] = []

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        self.asked.append([depth_of(key) for key in keys])
        return await super().contains(keys)

    async def read(self, key: ChunkKey, into: memoryview) -> int | None:
        self.reads.append(depth_of(key))
        return await super().read(key, into)

    async def write(self, key: ChunkKey, frame: memoryview) -> None:
        self.writes.append(depth_of(key))
        await super().write(key, frame)


async def stored(kv: PagedKV, keep: Sequence[int] | None = None) -> MemoryStore:
    """Return a store that holds the prompt's chunks, or some of them."""
    store = MemoryStore()
    async with open_engine(kv, 64, [MemoryBackend(store)]) as engine:
        await engine.store(kv.tokens, kv.slots)
    if keep is not None:
        store.frames = {key: frame for key, frame in store.frames.items() if depth_of(key) in keep}
    return store


class TestDedupe:
    @pytest.mark.asyncio
    @pytest.mark.parametrize("num_slots", [4, 32])
    async def test_a_second_store_copies_and_writes_nothing(self, num_slots: int) -> None:
        kv = PagedKV(10 * T)
        kv.connector = watched = WatchedConnector(kv.connector)  # type: ignore[assignment]
        backend = CountingBackend()
        async with open_engine(kv, num_slots, [backend]) as engine:
            first = await engine.store(kv.tokens, kv.slots)
            await engine.flush()
            assert (first.new_tokens, first.existing_tokens) == (10 * T, 0)
            assert len(watched.gathered) == len(backend.writes) == 10
            again = await engine.store(kv.tokens, kv.slots)
            await engine.flush()
        assert (again.stored_tokens, again.new_tokens, again.existing_tokens) == (10 * T, 0, 10 * T)
        assert len(watched.gathered) == len(backend.writes) == 10

    @pytest.mark.asyncio
    async def test_a_longer_prompt_copies_only_what_is_new(self) -> None:
        kv = PagedKV(10 * T)
        kv.connector = watched = WatchedConnector(kv.connector)  # type: ignore[assignment]
        async with open_engine(kv, 32, [MemoryBackend()]) as engine:
            await engine.store(*kv.part(0, 6))
            kept = await engine.store(kv.tokens, kv.slots)
        assert (kept.new_tokens, kept.existing_tokens) == (4 * T, 6 * T)
        assert sorted(watched.gathered) == [(i * T, (i + 1) * T) for i in range(10)]

    @pytest.mark.asyncio
    @pytest.mark.parametrize("same_engine", [True, False])
    async def test_a_prefix_with_holes_gets_back_only_the_missing_chunks(self, same_engine: bool) -> None:
        """CW-02: chunks 1 and 3 were deleted."""
        kv = PagedKV(5 * T)
        kv.connector = watched = WatchedConnector(kv.connector)  # type: ignore[assignment]
        before = kv.rows()
        backend = CountingBackend(MemoryStore())
        async with open_engine(kv, 32, [backend]) as engine:
            await engine.store(kv.tokens, kv.slots)
            await engine.flush()
            for key in [key for key in backend.store.frames if depth_of(key) in (1, 3)]:
                del backend.store.frames[key]
            if same_engine:
                backend.writes.clear()
                kept = await engine.store(kv.tokens, kv.slots)
                assert (await kept.durable()).durable_tokens == 5 * T
                assert kept.existing_tokens == 5 * T, "host memory still has them"
        if not same_engine:
            watched.gathered.clear()
            backend = CountingBackend(backend.store)
            async with open_engine(kv, 32, [backend]) as engine:
                kept = await engine.store(kv.tokens, kv.slots)
                assert (kept.new_tokens, kept.existing_tokens) == (2 * T, 3 * T)
                assert (await kept.durable()).durable_tokens == 5 * T
            assert watched.gathered == [(T, 2 * T), (3 * T, 4 * T)]
        assert sorted(backend.writes) == [1, 3]
        assert depths(backend.store) == [0, 1, 2, 3, 4]
        kv.wipe()
        async with open_engine(kv, 32, [MemoryBackend(backend.store)]) as engine:
            assert (await engine.retrieve(kv.tokens, kv.slots)).loaded_tokens == 5 * T
        assert torch.equal(kv.rows(), before)

    @pytest.mark.asyncio
    async def test_what_one_tier_lacks_is_written_to_that_tier_only(self) -> None:
        kv = PagedKV(4 * T)
        one, two = CountingBackend(await stored(kv, [0, 1]), name="one"), CountingBackend(MemoryStore(), name="two")
        async with open_engine(kv, 32, [one, two]) as engine:
            await engine.prefetch(kv.tokens)
            kept = await engine.store(kv.tokens, kv.slots)
            assert (kept.new_tokens, kept.existing_tokens) == (2 * T, 2 * T)
            await engine.flush()
        assert (sorted(one.writes), sorted(two.writes)) == ([2, 3], [0, 1, 2, 3])


class TestManyTiers:
    @pytest.mark.asyncio
    async def test_a_prefix_in_three_tiers_is_one_hit(self) -> None:
        kv = PagedKV(9 * T + 3)
        before = kv.rows(0, 9 * T)
        one = MemoryBackend(await stored(kv, [2, 3, 6]), name="one")
        two = MemoryBackend(await stored(kv, [2, 4, 5, 7, 8]), name="two")
        async with open_engine(kv, 32, [one, two]) as engine:
            await engine.store(*kv.part(0, 2))
            kv.wipe()
            found = await engine.lookup(kv.tokens)
            assert (found.hit_tokens, found.stopped) == (9 * T, None)
            assert found.by_tier == {"host": 2 * T, "one": 3 * T, "two": 4 * T}
            loaded = await engine.retrieve(kv.tokens, kv.slots)
            assert loaded.by_tier == found.by_tier
            assert loaded.loaded_tokens == loaded.hit_tokens == sum(loaded.by_tier.values()) == 9 * T
            assert torch.equal(kv.rows(0, 9 * T), before)
            again = await engine.lookup(kv.tokens)
            assert again.by_tier == {"host": 9 * T}, "what was loaded is in host memory now"

    @pytest.mark.asyncio
    async def test_tiers_are_asked_only_for_what_host_memory_lacks(self) -> None:
        kv = PagedKV(6 * T)
        backend = CountingBackend(await stored(kv))
        async with open_engine(kv, 32, [backend]) as engine:
            await engine.prefetch(kv.part(0, 4)[0])
            backend.asked.clear()
            assert (await engine.lookup(kv.tokens)).hit_tokens == 6 * T
            assert backend.asked == [[4, 5]]
            await engine.retrieve(kv.tokens, kv.slots)
            backend.asked.clear()
            await engine.lookup(kv.tokens)
            await engine.retrieve(kv.tokens, kv.slots)
            assert backend.asked == []

    @pytest.mark.asyncio
    async def test_a_gap_in_every_tier_ends_the_hit(self) -> None:
        kv = PagedKV(6 * T)
        one = MemoryBackend(await stored(kv, [0, 1, 4, 5]), name="one")
        two = MemoryBackend(await stored(kv, [2, 4]), name="two")
        async with open_engine(kv, 32, [one, two]) as engine:
            found = await engine.lookup(kv.tokens)
            assert (found.hit_tokens, found.stopped) == (3 * T, StopReason.MISSING)
            assert found.by_tier == {"one": 2 * T, "two": T}

    @pytest.mark.asyncio
    async def test_a_chunk_that_the_fast_tier_lost_comes_from_the_slow_one(self) -> None:
        kv = PagedKV(4 * T)
        before = kv.rows()
        store = await stored(kv)
        fast = FaultyBackend(MemoryBackend(store, name="fast"))
        async with open_engine(kv, 32, [fast, MemoryBackend(MemoryStore(), name="slow")]) as engine:
            await engine.prefetch(kv.tokens)
            await (await engine.store(kv.tokens, kv.slots)).durable()  # the slow tier has everything too
        slow = MemoryBackend(await stored(kv), name="slow")
        kv.wipe()
        fast = FaultyBackend(MemoryBackend(store, name="fast"))
        async with open_engine(kv, 32, [fast, slow]) as engine:
            found = await engine.lookup(kv.tokens)
            assert found.by_tier == {"fast": 4 * T}
            fast.hold("read")
            task = asyncio.create_task(engine.retrieve(kv.tokens, kv.slots))
            await fast.reached("read")
            for key in [key for key in store.frames if depth_of(key) in (1, 2)]:
                del store.frames[key]
            fast.release()
            loaded = await task
        assert (loaded.loaded_tokens, loaded.stopped) == (4 * T, None)
        assert loaded.by_tier == {"fast": 2 * T, "slow": 2 * T}
        assert torch.equal(kv.rows(), before)


class TestSingleFlight:
    @pytest.mark.asyncio
    @pytest.mark.parametrize("callers", [2, 10])
    async def test_concurrent_retrieves_read_each_chunk_once(self, callers: int) -> None:
        kv = PagedKV(6 * T)
        before = kv.rows()
        backend = CountingBackend(await stored(kv))
        faulty = FaultyBackend(backend)
        kv.wipe()
        async with open_engine(kv, 32, [faulty]) as engine:
            faulty.hold("read")
            tasks = [asyncio.create_task(engine.retrieve(kv.tokens, kv.slots)) for _ in range(callers)]
            await faulty.reached("read")
            faulty.release()
            results = await asyncio.gather(*tasks)
        assert sorted(backend.reads) == list(range(6))
        assert [result.loaded_tokens for result in results] == [6 * T] * callers
        assert all(sum(result.by_tier.values()) == 6 * T for result in results)
        assert torch.equal(kv.rows(), before)

    @pytest.mark.asyncio
    async def test_requests_that_share_a_part_share_its_reads(self) -> None:
        kv = PagedKV(8 * T)
        backend = CountingBackend(await stored(kv))
        async with open_engine(kv, 32, [backend]) as engine:
            results: list[RetrieveResult] = await asyncio.gather(
                *(engine.retrieve(*kv.part(0, chunks)) for chunks in (2, 8, 5, 3)),
                engine.retrieve(kv.tokens, kv.slots, mask=head_mask(4 * T, 8 * T)),
            )
            await engine.prefetch(kv.tokens)
        assert sorted(backend.reads) == list(range(8))
        assert [result.loaded_tokens // T for result in results] == [2, 8, 5, 3, 4]

    @pytest.mark.asyncio
    @pytest.mark.parametrize("callers", [2, 10])
    async def test_concurrent_stores_copy_and_write_each_chunk_once(self, callers: int) -> None:
        kv = PagedKV(6 * T)
        backend = CountingBackend(MemoryStore())
        kv.connector = gated = GatedConnector(kv.connector)  # type: ignore[assignment]
        async with open_engine(kv, 32, [backend]) as engine:
            gated.hold()
            tasks = [asyncio.create_task(engine.store(kv.tokens, kv.slots)) for _ in range(callers)]
            await gated.reached()
            gated.release()
            results = await asyncio.gather(*tasks)
            await engine.flush()
        assert sorted(gated.gathered) == [(i * T, (i + 1) * T) for i in range(6)]
        assert sorted(backend.writes) == list(range(6))
        assert [result.stored_tokens for result in results] == [6 * T] * callers
        assert sum(result.new_tokens for result in results) == 6 * T
        assert all(result.new_tokens + result.existing_tokens == 6 * T for result in results)

    @pytest.mark.asyncio
    async def test_a_chunk_whose_store_is_in_flight_is_served_from_its_slot(self) -> None:
        kv = PagedKV(T)
        before = kv.rows()
        backend = CountingBackend(MemoryStore())
        kv.connector = gated = GatedConnector(kv.connector)  # type: ignore[assignment]
        async with open_engine(kv, 32, [backend]) as engine:
            gated.hold()
            storing = asyncio.create_task(engine.store(kv.tokens, kv.slots))
            await gated.reached()
            retrieving = asyncio.create_task(engine.retrieve(kv.tokens, kv.slots))
            lookup = await engine.lookup(kv.tokens)
            assert lookup.hit_tokens == 0, "not visible before it is complete"
            gated.release()
            assert (await storing).stored_tokens == T
            loaded = await retrieving
        assert (loaded.loaded_tokens, loaded.stopped, loaded.by_tier) == (T, None, {"host": T})
        assert backend.reads == []
        assert torch.equal(kv.rows(), before)

    @pytest.mark.asyncio
    async def test_a_store_of_what_is_being_loaded_waits_for_it_and_copies_nothing(self) -> None:
        kv = PagedKV(3 * T)
        backend = FaultyBackend(CountingBackend(await stored(kv)))
        kv.connector = watched = WatchedConnector(kv.connector)  # type: ignore[assignment]
        async with open_engine(kv, 32, [backend]) as engine:
            backend.hold("read")
            loading = asyncio.create_task(engine.retrieve(kv.tokens, kv.slots))
            await backend.reached("read")
            storing = asyncio.create_task(engine.store(kv.tokens, kv.slots))
            backend.release()
            assert (await storing).existing_tokens == 3 * T
            assert (await loading).loaded_tokens == 3 * T
        assert watched.gathered == []

    @pytest.mark.asyncio
    async def test_a_store_whose_copy_fails_hands_over_to_the_next(self) -> None:
        kv = PagedKV(3 * T)
        before = kv.rows()
        kv.connector = gated = GatedConnector(kv.connector)  # type: ignore[assignment]
        wait, failed = gated.on_copy, False

        def fail_first(name: str) -> None:
            nonlocal failed
            wait(name)
            if not failed:
                failed = True
                raise RuntimeError("the device refused the copy")

        gated.on_copy = fail_first
        async with open_engine(kv, 32, copy_threads=1) as engine:
            gated.hold()
            first = asyncio.create_task(engine.store(kv.tokens, kv.slots))
            await gated.reached()
            second = asyncio.create_task(engine.store(kv.tokens, kv.slots))
            loading = asyncio.create_task(engine.retrieve(kv.tokens, kv.slots))
            await asyncio.sleep(0)
            gated.release()
            assert (await first).stopped is StopReason.TRANSFER_ERROR
            kept = await second
            assert (kept.stored_tokens, kept.new_tokens, kept.stopped) == (3 * T, 3 * T, None)
            assert (await loading).stopped in (None, StopReason.TRANSFER_ERROR)
            kv.wipe()
            assert (await engine.retrieve(kv.tokens, kv.slots)).loaded_tokens == 3 * T
        assert torch.equal(kv.rows(), before)

    @pytest.mark.asyncio
    async def test_requests_that_wait_for_a_slot_for_the_same_chunk_read_it_once(self) -> None:
        kv = PagedKV(8 * T)
        store = MemoryStore()
        async with open_engine(kv, 32, [MemoryBackend(store)]) as engine:
            await engine.store(*kv.part(0, 4))
            await engine.store(*kv.part(4, 8))
        backend = CountingBackend(store)
        kv.connector = gated = GatedConnector(kv.connector)  # type: ignore[assignment]
        async with open_engine(kv, 4, [backend], staging_reserve=0, memory_wait_s=5) as engine:
            gated.hold()
            first = asyncio.create_task(engine.retrieve(*kv.part(0, 4)))
            await gated.reached()  # every slot is in flight
            others = [asyncio.create_task(engine.retrieve(*kv.part(4, 8))) for _ in range(5)]
            for _ in range(20):
                await asyncio.sleep(0)
            gated.release()
            assert (await first).loaded_tokens == 4 * T
            assert [(await other).loaded_tokens for other in others] == [4 * T] * 5
        assert sorted(backend.reads) == [0, 0, 1, 1, 2, 2, 3, 3]

    @pytest.mark.asyncio
    async def test_stores_that_wait_for_a_slot_for_the_same_chunk_copy_it_once(self) -> None:
        kv = PagedKV(8 * T)
        kv.connector = gated = GatedConnector(kv.connector)  # type: ignore[assignment]
        async with open_engine(kv, 4, memory_wait_s=5, copy_threads=1) as engine:
            await engine.store(*kv.part(0, 4))
            gated.gathered.clear()
            gated.hold()
            first = asyncio.create_task(engine.retrieve(*kv.part(0, 4)))
            await gated.reached()  # every slot is in use
            stores = [asyncio.create_task(engine.store(*kv.part(4, 8))) for _ in range(5)]
            for _ in range(20):
                await asyncio.sleep(0)
            gated.release()
            assert (await first).loaded_tokens == 4 * T
            kept = await asyncio.gather(*stores)
        assert [result.stored_tokens for result in kept] == [4 * T] * 5
        assert sum(result.new_tokens for result in kept) == 4 * T
        assert sorted(gated.gathered) == [(i * T, (i + 1) * T) for i in range(4)]

    @pytest.mark.asyncio
    async def test_a_resident_prefix_stays_visible_while_others_store(self) -> None:
        """CW-05: 50 stores beside lookups of one resident prefix."""
        kv = PagedKV(60 * T)
        async with open_engine(kv, 64) as engine:
            await engine.store(*kv.part(0, 10))
            seen: list[int] = []

            async def look() -> None:
                for _ in range(50):
                    seen.append((await engine.lookup(kv.part(0, 10)[0])).hit_tokens)
                    await asyncio.sleep(0)

            async with asyncio.TaskGroup() as group:
                group.create_task(look())
                for i in range(10, 60):
                    group.create_task(store_one(engine, kv, i))
            assert seen == [10 * T] * 50
            assert [(await engine.lookup(kv.part(i, i + 1)[0])).hit_tokens for i in range(10, 60)] == [T] * 50

    @pytest.mark.asyncio
    async def test_overlapping_stores_of_one_growing_prompt_keep_everything(self) -> None:
        """CX-08: chunked prefill hands over three pieces before the first is done."""
        kv = PagedKV(9 * T)
        kv.connector = gated = GatedConnector(kv.connector)  # type: ignore[assignment]
        async with open_engine(kv, 32) as engine:
            gated.hold()
            stores = [asyncio.create_task(engine.store(*kv.part(0, 3)))]
            await gated.reached()
            for start, stop in ((3, 6), (6, 9)):
                tokens, slots = kv.part(0, stop)
                mask = head_mask(start * T, stop * T)
                stores.append(asyncio.create_task(engine.store(tokens, slots, mask=mask)))
            gated.release()
            results = await asyncio.gather(*stores)
            assert [result.new_tokens for result in results] == [3 * T] * 3
            assert (await engine.lookup(kv.tokens)).hit_tokens == 9 * T


async def store_one(engine: Any, kv: PagedKV, chunk: int) -> None:
    kept = await engine.store(*kv.part(chunk, chunk + 1))
    assert kept.stored_tokens == T
