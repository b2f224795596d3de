"""After `clear` or a weights change returns, nothing from before is ever visible again, from any tier."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from akvcache import CacheEngine, CacheNamespace, StopReason
from akvcache.testing import Fault, FaultKind, FaultyBackend, MemoryBackend, MemoryStore, Op, Stop
from tests.doubles import GatedConnector
from tests.support import CHUNK, MODEL, PagedKV, config_for, depths, head_mask, open_engine

T = CHUNK


async def stored(kv: PagedKV) -> MemoryStore:
    store = MemoryStore()
    async with open_engine(kv, 64, [MemoryBackend(store)]) as engine:
        await engine.store(kv.tokens, kv.slots)
    return store


async def hits(engine: CacheEngine[Any], kv: PagedKV) -> int:
    return (await engine.lookup(kv.tokens)).hit_tokens


class TestClear:
    @pytest.mark.asyncio
    async def test_every_tier_is_empty_and_stays_so(self) -> None:
        """SH-03."""
        kv = PagedKV(6 * T)
        one, two = MemoryStore(), MemoryStore()
        tiers = [MemoryBackend(one, name="one"), MemoryBackend(two, name="two")]
        async with open_engine(kv, 4, tiers) as engine:
            await engine.store(kv.tokens, kv.slots)
            await engine.flush()
            cleared = await engine.clear()
            assert cleared.dropped_chunks > 0
            assert list(cleared.failed_tiers) == []
            assert await hits(engine, kv) == 0
            assert (one.frames, two.frames) == ({}, {})
            loaded = await engine.retrieve(kv.tokens, kv.slots)
            assert (loaded.loaded_tokens, loaded.stopped) == (0, StopReason.MISSING)
            again = await engine.store(kv.tokens, kv.slots)
            assert again.new_tokens == 6 * T
            assert (await again.durable()).durable_tokens == 6 * T
        async with open_engine(kv, 16, [MemoryBackend(one)]) as engine:
            assert await hits(engine, kv) == 6 * T

    @pytest.mark.asyncio
    async def test_a_tier_that_cannot_be_emptied_is_named_and_out_of_use(self) -> None:
        kv = PagedKV(4 * T)
        store = await stored(kv)
        stubborn = FaultyBackend(
            MemoryBackend(store, name="stubborn"), plan=[Fault(op=Op.DELETE, kind=FaultKind.FAIL, calls=[2])]
        )
        async with open_engine(kv, 8, [stubborn, MemoryBackend(MemoryStore(), name="good")]) as engine:
            assert await hits(engine, kv) == 4 * T
            assert list((await engine.clear()).failed_tiers) == ["stubborn"]
            assert await hits(engine, kv) == 0
            assert engine.health().tiers["stubborn"].inactive is not None
            kept = await engine.store(kv.tokens, kv.slots)
            assert (await kept.durable()).durable_tokens == 4 * T, "the other tier works"

    @pytest.mark.asyncio
    async def test_only_this_namespace_is_cleared(self) -> None:
        kv = PagedKV(4 * T)
        store = await stored(kv)
        config = config_for(kv, 8)
        other = CacheNamespace(model="other")
        async with CacheEngine.open(
            config, connector=kv.connector, namespace=other, tiers=[MemoryBackend(store)]
        ) as engine:
            await engine.store(kv.tokens, kv.slots)
            await engine.flush()
            await engine.clear()
        async with open_engine(kv, 8, [MemoryBackend(store)]) as engine:
            assert await hits(engine, kv) == 4 * T

    @pytest.mark.asyncio
    async def test_queued_and_running_writes_do_not_come_back(self) -> None:
        kv = PagedKV(8 * T)
        store = MemoryStore()
        backend = FaultyBackend(MemoryBackend(store))
        async with open_engine(kv, 16, [backend]) as engine:
            backend.hold("write", Stop.AFTER)
            kept = await engine.store(kv.tokens, kv.slots)
            await backend.reached("write")
            await engine.clear()
            assert await hits(engine, kv) == 0
            backend.release()
            assert (await kept.durable()).durable_tokens == 0
            await engine.flush()
            assert await hits(engine, kv) == 0
        assert store.frames == {}, "what was being written was deleted when it had landed"

    @pytest.mark.asyncio
    async def test_a_write_that_lands_after_clear_is_never_seen(self) -> None:
        kv = PagedKV(T)
        before = kv.rows()
        store = MemoryStore()
        backend = FaultyBackend(MemoryBackend(store))
        async with open_engine(kv, 16, [backend]) as engine:
            backend.hold("write")
            await engine.store(kv.tokens, kv.slots)
            await backend.reached("write")
            await engine.clear()
            backend.release()
            backend.hold("delete")
            await backend.reached("delete")
            assert depths(store) == [0], "it has landed and is about to be deleted"
            assert await hits(engine, kv) == 0
            assert (await engine.retrieve(kv.tokens, kv.slots)).loaded_tokens == 0
            backend.release()
            for _ in range(10):
                await asyncio.sleep(0)
            assert store.frames == {}
            assert (await (await engine.store(kv.tokens, kv.slots)).durable()).durable_tokens == T
            assert await hits(engine, kv) == T
        assert torch.equal(kv.rows(), before)

    @pytest.mark.asyncio
    async def test_a_store_in_flight_ends_cleared(self) -> None:
        kv = PagedKV(8 * T)
        kv.connector = gated = GatedConnector(kv.connector)  # type: ignore[assignment]
        store = MemoryStore()
        async with open_engine(kv, 16, [MemoryBackend(store)], wave_bytes=1) as engine:
            gated.hold()
            storing = asyncio.create_task(engine.store(kv.tokens, kv.slots))
            await gated.reached()
            await engine.clear()
            gated.release()
            kept = await storing
            assert (kept.stored_tokens, kept.stopped) == (0, StopReason.CLEARED)
            assert await hits(engine, kv) == 0
            await engine.flush()
            assert store.frames == {}
            assert (await engine.store(kv.tokens, kv.slots)).stored_tokens == 8 * T

    @pytest.mark.asyncio
    @pytest.mark.parametrize("stop", ["contains", "read"])
    async def test_a_retrieve_in_flight_ends_cleared_and_leaves_nothing(self, stop: str) -> None:
        kv = PagedKV(6 * T)
        backend = FaultyBackend(MemoryBackend(await stored(kv)))
        async with open_engine(kv, 16, [backend]) as engine:
            backend.hold(stop, Stop.AFTER)
            task = asyncio.create_task(engine.retrieve(kv.tokens, kv.slots))
            await backend.reached(stop)
            clearing = asyncio.create_task(engine.clear())
            await clearing
            backend.release()
            loaded = await task
            assert loaded.stopped is StopReason.CLEARED
            assert loaded.loaded_tokens == 0
            assert await hits(engine, kv) == 0
            assert (await engine.retrieve(kv.tokens, kv.slots)).loaded_tokens == 0

    @pytest.mark.asyncio
    async def test_a_retrieve_between_two_copies_stops_there(self) -> None:
        kv = PagedKV(6 * T)
        kv.connector = gated = GatedConnector(kv.connector)  # type: ignore[assignment]
        async with open_engine(kv, 16, wave_bytes=1) as engine:
            await engine.store(kv.tokens, kv.slots)
            gated.hold()
            task = asyncio.create_task(engine.retrieve(kv.tokens, kv.slots))
            await gated.reached()
            await engine.clear()
            gated.release()
            loaded = await task
            assert (loaded.loaded_tokens, loaded.stopped) == (T, StopReason.CLEARED)

    @pytest.mark.asyncio
    async def test_a_lookup_in_flight_promises_nothing(self) -> None:
        kv = PagedKV(6 * T)
        backend = FaultyBackend(MemoryBackend(await stored(kv)))
        async with open_engine(kv, 16, [backend]) as engine:
            backend.hold("contains", Stop.AFTER)
            task = asyncio.create_task(engine.lookup(kv.tokens))
            await backend.reached("contains")
            await engine.clear()
            backend.release()
            found = await task
            assert (found.hit_tokens, found.stopped) == (0, StopReason.CLEARED)

    @pytest.mark.asyncio
    async def test_a_retrieve_that_begins_while_tiers_are_cleared_finds_nothing(self) -> None:
        """The second tier still holds everything while the first is being emptied."""
        kv = PagedKV(4 * T)
        slow = FaultyBackend(MemoryBackend(await stored(kv), name="slow"))
        full = MemoryBackend(await stored(kv), name="full")
        async with open_engine(kv, 16, [slow, full]) as engine:
            slow.hold("scan")
            clearing = asyncio.create_task(engine.clear())
            await slow.reached("scan")
            assert await hits(engine, kv) == 0
            assert (await engine.retrieve(kv.tokens, kv.slots)).loaded_tokens == 0
            assert (await engine.prefetch(kv.tokens)).ready_tokens == 0
            slow.release()
            await clearing
            assert await hits(engine, kv) == 0

    @pytest.mark.asyncio
    async def test_what_is_stored_while_tiers_are_cleared_stays(self) -> None:
        kv = PagedKV(4 * T)
        backend = FaultyBackend(MemoryBackend(await stored(kv)))
        async with open_engine(kv, 16, [backend]) as engine:
            backend.hold("scan")
            clearing = asyncio.create_task(engine.clear())
            await backend.reached("scan")
            kept = await engine.store(kv.tokens, kv.slots)
            backend.release()
            await clearing
            assert kept.stored_tokens == await hits(engine, kv) == 4 * T

    @pytest.mark.asyncio
    async def test_clearing_twice_at_once_and_an_empty_cache(self) -> None:
        kv = PagedKV(4 * T)
        async with open_engine(kv, 16, [MemoryBackend(await stored(kv))]) as engine:
            await asyncio.gather(engine.clear(), engine.clear())
            assert await hits(engine, kv) == 0
            assert (await engine.clear()).dropped_chunks == 0

    @pytest.mark.asyncio
    async def test_a_storm_of_stores_and_clears_leaves_only_what_came_after(self) -> None:
        kv = PagedKV(12 * T)
        store = MemoryStore()
        async with open_engine(kv, 8, [MemoryBackend(store)]) as engine:
            for _ in range(10):
                stores = [asyncio.create_task(engine.store(*kv.part(i, i + 4))) for i in (0, 4, 8)]
                await asyncio.sleep(0)
                await engine.clear()
                for kept in await asyncio.gather(*stores):
                    if kept.stopped is None:
                        assert kept.stored_tokens == 4 * T
                await engine.clear()
                await engine.flush()
                assert [(await engine.lookup(kv.part(i, i + 4)[0])).hit_tokens for i in (0, 4, 8)] == [0, 0, 0]
                assert store.frames == {}


class TestWeights:
    @pytest.mark.asyncio
    async def test_another_version_sees_nothing_and_the_first_comes_back(self) -> None:
        """KC-06: v1 -> v2 -> v1, then restarts with v2 and v1."""
        kv = PagedKV(4 * T)
        before = kv.rows()
        store = MemoryStore()
        async with open_engine(kv, 16, [MemoryBackend(store)]) as engine:
            await engine.set_weights_version("v1")
            await (await engine.store(kv.tokens, kv.slots)).durable()
            await engine.set_weights_version("v2")
            assert await hits(engine, kv) == 0
            kv.wipe()
            assert (await engine.retrieve(kv.tokens, kv.slots)).loaded_tokens == 0
            assert (await engine.store(*kv.part(0, 1))).new_tokens == T
            await engine.set_weights_version("v1")
            assert (await engine.lookup(kv.tokens)).by_tier == {"memory": 4 * T}
            assert (await engine.retrieve(kv.tokens, kv.slots)).loaded_tokens == 4 * T
            assert torch.equal(kv.rows(), before)
        for version, hit in (("v2", T), ("v1", 4 * T), ("v3", 0)):
            async with CacheEngine.open(
                config_for(kv, 16),
                connector=kv.connector,
                namespace=CacheNamespace(model=MODEL.model, weights_version=version),
                tiers=[MemoryBackend(store)],
            ) as engine:
                assert await hits(engine, kv) == hit

    @pytest.mark.asyncio
    async def test_queued_writes_of_the_old_version_land_under_the_old_version(self) -> None:
        kv = PagedKV(4 * T)
        store = MemoryStore()
        backend = FaultyBackend(MemoryBackend(store))
        async with open_engine(kv, 16, [backend]) as engine:
            backend.hold("write")
            await engine.store(kv.tokens, kv.slots)
            await backend.reached("write")
            await engine.set_weights_version("v2")
            backend.release()
            await engine.flush()
            assert depths(store) == [0, 1, 2, 3]
            assert await hits(engine, kv) == 0
            await engine.set_weights_version("")
            assert await hits(engine, kv) == 4 * T

    @pytest.mark.asyncio
    async def test_a_retrieve_that_began_under_the_old_version_delivers_nothing(self) -> None:
        kv = PagedKV(4 * T)
        backend = FaultyBackend(MemoryBackend(await stored(kv)))
        kv.wipe()
        wiped = kv.rows()
        async with open_engine(kv, 16, [backend]) as engine:
            backend.hold("contains", Stop.AFTER)
            task = asyncio.create_task(engine.retrieve(kv.tokens, kv.slots))
            await backend.reached("contains")
            await engine.set_weights_version("v2")
            backend.release()
            loaded = await task
            assert (loaded.loaded_tokens, loaded.stopped) == (0, StopReason.CLEARED)
            assert torch.equal(kv.rows(), wiped)

    @pytest.mark.asyncio
    async def test_a_long_prompt_keyed_under_the_old_version_delivers_nothing(self) -> None:
        """Keying happens in a thread; the version changes meanwhile."""
        kv = PagedKV(1200 * T)
        async with open_engine(kv, 1300) as engine:
            await engine.store(kv.tokens, kv.slots)
            task = asyncio.create_task(engine.retrieve(kv.tokens, kv.slots))
            await asyncio.sleep(0)  # its keys are being computed
            await engine.set_weights_version("v2")
            loaded = await task
            assert loaded.loaded_tokens == 0

    @pytest.mark.asyncio
    async def test_a_store_that_began_under_the_old_version_is_not_seen_by_the_new(self) -> None:
        kv = PagedKV(4 * T)
        kv.connector = gated = GatedConnector(kv.connector)  # type: ignore[assignment]
        async with open_engine(kv, 16, [MemoryBackend(MemoryStore())]) as engine:
            gated.hold()
            storing = asyncio.create_task(engine.store(kv.tokens, kv.slots))
            await gated.reached()
            await engine.set_weights_version("v2")
            gated.release()
            assert (await storing).stopped is StopReason.CLEARED
            assert await hits(engine, kv) == 0

    @pytest.mark.asyncio
    @pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.HANG])
    async def test_a_tier_that_refuses_the_new_namespace_goes_out_of_use(self, kind: FaultKind) -> None:
        kv = PagedKV(4 * T)
        backend = FaultyBackend(
            MemoryBackend(MemoryStore(), name="picky"), plan=[Fault(op=Op.ATTACH, kind=kind, calls=[1])]
        )
        async with open_engine(kv, 16, [backend], io_timeout_s=0.05, close_timeout_s=0.2) as engine:
            await engine.store(kv.tokens, kv.slots)
            await engine.set_weights_version("v2")
            assert await hits(engine, kv) == 0
            assert engine.health().tiers["picky"].inactive is not None
            assert (await engine.store(kv.tokens, kv.slots)).stored_tokens == 4 * T
            backend.release()

    @pytest.mark.asyncio
    async def test_stores_during_the_change_reach_a_tier_that_knows_the_namespace(self) -> None:
        """MemoryBackend refuses keys of a namespace that was not announced."""
        kv = PagedKV(4 * T)
        store = MemoryStore()
        backend = FaultyBackend(MemoryBackend(store))
        async with open_engine(kv, 16, [backend]) as engine:
            backend.hold("attach")
            changing = asyncio.create_task(engine.set_weights_version("v2"))
            await backend.reached("attach")
            kept = await engine.store(kv.tokens, kv.slots)
            await engine.flush()
            backend.release()
            await changing
            assert kept.stored_tokens == 4 * T
            assert engine.health().tiers["memory"].breaker == "closed"
            assert len(store.frames) == 4
            assert await hits(engine, kv) == 0

    @pytest.mark.asyncio
    async def test_a_masked_store_under_the_new_version_knows_that_the_head_is_gone(self) -> None:
        kv = PagedKV(4 * T)
        async with open_engine(kv, 16) as engine:
            await engine.store(*kv.part(0, 2))
            await engine.set_weights_version("v2")
            kept = await engine.store(kv.tokens, kv.slots, mask=head_mask(2 * T, 4 * T))
            assert (kept.stored_tokens, kept.new_tokens) == (0, 2 * T)


@pytest.mark.asyncio
async def test_a_retrieve_that_waits_for_a_slot_ends_with_the_clear_that_frees_it() -> None:
    wanted, leased = PagedKV(4 * CHUNK, seed=1), PagedKV(2 * CHUNK, seed=2)
    async with open_engine(wanted, 2, [MemoryBackend()], memory_wait_s=10.0) as engine:
        await (await engine.store(wanted.tokens, wanted.slots)).durable()
        await (await engine.store(leased.tokens, wanted.slots[: 2 * CHUNK])).durable()
        found = await engine.lookup(leased.tokens, lease_s=30)
        assert found.by_tier == {"host": 2 * CHUNK}
        waiting = asyncio.create_task(engine.retrieve(wanted.tokens, wanted.slots))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        await engine.clear()
        loaded = await waiting
        assert (loaded.loaded_tokens, loaded.stopped) == (0, StopReason.CLEARED)
        assert (await engine.lookup(wanted.tokens)).hit_tokens == 0
