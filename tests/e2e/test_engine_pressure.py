"""Too little memory: prefixes stay whole, heads outlive tails, nobody waits for ever."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from akvcache import CacheEngine, StopReason
from akvcache.frame import HEADER_BYTES, frame_bytes
from akvcache.testing import Fault, FaultKind, FaultyBackend, MemoryBackend, MemoryStore, Op, VirtualClock
from tests.doubles import GatedConnector, WatchedConnector
from tests.support import CHUNK, MODEL, PagedKV, config_for, depths, head_mask, open_engine

T = CHUNK


class TestStores:
    @pytest.mark.asyncio
    async def test_what_does_not_fit_is_cut_to_a_prefix_and_nothing_is_held(self) -> None:
        """RL-05: a pool of three chunks and a prompt of five."""
        kv = PagedKV(10 * T)
        async with open_engine(kv, 3) as engine:
            kept = await engine.store(*kv.part(0, 5))
            assert (kept.stored_tokens, kept.new_tokens) == (3 * T, 3 * T)
            assert (kept.total_tokens, kept.stopped) == (5 * T, StopReason.MEMORY_PRESSURE)
            assert (await engine.lookup(kv.part(0, 5)[0])).hit_tokens == 3 * T
            other = await engine.store(*kv.part(5, 8))
            assert (other.stored_tokens, other.stopped) == (3 * T, None)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("num_slots", [2, 3, 5])
    async def test_ten_times_the_pool_goes_through_with_a_tier(self, num_slots: int) -> None:
        kv = PagedKV(10 * num_slots * T)
        store = MemoryStore()
        async with open_engine(kv, num_slots, [MemoryBackend(store)]) as engine:
            kept = await engine.store(kv.tokens, kv.slots)
            assert (kept.stored_tokens, kept.stopped) == (len(kv.tokens), None)
            assert (await kept.durable()).durable_tokens == len(kv.tokens)
            assert (await engine.lookup(kv.tokens)).hit_tokens == len(kv.tokens)
        assert depths(store) == list(range(10 * num_slots))

    @pytest.mark.asyncio
    async def test_a_store_behind_a_mask_never_evicts_its_own_head(self) -> None:
        """EV-01: without its head the tail could never be hit."""
        kv = PagedKV(12 * T)
        async with open_engine(kv, 8) as engine:
            await engine.store(*kv.part(0, 4))
            kept = await engine.store(kv.tokens, kv.slots, mask=head_mask(4 * T, 12 * T))
            assert (kept.stored_tokens, kept.new_tokens) == (8 * T, 4 * T)
            assert kept.stopped is StopReason.MEMORY_PRESSURE
            assert (await engine.lookup(kv.tokens)).hit_tokens == kept.stored_tokens

    @pytest.mark.asyncio
    async def test_what_a_store_reports_is_what_a_lookup_finds(self) -> None:
        kv = PagedKV(40 * T)
        rng = random.Random(3)
        async with open_engine(kv, 8) as engine:
            for _ in range(60):
                start = rng.randrange(30)
                stop = start + rng.randint(1, 10)
                tokens, slots = kv.part(start, stop)
                head = min(int((await engine.lookup(tokens)).hit_tokens), rng.randrange(0, stop - start + 1) * T)
                kept = await engine.store(tokens, slots, mask=head_mask(head, len(tokens)))
                assert (await engine.lookup(tokens)).hit_tokens == kept.stored_tokens

    @pytest.mark.asyncio
    async def test_many_stores_and_retrieves_share_a_small_pool_and_all_end(self) -> None:
        kv = PagedKV(60 * T)
        store = MemoryStore()
        before = kv.rows()
        async with open_engine(kv, 4, [MemoryBackend(store)], memory_wait_s=5) as engine:
            kept = await asyncio.gather(*(engine.store(*kv.part(i, i + 6)) for i in range(0, 60, 6)))
            assert [result.stored_tokens for result in kept] == [6 * T] * 10
            await engine.flush()
            kv.wipe()
            loaded = await asyncio.gather(*(engine.retrieve(*kv.part(i, i + 6)) for i in range(0, 60, 6)))
            assert [result.loaded_tokens for result in loaded] == [6 * T] * 10
        assert torch.equal(kv.rows(), before)

    @pytest.mark.asyncio
    async def test_a_full_write_queue_gives_up_writes_and_not_the_store(self) -> None:
        """HG-04: the queue is bounded in bytes; what does not fit is dropped and said."""
        kv = PagedKV(12 * T)
        frame = frame_bytes(kv.connector.layout.payload_bytes(T))
        backend = FaultyBackend(MemoryBackend(MemoryStore()))
        async with open_engine(
            kv, 16, [backend], write_queue_bytes=2 * frame, memory_wait_s=0.3, store_deadline_s=10
        ) as engine:
            backend.hold("write")
            start = asyncio.get_running_loop().time()
            kept = await engine.store(kv.tokens, kv.slots)
            assert asyncio.get_running_loop().time() - start < 1.5, "it waits for the queue once, not for every chunk"
            assert (kept.stored_tokens, kept.new_tokens, kept.stopped) == (12 * T, 12 * T, None)
            assert (await engine.lookup(kv.tokens)).hit_tokens == 12 * T
            assert (await engine.flush(timeout_s=0.01)).pending_chunks == 2
            backend.release()
            durable = await kept.durable()
            assert durable.durable_tokens == 2 * T
            assert durable.stopped is not None
            again = await engine.store(kv.tokens, kv.slots)
            assert again.new_tokens == 0
            assert (await again.durable()).durable_tokens == 12 * T, "the next store completes it (DK-11)"

    @pytest.mark.asyncio
    async def test_a_queued_write_keeps_its_chunk_in_memory(self) -> None:
        kv = PagedKV(20 * T)
        before = kv.rows()
        backend = FaultyBackend(MemoryBackend(MemoryStore()))
        async with open_engine(kv, 8, [backend], memory_wait_s=0.05, write_queue_bytes="1GiB") as engine:
            backend.hold("write")
            await engine.store(*kv.part(0, 4))
            await backend.reached("write")
            assert (await engine.store(*kv.part(4, 10))).stopped is StopReason.MEMORY_PRESSURE
            kv.wipe()
            assert (await engine.retrieve(*kv.part(0, 4))).by_tier == {"host": 4 * T}
            assert torch.equal(kv.rows(0, 4 * T), before[:, : 4 * T])
            backend.release()


class TestLoads:
    @pytest.mark.asyncio
    async def test_a_pool_full_of_cold_chunks_serves_loads_and_stores(self) -> None:
        """DK-08."""
        kv = PagedKV(20 * T)
        store = MemoryStore()
        async with open_engine(kv, 64, [MemoryBackend(store)]) as engine:
            await engine.store(*kv.part(0, 4))
        before = kv.rows()
        async with open_engine(kv, 8, [MemoryBackend(store)]) as engine:
            await engine.store(*kv.part(4, 12))
            await engine.flush()
            kv.wipe()
            assert (await engine.retrieve(*kv.part(0, 4))).loaded_tokens == 4 * T
            assert torch.equal(kv.rows(0, 4 * T), before[:, : 4 * T])
            kept = await engine.store(*kv.part(12, 16))
            assert (kept.stored_tokens, kept.stopped) == (4 * T, None)

    @pytest.mark.asyncio
    async def test_prefetch_takes_what_the_pool_holds_and_says_so(self) -> None:
        kv = PagedKV(20 * T)
        store = MemoryStore()
        async with open_engine(kv, 64, [MemoryBackend(store)]) as engine:
            await engine.store(kv.tokens, kv.slots)
        async with open_engine(kv, 8, [MemoryBackend(store)]) as engine:
            ready = await engine.prefetch(kv.tokens)
            assert (ready.hit_tokens, ready.ready_tokens) == (20 * T, 6 * T)
            assert ready.stopped is StopReason.MEMORY_PRESSURE
            found = await engine.lookup(kv.tokens)
            assert found.by_tier == {"host": 6 * T, "memory": 14 * T}
            assert (await engine.retrieve(kv.tokens, kv.slots)).loaded_tokens == 20 * T

    @pytest.mark.asyncio
    async def test_prefetch_brings_a_prefix_and_a_second_one_reads_nothing(self) -> None:
        kv = PagedKV(6 * T)
        store = MemoryStore()
        async with open_engine(kv, 64, [MemoryBackend(store)]) as engine:
            await engine.store(*kv.part(0, 5))
        backend = FaultyBackend(MemoryBackend(store))
        async with open_engine(kv, 8, [backend]) as engine:
            ready = await engine.prefetch(kv.tokens)
            assert (ready.hit_tokens, ready.ready_tokens, ready.stopped) == (5 * T, 5 * T, StopReason.MISSING)
            assert backend.calls[Op.READ] == 5
            assert (await engine.prefetch(kv.part(0, 5)[0])).stopped is None
            assert backend.calls[Op.READ] == 5
            assert (await engine.lookup(kv.tokens)).by_tier == {"host": 5 * T}

    @pytest.mark.asyncio
    async def test_the_deadline_ends_a_retrieve_between_copies(self) -> None:
        """What is in host memory already counts against the deadline as well."""
        kv = PagedKV(16 * T)
        chunk = frame_bytes(kv.connector.layout.payload_bytes(T)) - HEADER_BYTES
        kv.connector = gated = GatedConnector(kv.connector)  # type: ignore[assignment]
        async with open_engine(kv, 32, wave_bytes=2 * chunk, copy_threads=1) as engine:
            await engine.store(kv.tokens, kv.slots)
            gated.hold()
            task = asyncio.create_task(engine.retrieve(kv.tokens, kv.slots, deadline_s=0.5))
            await gated.reached()
            passed = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(0.55, passed.set_result, None)
            await passed
            gated.release()
            loaded = await task
        assert loaded.stopped is StopReason.DEADLINE
        assert loaded.loaded_tokens == 2 * T
        assert loaded.hit_tokens == 16 * T

    @pytest.mark.asyncio
    async def test_the_deadline_ends_a_store_between_copies(self) -> None:
        kv = PagedKV(16 * T)
        chunk = frame_bytes(kv.connector.layout.payload_bytes(T)) - HEADER_BYTES
        kv.connector = gated = GatedConnector(kv.connector)  # type: ignore[assignment]
        async with open_engine(kv, 32, wave_bytes=2 * chunk, copy_threads=1) as engine:
            gated.hold()
            task = asyncio.create_task(engine.store(kv.tokens, kv.slots, deadline_s=0.5))
            await gated.reached()
            passed = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(0.55, passed.set_result, None)
            await passed
            gated.release()
            kept = await task
            assert (kept.stored_tokens, kept.stopped) == (2 * T, StopReason.DEADLINE)
            assert (await engine.lookup(kv.tokens)).hit_tokens == 2 * T

    @pytest.mark.asyncio
    async def test_tiers_that_do_not_answer_cost_one_deadline_not_one_each(self) -> None:
        kv = PagedKV(4 * T)
        tiers = [FaultyBackend(MemoryBackend(name=name)) for name in ("one", "two", "three")]
        async with open_engine(kv, 8, tiers, lookup_deadline_s=0.5, io_timeout_s=0.5) as engine:
            for tier in tiers:
                tier.hold("contains")
            loop = asyncio.get_running_loop()
            start = loop.time()
            assert (await engine.lookup(kv.tokens)).hit_tokens == 0
            assert loop.time() - start < 1.0
            start = loop.time()
            loaded = await engine.retrieve(kv.tokens, kv.slots, deadline_s=0.4)
            assert loaded.loaded_tokens == 0
            assert loop.time() - start < 0.8
            for tier in tiers:
                tier.release()

    @pytest.mark.asyncio
    @pytest.mark.parametrize("deadline_s", [0, 0.001])
    async def test_callers_in_a_hurry_do_not_take_a_healthy_tier_out_of_use(self, deadline_s: float) -> None:
        kv = PagedKV(4 * T)
        store = MemoryStore()
        async with open_engine(kv, 8, [MemoryBackend(store)]) as engine:
            await engine.store(kv.tokens, kv.slots)
        slow = Fault(op=Op.CONTAINS, kind=FaultKind.SLOW, delay_s=0.02)
        backend = FaultyBackend(MemoryBackend(store), plan=[slow])
        async with open_engine(kv, 8, [backend], breaker_failures=2) as engine:
            for _ in range(6):
                await engine.retrieve(kv.tokens, kv.slots, deadline_s=deadline_s)
            assert engine.health().tiers["memory"].breaker == "closed"
            assert (await engine.retrieve(kv.tokens, kv.slots)).loaded_tokens == 4 * T

    @pytest.mark.asyncio
    async def test_callers_in_a_hurry_do_take_a_dead_tier_out_of_use(self) -> None:
        """OS-04: what nobody waits for counts against the tier's own time."""
        kv = PagedKV(4 * T)
        backend = FaultyBackend(MemoryBackend())
        async with open_engine(kv, 8, [backend], breaker_failures=3, lookup_deadline_s=0.1) as engine:
            backend.hold("contains")
            for _ in range(12):
                if engine.health().tiers["memory"].breaker == "open":
                    break
                await engine.retrieve(kv.tokens, kv.slots, deadline_s=0.02)
            assert engine.health().tiers["memory"].breaker == "open"
            calls = backend.calls[Op.CONTAINS]
            await engine.retrieve(kv.tokens, kv.slots, deadline_s=0.02)
            assert backend.calls[Op.CONTAINS] == calls, "now it costs nothing"
            backend.release()

    @pytest.mark.asyncio
    async def test_a_probe_by_a_caller_in_a_hurry_heals_the_tier(self) -> None:
        kv = PagedKV(4 * T)
        clock = VirtualClock()
        backend = FaultyBackend(MemoryBackend(), plan=[Fault(op=Op.CONTAINS, kind=FaultKind.FAIL, calls=[0])])
        async with CacheEngine.open(
            config_for(kv, 8, breaker_failures=1, breaker_reset_s=5),
            connector=kv.connector,
            namespace=MODEL,
            tiers=[backend],
            clock=clock,
        ) as engine:
            await engine.lookup(kv.tokens)
            assert engine.health().tiers["memory"].breaker == "open"
            clock.advance(5)
            backend.hold("contains")
            await engine.retrieve(kv.tokens, kv.slots, deadline_s=0.01)
            assert engine.health().tiers["memory"].breaker == "half_open"
            await engine.lookup(kv.tokens)
            assert backend.calls[Op.CONTAINS] == 2, "one probe at a time"
            backend.release()
            for _ in range(10):
                await asyncio.sleep(0)
            assert engine.health().tiers["memory"].breaker == "closed"


class TestOrder:
    @pytest.mark.asyncio
    async def test_the_tail_of_a_prefix_leaves_first(self) -> None:
        """EV-01."""
        kv = PagedKV(5 * T)
        async with open_engine(kv, 4) as engine:
            await engine.store(*kv.part(0, 4))
            await engine.store(*kv.part(4, 5))
            assert (await engine.lookup(kv.part(0, 4)[0])).hit_tokens == 3 * T

    @pytest.mark.asyncio
    async def test_a_retrieve_of_the_tail_refreshes_the_head(self) -> None:
        kv = PagedKV(9 * T)
        async with open_engine(kv, 6) as engine:
            await engine.store(*kv.part(0, 3))
            await engine.store(*kv.part(3, 6))
            tokens, slots = kv.part(0, 3)
            await engine.retrieve(tokens, slots, mask=head_mask(2 * T, 3 * T))
            await engine.store(*kv.part(6, 9))
            assert (await engine.lookup(tokens)).hit_tokens == 3 * T
            assert (await engine.lookup(kv.part(3, 6)[0])).hit_tokens == 0

    @pytest.mark.asyncio
    async def test_storing_counts_as_use(self) -> None:
        """EV-02: A, B, C, D; read A and B; store E and F; C and D have gone."""
        kv = PagedKV(6 * T)
        prompts = [kv.part(i, i + 1) for i in range(6)]
        async with open_engine(kv, 4) as engine:
            for prompt in prompts[:4]:
                await engine.store(*prompt)
            for prompt in prompts[:2]:
                await engine.retrieve(*prompt)
            for prompt in prompts[4:]:
                await engine.store(*prompt)
            left = [(await engine.lookup(prompt[0])).hit_tokens > 0 for prompt in prompts]
        assert left == [True, True, False, False, True, True]

    @pytest.mark.asyncio
    async def test_a_store_of_what_is_there_counts_as_use_too(self) -> None:
        kv = PagedKV(5 * T)
        prompts = [kv.part(i, i + 1) for i in range(5)]
        async with open_engine(kv, 4) as engine:
            for prompt in [*prompts[:4], prompts[0], prompts[4]]:
                await engine.store(*prompt)
            left = [(await engine.lookup(prompt[0])).hit_tokens > 0 for prompt in prompts]
        assert left == [True, False, True, True, True]

    @pytest.mark.asyncio
    async def test_a_lookup_is_no_use(self) -> None:
        kv = PagedKV(3 * T)
        prompts = [kv.part(i, i + 1) for i in range(3)]
        async with open_engine(kv, 2) as engine:
            await engine.store(*prompts[0])
            await engine.store(*prompts[1])
            await engine.lookup(prompts[0][0])
            await engine.store(*prompts[2])
            assert (await engine.lookup(prompts[0][0])).hit_tokens == 0

    @pytest.mark.asyncio
    async def test_nothing_is_evicted_for_what_no_tier_has(self) -> None:
        """EV-04."""
        kv = PagedKV(8 * T)
        async with open_engine(kv, 4, [MemoryBackend()]) as engine:
            await engine.store(*kv.part(0, 4))
            await engine.flush()
            await engine.retrieve(*kv.part(4, 8))
            await engine.prefetch(kv.part(4, 8)[0])
            assert (await engine.lookup(kv.part(0, 4)[0])).by_tier == {"host": 4 * T}

    @pytest.mark.asyncio
    async def test_what_was_stored_once_and_evicted_comes_from_the_tier(self) -> None:
        """EV-06: the default admission lets everything in."""
        kv = PagedKV(12 * T)
        async with open_engine(kv, 4, [MemoryBackend()]) as engine:
            await engine.store(*kv.part(0, 3))
            await engine.store(*kv.part(3, 12))
            await engine.flush()
            loaded = await engine.retrieve(*kv.part(0, 3))
            assert (loaded.loaded_tokens, loaded.by_tier) == (3 * T, {"memory": 3 * T})

    @pytest.mark.asyncio
    async def test_a_scan_does_not_push_out_what_was_used_twice(self) -> None:
        kv = PagedKV(30 * T)
        for eviction, survives in (("lru", False), ("slru", True)):
            async with open_engine(kv, 8, eviction=eviction) as engine:
                await engine.store(*kv.part(0, 2))
                await engine.retrieve(*kv.part(0, 2))
                for i in range(2, 30):
                    await engine.store(*kv.part(i, i + 1))
                assert (await engine.lookup(kv.part(0, 2)[0])).hit_tokens == (2 * T if survives else 0), eviction


@pytest.mark.asyncio
async def test_sessions_never_see_each_others_bytes() -> None:
    """CB-03: a pool of 8 chunks, 6 sessions of 12, short stores between; exact bytes or a miss."""
    kv = PagedKV(6 * 12 * T + 20 * T)
    before = kv.rows()
    kv.connector = WatchedConnector(kv.connector)  # type: ignore[assignment]
    rng = random.Random(7)
    sessions = [(i * 12, (i + 1) * 12) for i in range(6)]
    async with open_engine(kv, 8, [MemoryBackend()]) as engine:
        for start, stop in sessions:
            assert (await engine.store(*kv.part(start, stop))).stored_tokens == 12 * T
        for _ in range(40):
            start, stop = rng.choice(sessions)
            extra = 72 + rng.randrange(20)
            kv.wipe()
            tokens, slots = kv.part(start, stop)
            loaded, _ = await asyncio.gather(
                engine.retrieve(tokens, slots), engine.prefetch(kv.part(extra, extra + 1)[0])
            )
            assert loaded.loaded_tokens == 12 * T
            assert torch.equal(kv.rows(start * T, stop * T), before[:, start * T : stop * T])
