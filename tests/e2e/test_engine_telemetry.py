"""Caller, span and metric tell one story: who caused it, how long it took, why it stopped."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from akvcache import CacheEngine, RetrieveResult, StopReason
from akvcache.backend import Backend
from akvcache.errors import UsageError
from akvcache.frame import frame_bytes
from akvcache.keys import ChunkKey, depth_of
from akvcache.telemetry import names
from akvcache.testing import Fault, FaultKind, FaultyBackend, MemoryBackend, MemoryStore, Op
from tests.doubles import GatedConnector, WatchedConnector
from tests.recorder import Recorder
from tests.support import CHUNK, MODEL, PagedKV, config_for, head_mask

T = CHUNK


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def observed(recorder: Recorder, kv: PagedKV, num_slots: int = 32, tiers: Sequence[Backend] = (), **options: object):
    """Return the context manager of an engine that reports to `recorder`."""
    return CacheEngine.open(
        config_for(kv, num_slots, **options),
        connector=kv.connector,
        namespace=MODEL,
        tiers=list(tiers),
        tracer=recorder.tracer,
        meter=recorder.meter,
    )


async def stored(kv: PagedKV) -> MemoryStore:
    store = MemoryStore()
    async with observed(Recorder(), kv, 64, [MemoryBackend(store)]) as engine:
        await engine.store(kv.tokens, kv.slots)
    return store


def names_of(spans: Sequence[ReadableSpan]) -> list[str]:
    return sorted(span.name for span in spans)


class TestSpans:
    @pytest.mark.asyncio
    async def test_every_call_and_its_phases_hang_below_the_callers_span(self, recorder: Recorder) -> None:
        kv = PagedKV(6 * T + 1)
        async with observed(recorder, kv, 32, [MemoryBackend(await stored(kv))]) as engine:
            with recorder.tracer.start_as_current_span("request") as caller:
                await engine.lookup(kv.tokens)
                await engine.retrieve(kv.tokens, kv.slots)
                await engine.store(kv.tokens, kv.slots)
                await engine.prefetch(kv.tokens)
                await engine.store(kv.part(1, 6)[0], kv.part(1, 6)[1])
        root = recorder.span("request")
        calls = recorder.children(root)
        assert [call.name for call in calls] == [
            names.LOOKUP,
            names.RETRIEVE,
            names.STORE,
            names.PREFETCH,
            names.STORE,
        ]
        phases = [names_of(recorder.children(call)) for call in calls]
        assert phases == [
            [names.KEYS],
            sorted([names.KEYS, names.PLAN, names.TIER_READ, names.H2D]),
            [names.KEYS],
            sorted([names.KEYS, names.PLAN]),
            sorted([names.KEYS, names.LEASE, names.D2H]),
        ]
        trace_id = caller.get_span_context().trace_id
        below = [span for call in calls for span in [call, *recorder.children(call)]]
        assert {span.context.trace_id for span in below if span.context} == {trace_id}
        for call in calls:
            for phase in recorder.children(call):
                assert (phase.attributes or {})[names.OP] == call.name
                assert call.start_time is not None
                assert phase.start_time is not None
                assert phase.end_time is not None
                assert call.start_time <= phase.start_time <= phase.end_time <= (call.end_time or 0)
        assert recorder.open_spans == 0

    @pytest.mark.asyncio
    async def test_phases_say_what_they_moved(self, recorder: Recorder) -> None:
        kv = PagedKV(6 * T)
        payload = kv.connector.layout.payload_bytes(T)
        async with observed(recorder, kv, 32, [MemoryBackend(MemoryStore())], wave_bytes=1) as engine:
            await engine.store(kv.tokens, kv.slots)
            await engine.flush()
            await engine.clear()
            await engine.store(*kv.part(0, 4))
        d2h = recorder.spans(names.D2H)
        assert [(s.attributes or {})[names.CHUNKS] for s in d2h] == [6, 4], "one span, however many waves"
        assert [(s.attributes or {})[names.BYTES] for s in d2h] == [6 * payload, 4 * payload]
        writes = recorder.spans(names.TIER_WRITE)
        assert [(s.attributes or {})[names.CHUNKS] for s in writes] == [6, 4]
        assert [(s.attributes or {})[names.BYTES] for s in writes] == [
            6 * frame_bytes(payload),
            4 * frame_bytes(payload),
        ]
        assert all((s.attributes or {})[names.TIER] == "memory" for s in writes)

    @pytest.mark.asyncio
    async def test_background_writes_are_linked_to_their_store(self, recorder: Recorder) -> None:
        kv = PagedKV(4 * T)
        backends = [FaultyBackend(MemoryBackend(MemoryStore(), name=name)) for name in ("one", "two")]
        async with observed(recorder, kv, 32, backends) as engine:
            for backend in backends:
                backend.hold("write")
            with recorder.tracer.start_as_current_span("request"):
                await engine.store(kv.tokens, kv.slots)
            store = recorder.span(names.STORE)
            assert recorder.spans(names.TIER_WRITE) == [], "they outlive the store"
            assert recorder.open_spans == 2
            for backend in backends:
                backend.release()
            await engine.flush()
        writes = recorder.spans(names.TIER_WRITE)
        assert sorted(str((span.attributes or {})[names.TIER]) for span in writes) == ["one", "two"]
        for span in writes:
            assert span.parent is None
            assert [link.context for link in span.links] == [store.context]
        assert recorder.open_spans == 0

    @pytest.mark.asyncio
    async def test_a_store_with_nothing_to_write_makes_no_write_span(self, recorder: Recorder) -> None:
        kv = PagedKV(4 * T)
        async with observed(recorder, kv, 32, [MemoryBackend(await stored(kv))]) as engine:
            for _ in range(3):
                assert (await engine.store(kv.tokens, kv.slots)).existing_tokens == 4 * T
        assert recorder.spans(names.TIER_WRITE) == []
        assert recorder.total(names.M_PHASE_SECONDS, phase=names.TIER_WRITE) == 0

    @pytest.mark.asyncio
    async def test_reads_have_a_span_per_tier(self, recorder: Recorder) -> None:
        kv = PagedKV(4 * T)
        one, two = await stored(kv), await stored(kv)
        one.frames = {key: frame for key, frame in one.frames.items() if depth_of(key) < 3}
        tiers = [MemoryBackend(one, name="one"), MemoryBackend(two, name="two")]
        async with observed(recorder, kv, 32, tiers) as engine:
            await engine.retrieve(kv.tokens, kv.slots)
        reads = {(s.attributes or {})[names.TIER]: s for s in recorder.spans(names.TIER_READ)}
        assert {tier: (s.attributes or {})[names.CHUNKS] for tier, s in reads.items()} == {"one": 3, "two": 1}
        attributes = recorder.attributes(names.RETRIEVE)
        assert (attributes[f"{names.TOKENS_HIT}.one"], attributes[f"{names.TOKENS_HIT}.two"]) == (3 * T, T)

    @pytest.mark.asyncio
    async def test_the_connector_and_the_backend_see_the_span_of_their_call(self, recorder: Recorder) -> None:
        """OB-05: the context is carried into the copy threads and the tasks."""
        kv = PagedKV(4 * T)
        seen: list[tuple[str, int]] = []

        def note(what: str) -> None:
            seen.append((what, trace.get_current_span().get_span_context().span_id))

        class Noting(MemoryBackend):
            async def read(self, key: ChunkKey, into: memoryview) -> int | None:
                note("read")
                return await super().read(key, into)

        store = await stored(kv)
        kv.connector = watched = WatchedConnector(kv.connector)  # type: ignore[assignment]
        watched.on_copy = note
        async with observed(recorder, kv, 32, [Noting(store)]) as engine:
            await engine.retrieve(kv.tokens, kv.slots)
            await engine.clear()
            await engine.store(kv.tokens, kv.slots)
        retrieve, kept = recorder.span(names.RETRIEVE).context, recorder.span(names.STORE).context
        assert retrieve is not None
        assert kept is not None
        assert set(seen) == {("read", retrieve.span_id), ("scatter", retrieve.span_id), ("gather", kept.span_id)}

    @pytest.mark.asyncio
    async def test_the_callers_span_is_current_again_after_each_call(self, recorder: Recorder) -> None:
        kv = PagedKV(4 * T)
        async with observed(recorder, kv) as engine:
            with recorder.tracer.start_as_current_span("request") as caller:
                await engine.store(kv.tokens, kv.slots)
                assert trace.get_current_span() is caller
                task = asyncio.create_task(engine.retrieve(kv.tokens, kv.slots))
                task.cancel()
                await asyncio.wait([task])
                assert trace.get_current_span() is caller

    @pytest.mark.asyncio
    async def test_concurrent_calls_keep_their_phases_apart(self, recorder: Recorder) -> None:
        kv = PagedKV(20 * T)

        async def one(engine: CacheEngine[Any], index: int) -> None:
            with recorder.tracer.start_as_current_span(f"request-{index}"):
                await engine.store(*kv.part(index, index + 1))
                await engine.retrieve(*kv.part(index, index + 1))

        async with observed(recorder, kv) as engine:
            await asyncio.gather(*(one(engine, index) for index in range(20)))
        for index in range(20):
            calls = recorder.children(recorder.span(f"request-{index}"))
            assert names_of(calls) == [names.RETRIEVE, names.STORE]
            assert names_of(recorder.children(calls[0])) == sorted([names.KEYS, names.LEASE, names.D2H])


class TestEnds:
    """OB-03: started == ended, whatever happens."""

    @pytest.mark.asyncio
    async def test_hit_and_miss(self, recorder: Recorder) -> None:
        kv = PagedKV(4 * T)
        async with observed(recorder, kv, 32, [MemoryBackend()]) as engine:
            await engine.lookup(kv.tokens)
            await engine.retrieve(kv.tokens, kv.slots)
            await engine.prefetch(kv.tokens)
            assert recorder.open_spans == 0
            await engine.store(kv.tokens, kv.slots)
            await engine.store(kv.tokens, kv.slots)
            await engine.flush()
            assert recorder.open_spans == 0

    @pytest.mark.asyncio
    @pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.LOSE, FaultKind.CORRUPT, FaultKind.TRUNCATE])
    async def test_failing_reads(self, recorder: Recorder, kind: FaultKind) -> None:
        kv = PagedKV(4 * T)
        backend = FaultyBackend(MemoryBackend(await stored(kv)), plan=[Fault(op=Op.READ, kind=kind)])
        async with observed(recorder, kv, 32, [backend], io_retries=0) as engine:
            loaded = await engine.retrieve(kv.tokens, kv.slots)
            assert loaded.stopped is not None
            assert recorder.attributes(names.RETRIEVE)[names.STOPPED] == loaded.stopped
        assert recorder.open_spans == 0
        assert recorder.span(names.RETRIEVE).status.status_code is StatusCode.UNSET, "a miss is no error"

    @pytest.mark.asyncio
    async def test_failing_writes_end_the_write_span_with_the_reason(self, recorder: Recorder) -> None:
        kv = PagedKV(4 * T)
        backend = FaultyBackend(MemoryBackend(MemoryStore()), plan=[Fault(op=Op.WRITE, kind=FaultKind.FAIL, calls=[1])])
        async with observed(recorder, kv, 32, [backend], io_retries=0) as engine:
            await engine.store(kv.tokens, kv.slots)
            await engine.flush()
        attributes = recorder.attributes(names.TIER_WRITE)
        assert attributes[names.STOPPED] == StopReason.BACKEND_ERROR
        assert attributes[names.CHUNKS] == 3
        assert recorder.total(names.M_WRITES_DROPPED, tier="memory") == 1
        assert recorder.open_spans == 0

    @pytest.mark.asyncio
    @pytest.mark.parametrize("stop", ["contains", "read"])
    async def test_a_cancelled_retrieve(self, recorder: Recorder, stop: str) -> None:
        kv = PagedKV(4 * T)
        backend = FaultyBackend(MemoryBackend(await stored(kv)))
        async with observed(recorder, kv, 32, [backend]) as engine:
            backend.hold(stop)
            task = asyncio.create_task(engine.retrieve(kv.tokens, kv.slots))
            await backend.reached(stop)
            task.cancel()
            await asyncio.wait([task])
            backend.release()
        status = recorder.span(names.RETRIEVE).status
        assert (status.status_code, status.description) == (StatusCode.ERROR, "CancelledError")
        assert recorder.open_spans == 0

    @pytest.mark.asyncio
    async def test_a_cancelled_store(self, recorder: Recorder) -> None:
        kv = PagedKV(4 * T)
        kv.connector = gated = GatedConnector(kv.connector)  # type: ignore[assignment]
        async with observed(recorder, kv, 32, [MemoryBackend()], wave_bytes=1) as engine:
            gated.hold()
            task = asyncio.create_task(engine.store(kv.tokens, kv.slots))
            await gated.reached()
            task.cancel()
            gated.release()
            await asyncio.wait([task])
            assert task.cancelled()
        assert recorder.span(names.STORE).status.description == "CancelledError"
        assert recorder.open_spans == 0

    @pytest.mark.asyncio
    async def test_a_deadline_with_a_read_under_way(self, recorder: Recorder) -> None:
        kv = PagedKV(4 * T)
        backend = FaultyBackend(MemoryBackend(await stored(kv)))
        async with observed(recorder, kv, 32, [backend]) as engine:
            backend.hold("read")
            loaded = await engine.retrieve(kv.tokens, kv.slots, deadline_s=0.05)
            assert loaded.stopped is StopReason.DEADLINE
            backend.release()
        read = recorder.span(names.TIER_READ)
        assert read.start_time is not None
        assert read.end_time is not None
        assert read.end_time - read.start_time >= 0.02e9
        assert recorder.open_spans == 0

    @pytest.mark.asyncio
    async def test_closing_with_writes_given_up(self, recorder: Recorder) -> None:
        kv = PagedKV(8 * T)
        backend = FaultyBackend(MemoryBackend(MemoryStore()))
        async with observed(recorder, kv, 32, [backend], close_timeout_s=0.05, io_timeout_s=0.05) as engine:
            backend.hold("write")
            await engine.store(kv.tokens, kv.slots)
            await backend.reached("write")
        for _ in range(20):
            await asyncio.sleep(0)
        assert recorder.open_spans == 0

    @pytest.mark.asyncio
    async def test_a_wrong_call_leaves_no_open_span(self, recorder: Recorder) -> None:
        kv = PagedKV(4 * T)
        async with observed(recorder, kv) as engine:
            for call in (
                engine.lookup([-1]),
                engine.store(kv.tokens, kv.slots[:3]),
                engine.retrieve(kv.tokens, kv.slots, mask=head_mask(3, 4 * T)),
            ):
                with pytest.raises(UsageError):
                    await call
        assert recorder.open_spans == 0


class TestMetrics:
    @pytest.mark.asyncio
    async def test_requested_hit_and_delivered_add_up(self, recorder: Recorder) -> None:
        """OB-01: 3 full, 3 half, 4 none."""
        kv = PagedKV(80 * T)
        prompts = [kv.part(i * 8, i * 8 + 8) for i in range(10)]
        async with observed(recorder, kv, 256, [MemoryBackend()]) as engine:
            for i, (tokens, slots) in enumerate(prompts):
                if i < 3:
                    await engine.store(tokens, slots)
                elif i < 6:
                    await engine.store(tokens[: 4 * T], slots[: 4 * T])
            found = [await engine.lookup(tokens) for tokens, _ in prompts]
            loaded = [await engine.retrieve(*prompt) for prompt in prompts]
            ready = [await engine.prefetch(tokens) for tokens, _ in prompts]
        hit = (3 * 8 + 3 * 4) * T
        assert sum(result.hit_tokens for result in found) == hit
        for op in (names.LOOKUP, names.RETRIEVE, names.PREFETCH):
            assert recorder.total(names.M_REQUESTS, op=op) == 10
            assert recorder.total(names.M_REQUESTS, op=op, stopped="none") == 3
            assert recorder.total(names.M_REQUESTS, op=op, stopped="missing") == 7
            assert recorder.total(names.M_TOKENS, op=op, outcome=names.TOKENS_REQUESTED) == 80 * T
            assert recorder.total(names.M_TOKENS, op=op, outcome=names.TOKENS_HIT) == hit
        assert recorder.total(names.M_TOKENS, op=names.RETRIEVE, outcome=names.TOKENS_LOADED) == hit
        assert recorder.total(names.M_TOKENS, op=names.RETRIEVE, outcome="served") == hit
        assert recorder.total(names.M_TOKENS, op=names.STORE, outcome=names.TOKENS_STORED) == hit
        assert recorder.total(names.M_TOKENS, op=names.STORE, outcome=names.TOKENS_NEW) == hit
        assert recorder.total(names.M_BROKEN_PROMISES) == 0
        assert sum(result.loaded_tokens for result in loaded) == hit
        assert sum(result.ready_tokens for result in ready) == hit

    @pytest.mark.asyncio
    async def test_nothing_moves_while_nothing_happens(self, recorder: Recorder) -> None:
        """OB-02."""
        kv = PagedKV(4 * T)
        async with observed(recorder, kv, 32, [MemoryBackend()]) as engine:
            await engine.store(kv.tokens, kv.slots)
            await engine.flush()
            await engine.retrieve(kv.tokens, kv.slots)
            first = recorder.snapshot()
            assert first
            for _ in range(5):
                assert recorder.snapshot() == first

    @pytest.mark.asyncio
    async def test_promised_and_not_delivered(self, recorder: Recorder) -> None:
        kv = PagedKV(8 * T)
        backend = FaultyBackend(
            MemoryBackend(await stored(kv)), plan=[Fault(op=Op.READ, kind=FaultKind.CORRUPT, calls=[5])]
        )
        async with observed(recorder, kv, 4, [backend]) as engine:
            loaded = await engine.retrieve(kv.tokens, kv.slots)
            assert loaded.stopped is StopReason.CORRUPT
            assert loaded.hit_tokens == 8 * T
            broken = loaded.hit_tokens - loaded.loaded_tokens
            assert broken > 0
            assert recorder.total(names.M_BROKEN_PROMISES) == broken
            assert recorder.total(names.M_CORRUPT, tier="memory") == 1
            await engine.clear()
            await engine.retrieve(kv.tokens, kv.slots)
            assert recorder.total(names.M_BROKEN_PROMISES) == broken

    @pytest.mark.asyncio
    async def test_evictions_operations_and_gauges(self, recorder: Recorder) -> None:
        kv = PagedKV(12 * T)
        payload = kv.connector.layout.payload_bytes(T)
        async with observed(recorder, kv, 8, [MemoryBackend()]) as engine:
            await engine.store(*kv.part(0, 6))
            await engine.flush()
            await engine.store(*kv.part(6, 12))
            await engine.flush()
            await engine.lookup(kv.tokens)
            assert recorder.total(names.M_EVICTED, tier="host") == 4
            assert recorder.total(names.M_TIER_OPERATIONS, tier="memory", op="write", outcome="ok") == 12
            assert recorder.total(names.M_PHASE_BYTES, op=names.STORE, phase=names.D2H) == 12 * payload
            assert recorder.total(names.M_PHASE_SECONDS, op=names.STORE, phase=names.D2H) == 2
            slots = {attrs["akv.state"]: value for attrs, value in recorder.points(names.M_POOL_SLOTS)}
            assert slots == {"free": 0, "cached": 8, "in_use": 0}
            assert recorder.points(names.M_BREAKER) == [({names.TIER: "memory"}, 0)]
            assert recorder.points(names.M_QUEUE_BYTES) == [({names.TIER: "memory"}, 0)]

    @pytest.mark.asyncio
    async def test_a_by_pass_is_no_miss(self, recorder: Recorder) -> None:
        """OB-09."""
        kv = PagedKV(4 * T)
        async with observed(recorder, kv, min_tokens=1000) as engine:
            await engine.lookup(kv.tokens)
            await engine.retrieve(kv.tokens, kv.slots)
        assert recorder.total(names.M_REQUESTS, stopped="too_short") == 2
        assert recorder.total(names.M_TOKENS) == 0
        assert recorder.attributes(names.LOOKUP)[names.STOPPED] == "too_short"

    @pytest.mark.asyncio
    async def test_late_cancels_and_clears_never_make_a_counter_raise(self, recorder: Recorder) -> None:
        """OB-08."""
        kv = PagedKV(30 * T)
        async with observed(recorder, kv, 8, [MemoryBackend()]) as engine:
            for i in range(10):
                tasks = [
                    asyncio.create_task(engine.store(*kv.part(i, i + 20))),
                    asyncio.create_task(engine.retrieve(*kv.part(i, i + 20))),
                    asyncio.create_task(engine.prefetch(kv.part(i, i + 20)[0])),
                ]
                for _ in range(i):
                    await asyncio.sleep(0)
                tasks[i % 3].cancel()
                if i % 2:
                    await engine.clear()
                await asyncio.wait(tasks)
            assert engine.health().degraded is None
        assert recorder.open_spans == 0
        assert all(value >= 0 for points in recorder.snapshot().values() for _, value in points)


class TestReasons:
    """The result, the span and the metric carry the same reason."""

    async def check(self, recorder: Recorder, op: str, result: Any, reason: StopReason) -> None:
        assert result.stopped is reason
        assert recorder.attributes(op)[names.STOPPED] == reason.value
        assert recorder.total(names.M_REQUESTS, op=op, stopped=reason.value) == 1

    @pytest.mark.asyncio
    async def test_memory_pressure(self, recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "akvcache")
        kv = PagedKV(6 * T + 3)
        async with observed(recorder, kv, 4) as engine:
            kept = await engine.store(kv.tokens, kv.slots)
        await self.check(recorder, names.STORE, kept, StopReason.MEMORY_PRESSURE)
        assert f"stored {4 * T} of {6 * T + 3} tokens (memory pressure)" in caplog.messages
        assert recorder.attributes(names.STORE)[names.TOKENS_STORED] == 4 * T

    @pytest.mark.asyncio
    async def test_a_whole_store_has_no_reason(self, recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "akvcache")
        kv = PagedKV(4 * T + 3)
        async with observed(recorder, kv) as engine:
            await engine.store(kv.tokens, kv.slots)
        assert f"stored {4 * T} of {4 * T + 3} tokens" in caplog.messages
        assert names.STOPPED not in recorder.attributes(names.STORE)
        assert recorder.total(names.M_REQUESTS, op=names.STORE, stopped="none") == 1

    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        ("kind", "reason"),
        [
            (FaultKind.LOSE, StopReason.MISSING),
            (FaultKind.CORRUPT, StopReason.CORRUPT),
            (FaultKind.TRUNCATE, StopReason.CORRUPT),
            (FaultKind.FAIL, StopReason.BACKEND_ERROR),
        ],
    )
    async def test_reads(self, recorder: Recorder, kind: FaultKind, reason: StopReason) -> None:
        kv = PagedKV(4 * T)
        backend = FaultyBackend(MemoryBackend(await stored(kv)), plan=[Fault(op=Op.READ, kind=kind)])
        async with observed(recorder, kv, 16, [backend], io_retries=0) as engine:
            loaded: RetrieveResult = await engine.retrieve(kv.tokens, kv.slots)
        await self.check(recorder, names.RETRIEVE, loaded, reason)

    @pytest.mark.asyncio
    async def test_deadline_and_missing(self, recorder: Recorder) -> None:
        kv = PagedKV(4 * T)
        async with observed(recorder, kv) as engine:
            await self.check(
                recorder, names.STORE, await engine.store(kv.tokens, kv.slots, deadline_s=0), StopReason.DEADLINE
            )
            await self.check(recorder, names.LOOKUP, await engine.lookup(kv.tokens), StopReason.MISSING)
            await self.check(recorder, names.PREFETCH, await engine.prefetch(kv.tokens), StopReason.MISSING)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("reason", [StopReason.FROZEN, StopReason.UNHEALTHY])
    async def test_closed_gates(self, recorder: Recorder, reason: StopReason) -> None:
        kv = PagedKV(4 * T)
        async with observed(recorder, kv) as engine:
            if reason is StopReason.FROZEN:
                engine.freeze(True)
            else:
                engine.degrade("broken")
            await self.check(recorder, names.STORE, await engine.store(kv.tokens, kv.slots), reason)

    @pytest.mark.asyncio
    async def test_transfer_error_is_logged_with_its_cause(
        self, recorder: Recorder, caplog: pytest.LogCaptureFixture
    ) -> None:
        kv = PagedKV(4 * T)
        kv.connector = watched = WatchedConnector(kv.connector)  # type: ignore[assignment]

        def fail(_name: str) -> None:
            raise RuntimeError("illegal memory access")

        watched.on_copy = fail
        async with observed(recorder, kv) as engine:
            kept = await engine.store(kv.tokens, kv.slots)
        await self.check(recorder, names.STORE, kept, StopReason.TRANSFER_ERROR)
        assert "device copy failed: RuntimeError: illegal memory access" in caplog.text

    @pytest.mark.asyncio
    async def test_our_own_bug_ends_the_span_with_an_error(self, recorder: Recorder) -> None:
        class Lying(MemoryBackend):
            async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
                return 5  # type: ignore[return-value]

        kv = PagedKV(4 * T)
        async with observed(recorder, kv, 16, [Lying()], strict=False) as engine:
            found = await engine.lookup(kv.tokens)
            assert (found.hit_tokens, found.stopped) == (0, StopReason.UNHEALTHY)
            assert "TypeError" in str(engine.health().degraded)
        status = recorder.span(names.LOOKUP).status
        assert (status.status_code, status.description) == (StatusCode.ERROR, "TypeError")
        assert recorder.open_spans == 0
