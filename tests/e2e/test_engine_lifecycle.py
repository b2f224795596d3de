"""Open, write down, close, come back; what is not right at open is told, and never raised into inference."""

from __future__ import annotations

import asyncio
import gc
import logging
import mmap
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

from akvcache import CacheEngine, CacheNamespace, ConfigurationError, EngineConfig, StopReason, UsageError
from akvcache.connector import NullConnector
from akvcache.errors import BackendUnavailable
from akvcache.layout import KVLayout, LayerGroup
from akvcache.testing import Fault, FaultKind, FaultyBackend, MemoryBackend, MemoryStore, Op
from tests.doubles import GatedConnector
from tests.support import CHUNK, MODEL, PagedKV, config_for, depths, open_engine

T = CHUNK


class TestDurable:
    @pytest.mark.asyncio
    async def test_it_waits_for_the_writes_and_says_how_much_is_there(self) -> None:
        kv = PagedKV(6 * T)
        store = MemoryStore()
        backend = FaultyBackend(MemoryBackend(store))
        async with open_engine(kv, 16, [backend]) as engine:
            backend.hold("write")
            kept = await engine.store(kv.tokens, kv.slots)
            assert kept.stored_tokens == 6 * T, "the device memory may be reused before anything is written"
            waiting = asyncio.create_task(kept.durable())
            await backend.reached("write")
            assert not waiting.done()
            assert store.frames == {}
            backend.release()
            durable = await waiting
            assert (durable.durable_tokens, durable.stopped) == (6 * T, None)
            assert depths(store) == list(range(6))

    @pytest.mark.asyncio
    async def test_its_time_is_bounded_and_the_writes_go_on(self) -> None:
        kv = PagedKV(2 * T)
        store = MemoryStore()
        backend = FaultyBackend(MemoryBackend(store))
        async with open_engine(kv, 16, [backend]) as engine:
            backend.hold("write")
            kept = await engine.store(kv.tokens, kv.slots)
            late = await kept.durable(timeout_s=0.01)
            assert (late.durable_tokens, late.stopped) == (0, StopReason.DEADLINE)
            backend.release()
            assert (await kept.durable()).durable_tokens == 2 * T

    @pytest.mark.asyncio
    async def test_cancelling_the_wait_cancels_nothing_else(self) -> None:
        kv = PagedKV(2 * T)
        store = MemoryStore()
        backend = FaultyBackend(MemoryBackend(store))
        async with open_engine(kv, 16, [backend]) as engine:
            backend.hold("write")
            kept = await engine.store(kv.tokens, kv.slots)
            waiting = asyncio.create_task(kept.durable())
            await backend.reached("write")
            waiting.cancel()
            await asyncio.wait([waiting])
            backend.release()
            assert (await kept.durable()).durable_tokens == 2 * T

    @pytest.mark.asyncio
    async def test_memory_is_not_durable(self) -> None:
        kv = PagedKV(2 * T)
        for tiers in ([], [MemoryBackend()]):
            async with open_engine(kv, 16, tiers) as engine:
                kept = await engine.store(kv.tokens, kv.slots)
                durable = await kept.durable()
                assert (durable.durable_tokens, durable.stopped) == (0, StopReason.MISSING)

    @pytest.mark.asyncio
    async def test_two_tiers_together_may_hold_it(self) -> None:
        kv = PagedKV(4 * T)
        one = FaultyBackend(
            MemoryBackend(MemoryStore(), name="one"), plan=[Fault(op=Op.WRITE, kind=FaultKind.LOSE, calls=[1])]
        )
        two = FaultyBackend(
            MemoryBackend(MemoryStore(), name="two"), plan=[Fault(op=Op.WRITE, kind=FaultKind.LOSE, calls=[2])]
        )
        async with open_engine(kv, 16, [one, two]) as engine:
            assert (await (await engine.store(kv.tokens, kv.slots)).durable()).durable_tokens == 4 * T

    @pytest.mark.asyncio
    async def test_a_write_that_failed_says_why(self) -> None:
        kv = PagedKV(4 * T)
        fault = Fault(op=Op.WRITE, kind=FaultKind.FAIL, calls=[2])
        backend = FaultyBackend(MemoryBackend(MemoryStore()), plan=[fault])
        async with open_engine(kv, 16, [backend], io_retries=0) as engine:
            backend.hold("write")  # one after the other, so that the third is chunk 2
            kept = await engine.store(kv.tokens, kv.slots)
            backend.release()
            durable = await kept.durable()
        assert durable.durable_tokens == 2 * T
        assert durable.stopped is not None

    @pytest.mark.asyncio
    async def test_a_store_that_was_cut_short_is_as_durable_as_it_is_long(self) -> None:
        kv = PagedKV(6 * T)
        backend = MemoryBackend(MemoryStore())
        async with open_engine(kv, 16, [backend]) as engine:
            kept = await engine.store(kv.tokens, kv.slots, deadline_s=0)
            assert (kept.stored_tokens, kept.stopped) == (0, StopReason.DEADLINE)
            assert (await kept.durable()).durable_tokens == 0
            await (await engine.store(kv.tokens, kv.slots)).durable()
            again = await engine.store(kv.tokens, kv.slots, deadline_s=0)
            assert (again.stored_tokens, (await again.durable()).durable_tokens) == (0, 0)

    @pytest.mark.asyncio
    async def test_after_closing_nobody_knows_any_more(self) -> None:
        kv = PagedKV(2 * T)
        async with open_engine(kv, 16, [MemoryBackend(MemoryStore())]) as engine:
            kept = await engine.store(kv.tokens, kv.slots)
        with pytest.raises(UsageError, match="closed"):
            await kept.durable()


class TestFlush:
    @pytest.mark.asyncio
    async def test_it_is_a_barrier(self) -> None:
        """OS-07, DK-10: every accepted chunk is there."""
        kv = PagedKV(35 * T)
        store = MemoryStore()
        async with open_engine(kv, 64, [MemoryBackend(store)]) as engine:
            for i in range(35):
                await engine.store(*kv.part(i, i + 1))
            assert (await engine.flush()).pending_chunks == 0
            assert len(store.frames) == 35

    @pytest.mark.asyncio
    async def test_it_says_how_many_were_late(self) -> None:
        kv = PagedKV(5 * T)
        backend = FaultyBackend(MemoryBackend(MemoryStore()))
        async with open_engine(kv, 16, [backend]) as engine:
            backend.hold("write")
            await engine.store(kv.tokens, kv.slots)
            assert (await engine.flush(timeout_s=0.01)).pending_chunks == 5
            backend.release()
            assert (await engine.flush()).pending_chunks == 0

    @pytest.mark.asyncio
    async def test_without_anything_to_do_it_returns(self) -> None:
        kv = PagedKV(T)
        async with open_engine(kv, 16) as engine:
            assert (await engine.flush()).pending_chunks == 0


class TestClose:
    @pytest.mark.asyncio
    async def test_it_drains_and_the_next_engine_hits_everything(self) -> None:
        """SH-02, DK-01, LR-07: no side index, another engine on the same medium."""
        kv = PagedKV(50 * T)
        before = kv.rows()
        store = MemoryStore()
        async with open_engine(kv, 64, [MemoryBackend(store)]) as engine:
            assert (await engine.store(kv.tokens, kv.slots)).stored_tokens == 50 * T
        assert depths(store) == list(range(50))
        kv.wipe()
        async with open_engine(kv, 64, [MemoryBackend(store)]) as engine:
            assert (await engine.lookup(kv.tokens)).by_tier == {"memory": 50 * T}
            assert (await engine.retrieve(kv.tokens, kv.slots)).loaded_tokens == 50 * T
        assert torch.equal(kv.rows(), before)

    @pytest.mark.asyncio
    async def test_it_never_exceeds_its_limit_and_says_what_was_dropped(self, caplog: pytest.LogCaptureFixture) -> None:
        kv = PagedKV(20 * T)
        backend = FaultyBackend(MemoryBackend(MemoryStore()))
        options = {"close_timeout_s": 0.05, "io_timeout_s": 0.05}
        loop = asyncio.get_running_loop()
        async with open_engine(kv, 32, [backend], **options) as engine:
            backend.hold("write")
            await engine.store(kv.tokens, kv.slots)
            await backend.reached("write")
            start = loop.time()
        assert loop.time() - start < 2.0
        assert "writes given up" in caplog.text
        backend.release()

    @pytest.mark.asyncio
    async def test_it_is_idempotent_and_leaving_the_block_is_enough(self) -> None:
        kv = PagedKV(2 * T)
        async with open_engine(kv, 16, [MemoryBackend(MemoryStore())]) as engine:
            await engine.store(kv.tokens, kv.slots)
            await engine.aclose()
            await engine.aclose()
        await engine.aclose()
        assert "closed" in repr(engine)

    @pytest.mark.asyncio
    async def test_a_cancelled_close_ends_what_it_began(self) -> None:
        kv = PagedKV(4 * T)
        store = MemoryStore()
        backend = FaultyBackend(MemoryBackend(store))

        stored = asyncio.Event()

        async def use() -> None:
            async with open_engine(kv, 16, [backend]) as engine:
                backend.hold("write")
                await engine.store(kv.tokens, kv.slots)
                stored.set()

        task = asyncio.create_task(use())
        await stored.wait()
        await backend.reached("write")
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        backend.release()
        await asyncio.wait([task])
        assert task.cancelled()
        assert depths(store) == [0, 1, 2, 3]

    @pytest.mark.asyncio
    async def test_an_error_in_the_block_passes_and_everything_is_closed(self) -> None:
        kv = PagedKV(4 * T)
        store = MemoryStore()

        async def use() -> None:
            async with open_engine(kv, 16, [MemoryBackend(store)]) as engine:
                await engine.store(kv.tokens, kv.slots)
                raise RuntimeError("inference failed")

        with pytest.raises(RuntimeError, match="inference failed"):
            await use()
        assert depths(store) == [0, 1, 2, 3]

    @pytest.mark.asyncio
    @pytest.mark.parametrize("when", ["while closing", "after closing"])
    @pytest.mark.parametrize("op", ["store", "retrieve", "prefetch"])
    async def test_a_call_in_flight_ends_with_the_truth(self, op: str, when: str) -> None:
        kv = PagedKV(8 * T)
        store = MemoryStore()
        async with open_engine(kv, 16, [MemoryBackend(store)]) as engine:
            await engine.store(kv.tokens, kv.slots)
        before = kv.rows()
        if op == "store":
            store = MemoryStore()
        else:
            kv.wipe()
        backend = FaultyBackend(MemoryBackend(store))
        kv.connector = gated = GatedConnector(kv.connector)  # type: ignore[assignment]
        options = {"close_timeout_s": 0.05, "io_timeout_s": 0.1, "wave_bytes": 1}
        async with open_engine(kv, 4, [backend], **options) as engine:
            if op == "prefetch":
                backend.hold("read")
                task = asyncio.create_task(engine.prefetch(kv.tokens))
                await backend.reached("read")
            else:
                gated.hold()
                task = asyncio.create_task(getattr(engine, op)(kv.tokens, kv.slots))
                await gated.reached()
            closing = asyncio.create_task(engine.aclose())
            await asyncio.sleep(0)
            if when == "after closing":
                loop = asyncio.get_running_loop()
                gone = loop.create_future()
                loop.call_later(0.5, gone.set_result, None)
                await gone
            gated.release()
            backend.release()
            result = await task
            await closing
        if op == "store":
            assert result.stored_tokens == len(store.frames) * T or result.stopped is not None
        elif op == "retrieve":
            assert int(result.mask.sum()) == result.loaded_tokens
            assert result.loaded_tokens == 8 * T or result.stopped is not None
            assert torch.equal(kv.rows()[:, result.mask], before[:, result.mask])
        else:
            assert isinstance(result.stopped, StopReason)

    @pytest.mark.asyncio
    async def test_nothing_of_a_closed_engine_stays_alive(self) -> None:
        kv = PagedKV(4 * T)
        async with open_engine(kv, 16, [MemoryBackend(MemoryStore())], prefault=True) as engine:
            await engine.store(kv.tokens, kv.slots)
        gc.collect()
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("akv-copy")] == []
        assert len(asyncio.all_tasks()) == 1


Call = Callable[[CacheEngine[Any], PagedKV], Coroutine[Any, Any, object]]

CALLS: dict[str, Call] = {
    "lookup": lambda e, kv: e.lookup(kv.tokens),
    "retrieve": lambda e, kv: e.retrieve(kv.tokens, kv.slots),
    "store": lambda e, kv: e.store(kv.tokens, kv.slots),
    "prefetch": lambda e, kv: e.prefetch(kv.tokens),
    "flush": lambda e, kv: e.flush(),
    "clear": lambda e, kv: e.clear(),
    "set_weights_version": lambda e, kv: e.set_weights_version("v2"),
}


class TestWrongUse:
    @pytest.mark.asyncio
    @pytest.mark.parametrize("name", CALLS)
    async def test_after_closing_every_call_is_refused(self, name: str) -> None:
        kv = PagedKV(2 * T)
        async with open_engine(kv, 16) as engine:
            pass
        with pytest.raises(UsageError, match="closed"):
            await CALLS[name](engine, kv)
        with pytest.raises(UsageError, match="closed"):
            engine.freeze(True)
        assert engine.health().degraded is None

    @pytest.mark.asyncio
    @pytest.mark.parametrize("name", [*CALLS, "aclose"])
    async def test_another_loop_is_refused_at_once(self, name: str) -> None:
        """HG-08: never a hang."""
        kv = PagedKV(2 * T)
        calls: dict[str, Call] = {**CALLS, "aclose": lambda e, _kv: e.aclose()}

        def elsewhere(engine: CacheEngine[Any]) -> BaseException | None:
            async def call() -> None:
                await calls[name](engine, kv)

            try:
                asyncio.run(asyncio.wait_for(call(), 5))
            except BaseException as error:
                return error
            return None

        async with open_engine(kv, 16) as engine:
            error = await asyncio.to_thread(elsewhere, engine)
            assert isinstance(error, UsageError)
            assert "another event loop" in str(error)
            assert (await engine.store(kv.tokens, kv.slots)).stored_tokens == 2 * T

    @pytest.mark.asyncio
    async def test_freezing_from_a_thread_without_a_loop_is_refused(self) -> None:
        kv = PagedKV(2 * T)
        async with open_engine(kv, 16) as engine:
            with pytest.raises(UsageError, match="another event loop"):
                await asyncio.to_thread(engine.freeze, True)

    @pytest.mark.asyncio
    async def test_waiting_for_durability_on_another_loop_is_refused(self) -> None:
        kv = PagedKV(2 * T)
        backend = FaultyBackend(MemoryBackend(MemoryStore()))
        async with open_engine(kv, 16, [backend]) as engine:
            backend.hold("write")
            kept = await engine.store(kv.tokens, kv.slots)
            await backend.reached("write")

            def elsewhere() -> object:
                return asyncio.run(kept.durable(timeout_s=1))

            with pytest.raises(UsageError, match="another event loop"):
                await asyncio.to_thread(elsewhere)
            backend.release()

    def test_two_runs_in_a_row_each_with_its_engine(self) -> None:
        store = MemoryStore()
        kv = PagedKV(2 * T)

        async def run() -> int:
            async with open_engine(kv, 16, [MemoryBackend(store)]) as engine:
                hit = (await engine.lookup(kv.tokens)).hit_tokens
                await engine.store(kv.tokens, kv.slots)
                return hit

        assert [asyncio.run(run()), asyncio.run(run())] == [0, 2 * T]


class TestOpen:
    @pytest.mark.asyncio
    async def test_an_engine_that_could_not_open_is_a_safe_no_op(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """SH-05."""
        kv = PagedKV(4 * T)

        def no_memory(*_args: object, **_kwargs: object) -> None:
            raise MemoryError("no memory for the pool")

        with monkeypatch.context() as patch:
            patch.setattr(mmap, "mmap", no_memory)
            opening = open_engine(kv, 16, [MemoryBackend()])
            engine = await opening.__aenter__()
        try:
            assert engine.health().degraded == "init failed: MemoryError: no memory for the pool"
            assert "could not open" in caplog.text
            assert (await engine.lookup(kv.tokens, lease_s=5)).stopped is StopReason.UNHEALTHY
            assert (await engine.retrieve(kv.tokens, kv.slots)).mask.tolist() == [False] * 4 * T
            kept = await engine.store(kv.tokens, kv.slots)
            assert (kept.stored_tokens, kept.total_tokens) == (0, 4 * T)
            assert (await kept.durable()).durable_tokens == 0
            assert (await engine.prefetch(kv.tokens)).ready_tokens == 0
            assert (await engine.flush()).pending_chunks == 0
            assert (await engine.clear()).dropped_chunks == 0
            await engine.set_weights_version("v2")
            engine.freeze(True)
            assert (await engine.store(kv.tokens, kv.slots)).stopped is StopReason.UNHEALTHY
            assert "MemoryError" in repr(engine)
            with pytest.raises(UsageError):
                await engine.lookup([-1])
            with pytest.raises(UsageError):
                await engine.store(kv.tokens, kv.slots, mask=[True])
        finally:
            await opening.__aexit__(None, None, None)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("fault", [Op.OPEN, Op.ATTACH])
    async def test_tiers_that_fail_at_open_leave_host_memory(self, fault: Op, caplog: pytest.LogCaptureFixture) -> None:
        """US-01: one line says why, and so does health."""
        kv = PagedKV(4 * T)
        plan = [Fault(op=fault, kind=FaultKind.FAIL, error=BackendUnavailable)]
        tiers = [FaultyBackend(MemoryBackend(name=name), plan=plan) for name in ("one", "two")]
        async with open_engine(kv, 16, tiers) as engine:
            health = engine.health()
            assert health.degraded is None
            assert {name: "BackendUnavailable: injected" in str(t.inactive) for name, t in health.tiers.items()} == {
                "one": True,
                "two": True,
            }
            assert caplog.text.count("is inactive: BackendUnavailable") == 2
            kept = await engine.store(kv.tokens, kv.slots)
            assert (kept.stored_tokens, kept.stopped) == (4 * T, None)
            assert (await engine.retrieve(kv.tokens, kv.slots)).by_tier == {"host": 4 * T}
            assert (await kept.durable()).durable_tokens == 0
            assert (await engine.flush()).pending_chunks == 0
            assert list((await engine.clear()).failed_tiers) == ["one", "two"], "nobody knows what they hold"
            await engine.set_weights_version("v2")

    @pytest.mark.asyncio
    async def test_a_backend_that_raises_anything_is_only_inactive(self) -> None:
        class Rude(MemoryBackend):
            async def open(self, context: object) -> None:
                raise ZeroDivisionError("a plug-in's own bug")

        kv = PagedKV(4 * T)
        async with open_engine(kv, 16, [Rude(name="rude"), MemoryBackend(MemoryStore())]) as engine:
            assert engine.health().tiers["rude"].inactive == "ZeroDivisionError: a plug-in's own bug"
            assert (await (await engine.store(kv.tokens, kv.slots)).durable()).durable_tokens == 4 * T

    @pytest.mark.asyncio
    async def test_a_backend_configured_wrongly_refuses_and_leaves_nothing_open(self) -> None:
        class Misled(MemoryBackend):
            async def open(self, context: object) -> None:
                raise ConfigurationError("no such directory")

        kv = PagedKV(4 * T)
        good = FaultyBackend(MemoryBackend(name="good"))
        with pytest.raises(ConfigurationError, match="no such directory"):
            async with open_engine(kv, 16, [good, Misled(name="misled")]):
                pass
        assert good.calls[Op.ACLOSE] == 1

    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"chunk_tokens": 6}, "multiple of the block of 4 tokens"),
            ({"host_bytes": 4096}, "give it at least"),
            ({"host_bytes": "9999TiB"}, "this machine has"),
        ],
    )
    async def test_a_pool_that_cannot_be_is_refused_with_what_would_do(
        self, options: dict[str, object], says: str
    ) -> None:
        kv = PagedKV(4 * T)
        with pytest.raises(ConfigurationError, match=says):
            async with open_engine(kv, 16, **options):
                pass

    @pytest.mark.asyncio
    async def test_a_layout_that_cannot_be_is_refused(self) -> None:
        opaque = KVLayout(
            groups=(LayerGroup(num_layers=1, plane_bytes=(64,), dtype="uint8"),), block_tokens=4, tag="opaque:x"
        )
        config = EngineConfig(chunk_tokens=16, host_bytes="1MiB", chunker="segments", separator=[1])
        with pytest.raises(ConfigurationError, match="cuts inside blocks"):
            async with CacheEngine.open(config, connector=NullConnector(opaque)):
                pass
        many = KVLayout(groups=tuple(LayerGroup(num_layers=1, plane_bytes=(8,), dtype="uint8") for _ in range(65)))
        with pytest.raises(ConfigurationError, match="65 layer groups, at most 64"):
            async with CacheEngine.open(EngineConfig(host_bytes="1MiB"), connector=NullConnector(many)):
                pass

    @pytest.mark.asyncio
    async def test_sharing_tiers_without_a_namespace_is_warned_about(self, caplog: pytest.LogCaptureFixture) -> None:
        kv = PagedKV(4 * T)
        config = config_for(kv, 16)
        async with CacheEngine.open(config, connector=kv.connector, tiers=[MemoryBackend()]):
            assert "no namespace given" in caplog.text
        caplog.clear()
        async with CacheEngine.open(config, connector=kv.connector, tiers=[]):
            assert "no namespace given" not in caplog.text

    @pytest.mark.asyncio
    async def test_one_line_tells_what_opened(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "akvcache")
        kv = PagedKV(4 * T)
        async with open_engine(kv, 16, [MemoryBackend(), MemoryBackend()]):
            pass
        [line] = [r.getMessage() for r in caplog.records if "akvcache open" in r.getMessage()]
        assert "16 host slots" in line
        assert "memory (active), memory2 (active)" in line


class TestTwoEngines:
    @pytest.mark.asyncio
    async def test_in_one_process_on_one_medium_they_share_entries(self) -> None:
        kv = PagedKV(4 * T)
        before = kv.rows()
        store = MemoryStore()
        async with (
            open_engine(kv, 16, [MemoryBackend(store)]) as one,
            open_engine(kv, 16, [MemoryBackend(store)]) as two,
        ):
            await (await one.store(kv.tokens, kv.slots)).durable()
            kv.wipe()
            assert (await two.retrieve(kv.tokens, kv.slots)).by_tier == {"memory": 4 * T}
            assert torch.equal(kv.rows(), before)
            assert (await two.store(kv.tokens, kv.slots)).new_tokens == 0

    @pytest.mark.asyncio
    async def test_two_namespaces_on_one_medium_never_share(self) -> None:
        kv = PagedKV(4 * T)
        store = MemoryStore()
        config = config_for(kv, 16)
        names = [
            MODEL,
            CacheNamespace(model="other"),
            CacheNamespace(model="test-model", weights_version="v2"),
            CacheNamespace(model="test-model", parallel={"tp": (0, 2)}),
            CacheNamespace(model="test-model", parallel={"tp": (1, 2)}),
            CacheNamespace(model="test-model", parallel={"cp": (1, 2)}),
            CacheNamespace(model="test-model", extra={"quantization": "int8"}),
        ]
        for index, namespace in enumerate(names):
            for plane in (plane for pair in kv.layers for plane in pair):
                plane.fill_(index)
            async with CacheEngine.open(
                config, connector=kv.connector, namespace=namespace, tiers=[MemoryBackend(store)]
            ) as engine:
                assert (await engine.lookup(kv.tokens)).hit_tokens == 0
                assert (await engine.store(kv.tokens, kv.slots)).new_tokens == 4 * T
        for index, namespace in enumerate(names):
            kv.wipe()
            async with CacheEngine.open(
                config, connector=kv.connector, namespace=namespace, tiers=[MemoryBackend(store)]
            ) as engine:
                assert (await engine.retrieve(kv.tokens, kv.slots)).loaded_tokens == 4 * T
            loaded = kv.rows()
            for plane in (plane for pair in kv.layers for plane in pair):
                plane.fill_(index)
            assert torch.equal(loaded, kv.rows())
        assert len(store.frames) == 4 * len(names)
        assert len(store.manifests) == len(names)

    @pytest.mark.asyncio
    async def test_a_medium_swapped_for_an_empty_one_is_noticed(self) -> None:
        """LR-08: the first failing read withdraws the claim."""
        kv = PagedKV(4 * T)
        store = MemoryStore()
        async with open_engine(kv, 64, [MemoryBackend(store)]) as engine:
            await engine.store(kv.tokens, kv.slots)
        async with open_engine(kv, 16, [MemoryBackend(store)]) as engine:
            assert (await engine.lookup(kv.tokens)).hit_tokens == 4 * T
            store.frames.clear()
            loaded = await engine.retrieve(kv.tokens, kv.slots)
            assert (loaded.loaded_tokens, loaded.stopped) == (0, StopReason.MISSING)
            assert (await engine.lookup(kv.tokens)).hit_tokens == 0
            assert (await (await engine.store(kv.tokens, kv.slots)).durable()).durable_tokens == 4 * T
