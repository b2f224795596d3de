"""Tiers that fail, lie, stall and come back: a shorter hit, no wrong bytes, no hang, no leak."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from akvcache import StopReason
from akvcache.errors import BackendUnavailable, CapacityExhausted
from akvcache.frame import HEADER_BYTES
from akvcache.keys import ChunkKey
from akvcache.telemetry import names
from akvcache.testing import (
    Fault,
    FaultKind,
    FaultyBackend,
    MemoryBackend,
    MemoryStore,
    Op,
    Stop,
    VirtualClock,
)
from tests.faults.kit import CHUNK, CountedBackend, Rig, rig, slot_bytes, until

pytestmark = pytest.mark.asyncio

FAST = {"io_timeout_s": 0.05, "lookup_deadline_s": 0.05}


def fault(op: Op, kind: FaultKind, calls: Sequence[int] | None = None, **options: object) -> Fault:
    return Fault(op=op, kind=kind, calls=calls, **options)


async def written(r: Rig, label: str, chunks: int) -> None:
    """Store a prompt and push it out of host memory."""
    await r.store(label, chunks)
    await r.push_out()


# -- writes that fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [0, 2, 4], ids=["first", "middle", "last"])
@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.LOSE])
async def test_a_chunk_whose_write_failed_is_not_there(kind: FaultKind, broken: int) -> None:
    """CB-01: the hit ends before it, the store says so, other chunks are not harmed."""
    medium = MemoryStore()
    backend = FaultyBackend(MemoryBackend(medium), plan=[fault(Op.WRITE, kind, [broken])])
    async with rig([backend]) as r:
        kept = await r.store("p", 5)
        assert kept.stored_tokens == 5 * CHUNK  # in host memory
        lasting = await kept.durable()
        absent = [key for key in r.keys("p", 5) if key not in medium.frames]
        assert len(absent) == 1
        reached = r.keys("p", 5).index(absent[0])
        assert lasting.durable_tokens == reached * CHUNK
        assert lasting.stopped in (StopReason.BACKEND_ERROR, StopReason.MISSING)
        await r.push_out()
        assert await r.hit("p", 5) == reached
        assert (await r.retrieve("p", 5)).loaded_tokens == reached * CHUNK
        await r.rest()
    async with rig([MemoryBackend(medium)]) as r:
        assert (await r.retrieve("p", 5)).loaded_tokens == reached * CHUNK
        kept = await r.store("p", 5)
        assert (await kept.durable()).durable_tokens == 5 * CHUNK  # DK-11: no permanent hole


@pytest.mark.parametrize("op", [Op.WRITE, Op.READ])
@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.FAIL_AFTER])
async def test_what_fails_once_retryably_is_tried_again(op: Op, kind: FaultKind) -> None:
    backend = FaultyBackend(MemoryBackend(MemoryStore()), plan=[fault(op, kind, [1], retryable=True)])
    async with rig([backend]) as r:
        kept = await r.store("p", 4)
        assert (await kept.durable()).durable_tokens == 4 * CHUNK
        await r.push_out()
        loaded = await r.retrieve("p", 4)
        assert (loaded.loaded_tokens, loaded.stopped) == (4 * CHUNK, None)
        assert backend.injected[kind] == 1
        await r.rest()


@pytest.mark.parametrize("retryable", [False, True])
async def test_what_fails_always_is_tried_as_often_as_it_says(retryable: bool) -> None:
    backend = FaultyBackend(MemoryBackend())
    async with rig([backend], io_retries=2, breaker_failures=100) as r:
        await written(r, "p", 2)
        reads = backend.calls[Op.READ]
        backend.plan = [fault(Op.READ, FaultKind.FAIL, retryable=retryable)]
        loaded = await r.retrieve("p", 1)
        assert (loaded.loaded_tokens, loaded.stopped) == (0, StopReason.BACKEND_ERROR)
        assert backend.calls[Op.READ] - reads == (3 if retryable else 1)
        backend.plan = []
        assert (await r.retrieve("p", 2)).loaded_tokens == 2 * CHUNK
        await r.rest()


async def test_an_error_of_no_known_kind_is_a_failed_call() -> None:
    class Rude(MemoryBackend):
        async def read(self, key: ChunkKey, into: memoryview) -> int | None:
            raise ZeroDivisionError

    async with rig([Rude()]) as r:
        await written(r, "p", 2)
        loaded = await r.retrieve("p", 2)
        assert (loaded.loaded_tokens, loaded.stopped) == (0, StopReason.BACKEND_ERROR)
        await r.works("after")
        await r.rest()


async def test_a_full_tier_is_not_a_broken_tier() -> None:
    backend = FaultyBackend(MemoryBackend(), plan=[fault(Op.WRITE, FaultKind.FAIL, error=CapacityExhausted)])
    async with rig([backend], breaker_failures=2) as r:
        kept = await r.store("p", 5)
        assert (await kept.durable()).stopped is StopReason.CAPACITY
        assert r.engine.health().tiers["memory"].breaker == "closed"
        await r.works("after")
        await r.rest()


# -- bytes that are wrong --------------------------------------------------------------------------------------------


def flipped(frame: bytes, at: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]


DAMAGE = {
    "header": lambda frame: flipped(frame, 20),
    "payload": lambda frame: flipped(frame, HEADER_BYTES + 3),
    "empty": lambda _frame: b"",
    "header only": lambda frame: frame[:HEADER_BYTES],
    "one page short": lambda frame: frame[:-4096],
    "one page long": lambda frame: frame + bytes(4096),
    "one byte short": lambda frame: frame[:-1],
    "one byte long": lambda frame: frame + b"x",
    "zeros": lambda frame: bytes(len(frame)),
    "text": lambda frame: (b"\x80\x04cos\nsystem\n" * len(frame))[: len(frame)],  # SE-01: nothing is executed
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("at", [0, 2])
async def test_a_damaged_chunk_is_a_miss_and_is_dropped(damage: str, at: int) -> None:
    """CB-02, CB-05, LR-02: the prefix before it is served; it is read once, then it is gone."""
    medium = MemoryStore()
    backend = FaultyBackend(MemoryBackend(medium))
    async with rig([backend]) as r:
        await written(r, "p", 4)
        bad = r.keys("p", 4)[at]
        medium.frames[bad] = DAMAGE[damage](medium.frames[bad])
        loaded = await r.retrieve("p", 4)
        assert (loaded.loaded_tokens, loaded.stopped) == (at * CHUNK, StopReason.CORRUPT)
        await r.rest()
        assert bad not in medium.frames
        await r.push_out()
        assert await r.hit("p", 4) == at
        await r.store("p", 4)
        await r.push_out()
        assert (await r.retrieve("p", 4)).loaded_tokens == 4 * CHUNK
        await r.rest()


async def test_chunks_swapped_between_keys_are_not_served() -> None:
    """CB-02, CB-08: a whole frame under another key is no chunk of that key."""
    medium = MemoryStore()
    async with rig([MemoryBackend(medium)]) as r:
        await r.store("p", 3)
        await written(r, "q", 3)
        first, second = r.keys("p", 3)[1], r.keys("q", 3)[1]
        medium.frames[first], medium.frames[second] = medium.frames[second], medium.frames[first]
        for label in ("p", "q"):
            loaded = await r.retrieve(label, 3)
            assert (loaded.loaded_tokens, loaded.stopped) == (CHUNK, StopReason.CORRUPT)
        await r.rest()


@pytest.mark.parametrize("kind", [FaultKind.TRUNCATE, FaultKind.CORRUPT])
@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
async def test_what_the_wire_damages_is_not_served(op: Op, kind: FaultKind) -> None:
    """CB-06: a torn write is never visible as a chunk; a torn read is a miss."""
    backend = FaultyBackend(MemoryBackend())
    async with rig([backend]) as r:
        first = backend.calls[op]
        backend.plan = [fault(op, kind, [first + 1])]
        await written(r, "p", 4)
        loaded = await r.retrieve("p", 4)
        assert loaded.loaded_tokens < 4 * CHUNK
        assert loaded.stopped is StopReason.CORRUPT
        assert backend.injected[kind] == 1
        await r.rest()


async def test_a_bad_chunk_that_cannot_be_deleted_is_read_once() -> None:
    """LR-02: no request loops over it; a lookup no longer promises it."""
    medium = MemoryStore()
    backend = FaultyBackend(MemoryBackend(medium), plan=[fault(Op.DELETE, FaultKind.FAIL)])
    async with rig([backend]) as r:
        await written(r, "p", 3)
        bad = r.keys("p", 3)[1]
        medium.frames[bad] = flipped(medium.frames[bad], HEADER_BYTES)
        assert (await r.retrieve("p", 3)).loaded_tokens == CHUNK
        await r.push_out()
        reads = backend.calls[Op.READ]
        assert await r.hit("p", 3) == 1
        assert (await r.retrieve("p", 3)).loaded_tokens == CHUNK
        assert backend.calls[Op.READ] == reads + 1
        await r.rest()


async def test_a_chunk_of_another_tier_stands_in_for_a_bad_one() -> None:
    medium = MemoryStore()
    async with rig([MemoryBackend(medium, name="fast"), MemoryBackend(name="slow")]) as r:
        await written(r, "p", 4)
        medium.frames[r.keys("p", 4)[2]] = bytes(slot_bytes(r.kv))
        loaded = await r.retrieve("p", 4)
        assert (loaded.loaded_tokens, loaded.stopped) == (4 * CHUNK, None)
        assert loaded.by_tier == {"fast": 3 * CHUNK, "slow": CHUNK}
        await r.rest()


# -- tiers that hang -------------------------------------------------------------------------------------------------


async def test_a_read_that_hangs_is_a_miss_at_the_deadline_and_keeps_its_slot() -> None:
    """HG-03: the caller goes on; the slot stays with the read until that has really ended."""
    backend = FaultyBackend(MemoryBackend())
    async with rig([backend], num_slots=4, staging_reserve=1, io_timeout_s=0.1) as r:
        await written(r, "p", 2)
        backend.hold("read")
        loaded = await r.retrieve("p", 2, deadline_s=0.02)
        assert (loaded.loaded_tokens, loaded.stopped) == (0, StopReason.DEADLINE)
        loaded = await r.retrieve("p", 2)  # waits for the tier's own limit, not for ever
        assert (loaded.loaded_tokens, loaded.stopped) == (0, StopReason.BACKEND_ERROR)
        lease = await r.host.acquire(4, timeout_s=0.01)
        assert lease is not None
        assert len(lease) == 1, "a slot was taken from under a read that still runs"
        lease.release()
        backend.release()
        await r.rest()
        assert (await r.retrieve("p", 2)).loaded_tokens == 2 * CHUNK


async def test_a_write_that_hangs_is_given_up_and_keeps_its_slot() -> None:
    """HG-03: an entry that never completes is not pending for ever; it is served from host memory meanwhile."""
    backend = FaultyBackend(MemoryBackend(MemoryStore()))
    async with rig([backend], num_slots=6, breaker_failures=100, **FAST) as r:
        backend.hold("write")
        kept = await r.store("p", 2)
        assert (await kept.durable(timeout_s=0.2)).durable_tokens == 0
        assert (await r.retrieve("p", 2)).by_tier == {"host": 2 * CHUNK}
        assert (await r.engine.flush(timeout_s=0.01)).pending_chunks == 2
        await r.store("q", 12)  # everything else makes room, those two do not
        assert (await r.retrieve("p", 2)).by_tier == {"host": 2 * CHUNK}
        backend.release()
        assert (await r.engine.flush()).pending_chunks == 0
        await r.rest()
        await r.works("after")


@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.HANG, FaultKind.LOSE])
async def test_a_tier_that_cannot_say_what_it_holds_holds_nothing(kind: FaultKind) -> None:
    clock = VirtualClock()
    backend = FaultyBackend(MemoryBackend(name="bad"))
    async with rig([backend, MemoryBackend(name="good")], clock=clock, **FAST) as r:
        await written(r, "p", 4)
        backend.plan = [fault(Op.CONTAINS, kind)]
        found = await r.engine.lookup(r.tokens("p", 4))
        assert (found.hit_tokens, found.by_tier) == (4 * CHUNK, {"good": 4 * CHUNK})
        assert (await r.retrieve("p", 4)).by_tier == {"good": 4 * CHUNK}
        await r.works("meanwhile")
        backend.plan = []
        backend.release()
        await r.rest()
        clock.advance(60)
        await r.push_out()
        assert (await r.retrieve("p", 4)).by_tier == {"bad": 4 * CHUNK}


async def test_a_delete_that_never_returns_holds_nobody_up() -> None:
    """HG-06."""
    medium = MemoryStore()
    backend = FaultyBackend(MemoryBackend(medium))
    async with rig([backend], **FAST) as r:
        await written(r, "p", 3)
        medium.frames[r.keys("p", 3)[1]] = b""
        backend.plan = [fault(Op.DELETE, FaultKind.HANG)]
        loaded = await r.retrieve("p", 3)
        assert (loaded.loaded_tokens, loaded.stopped) == (CHUNK, StopReason.CORRUPT)
        assert await r.hit("p", 3) == 1
        await r.works("meanwhile")
        backend.release()
        await r.rest()


# -- back-pressure ---------------------------------------------------------------------------------------------------


async def test_a_slow_tier_bounds_its_queue_and_holds_up_nobody() -> None:
    """HG-04: bounded in bytes, what does not fit is dropped and counted, reads and the other tier go on."""
    reader = InMemoryMetricReader()
    slow = FaultyBackend(MemoryBackend(name="slow"))
    good = MemoryStore()
    async with rig(
        [slow, MemoryBackend(good, name="good")],
        num_slots=16,
        memory_wait_s=0.02,
        write_queue_bytes=4 * 8192,
        meter=MeterProvider([reader]).get_meter("test"),
    ) as r:
        await r.store("wanted", 3)
        await r.engine.flush()
        slow.hold("write")
        most = 0
        for number in range(20):
            kept = await r.store(f"s{number}", 3)
            assert kept.stored_tokens == 3 * CHUNK
            most = max(most, r.context.queues[0].queued_bytes)
            assert r.context.queues[0].queued_bytes <= 4 * slot_bytes(r.kv)
            assert (await r.retrieve("wanted", 3)).loaded_tokens == 3 * CHUNK
        assert most == 4 * slot_bytes(r.kv)
        await until(lambda: not r.context.queues[1].num_pending)
        assert all(key in good.frames for number in range(20) for key in r.keys(f"s{number}", 3))
        assert dropped(reader)["slow", "queue_full"] >= 18
        slow.release()
        await r.rest()


def dropped(reader: InMemoryMetricReader) -> dict[tuple[str, str], int]:
    data = reader.get_metrics_data()
    assert data is not None
    metrics = [m for rm in data.resource_metrics for sm in rm.scope_metrics for m in sm.metrics]
    points = next(m for m in metrics if m.name == names.M_WRITES_DROPPED).data.data_points
    return {(str(p.attributes[names.TIER]), str(p.attributes[names.OUTCOME])): int(p.value) for p in points}


# -- the breaker -----------------------------------------------------------------------------------------------------


async def test_a_dead_tier_is_left_alone_and_comes_back() -> None:
    """OS-04: the first few calls pay, then none does; one probe at a time; it recovers by itself."""
    clock = VirtualClock()
    backend = FaultyBackend(MemoryBackend())
    async with rig([backend], clock=clock, breaker_failures=3, breaker_reset_s=5.0, **FAST) as r:
        await written(r, "p", 2)
        backend.hold("contains")
        for _ in range(20):
            assert await r.hit("p", 2) == 0
        assert backend.calls[Op.CONTAINS] <= 4 + 3
        asked = backend.calls[Op.CONTAINS]
        assert r.engine.health().tiers["memory"].breaker == "open"
        assert (await r.store("meanwhile", 2)).stored_tokens == 2 * CHUNK
        clock.advance(5.0)
        assert r.engine.health().tiers["memory"].breaker == "half_open"
        probing = [asyncio.create_task(r.hit("p", 2)) for _ in range(5)]
        await asyncio.wait(probing)
        assert backend.calls[Op.CONTAINS] == asked + 1
        assert r.engine.health().tiers["memory"].breaker == "open"
        backend.release()
        await r.rest()
        clock.advance(5.0)
        assert await r.hit("p", 2) == 2
        assert r.engine.health().tiers["memory"].breaker == "closed"
        assert (await r.retrieve("p", 2)).loaded_tokens == 2 * CHUNK


async def test_a_cancelled_probe_gives_way_to_the_next() -> None:
    """CX-05 for the breaker: the one call that may probe is not used up by a caller that leaves."""
    clock = VirtualClock()
    backend = FaultyBackend(MemoryBackend())
    async with rig([backend], clock=clock, breaker_failures=1, breaker_reset_s=5.0) as r:
        await written(r, "p", 2)
        backend.plan = [fault(Op.CONTAINS, FaultKind.FAIL, [backend.calls[Op.CONTAINS]])]
        assert await r.hit("p", 2) == 0
        clock.advance(5.0)
        backend.hold("contains")
        probe = asyncio.create_task(r.hit("p", 2))
        await backend.reached("contains")
        probe.cancel()
        await asyncio.wait([probe])
        backend.release()
        await r.rest()
        assert await r.hit("p", 2) == 2


async def test_impatient_callers_do_not_open_the_breaker_of_a_healthy_tier() -> None:
    async with rig([MemoryBackend()], breaker_failures=2) as r:
        await written(r, "p", 2)
        for _ in range(10):
            assert (await r.retrieve("p", 2, deadline_s=0.0)).loaded_tokens == 0
        assert r.engine.health().tiers["memory"].breaker == "closed"
        assert (await r.retrieve("p", 2)).loaded_tokens == 2 * CHUNK
        await r.rest()


async def test_impatient_callers_of_a_dead_tier_open_its_breaker_all_the_same() -> None:
    """OS-04: what counts is the tier's own time, also when no caller waits that long."""
    clock = VirtualClock()
    backend = FaultyBackend(MemoryBackend())
    async with rig([backend], clock=clock, breaker_failures=2, **FAST) as r:
        await written(r, "p", 2)
        backend.hold("contains")
        for _ in range(3):
            assert (await r.retrieve("p", 2, deadline_s=0.005)).loaded_tokens == 0
        await until(lambda: r.engine.health().tiers["memory"].breaker == "open")
        backend.release()
        await r.rest()
        clock.advance(60)
        assert (await r.retrieve("p", 2)).loaded_tokens == 2 * CHUNK


# -- clear -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.HANG])
@pytest.mark.parametrize("op", [Op.SCAN, Op.DELETE])
async def test_a_tier_that_cannot_be_cleared_is_named_and_never_asked_again(op: Op, kind: FaultKind) -> None:
    """SH-03: success means nothing is left; refusal is visible; nothing old comes back in either case."""
    bad, good = FaultyBackend(MemoryBackend(name="bad")), MemoryStore()
    async with rig([bad, MemoryBackend(good, name="good")]) as r:
        await written(r, "p", 3)
        bad.plan = [fault(op, kind)]
        result = await r.engine.clear(timeout_s=0.05)
        assert list(result.failed_tiers) == ["bad"]
        assert "clear failed" in (r.engine.health().tiers["bad"].inactive or "")
        assert await r.hit("p", 3) == 0
        assert not good.frames
        bad.plan = []
        bad.release()
        await r.rest()
        assert await r.hit("p", 3) == 0
        await r.works("after")
        assert await r.hit("p", 3) == 0


@pytest.mark.parametrize("ending", ["deleted", "delete fails"])
async def test_a_write_overtaken_by_clear_never_becomes_visible(ending: str) -> None:
    """Invariant 9: what was on its way down when everything was cleared is deleted, or hidden if it cannot be."""
    medium = MemoryStore()
    backend = FaultyBackend(MemoryBackend(medium))
    async with rig([backend], breaker_failures=100) as r:
        backend.hold("write")
        await r.store("old", 3)
        await backend.reached("write", 3)
        result = await r.engine.clear()
        assert not result.failed_tiers
        assert await r.hit("old", 3) == 0
        if ending == "delete fails":
            backend.plan = [fault(Op.DELETE, FaultKind.FAIL, retryable=True)]
        backend.release()
        await r.rest()
        assert await r.hit("old", 3) == 0
        assert (len(medium.frames) == 0) == (ending == "deleted")
        r.blank(1)
        kept = await r.engine.store(r.tokens("old", 3), r.kv.slots(1))  # other bytes under the same keys
        await kept.durable()
        await r.push_out()
        loaded = await r.engine.retrieve(r.tokens("old", 3), r.blank(2))
        assert np.array_equal(r.kv.read(2), r.noise), "bytes from before the clear came back"
        assert loaded.loaded_tokens == (3 * CHUNK if ending == "deleted" else 0)
        await r.rest()


async def test_a_store_that_began_before_clear_leaves_nothing() -> None:
    """Invariant 9: also if all it had done was to ask a slow tier what it holds."""
    backend = FaultyBackend(MemoryBackend())
    async with rig([backend]) as r:
        backend.hold("contains")
        store = asyncio.create_task(r.engine.store(r.tokens("old", 3), r.fill("old", 3)))
        lookup = asyncio.create_task(r.hit("old", 3))
        await backend.reached("contains", 2)
        await r.engine.clear()
        backend.release()
        kept = await store
        assert (kept.stored_tokens, kept.stopped) == (0, StopReason.CLEARED)
        assert await lookup == 0
        assert await r.hit("old", 3) == 0
        await r.rest()


async def test_a_lookup_that_was_overtaken_by_clear_promises_nothing() -> None:
    backend = FaultyBackend(MemoryBackend())
    async with rig([backend]) as r:
        await written(r, "old", 3)
        backend.hold("contains", Stop.AFTER)
        lookup = asyncio.create_task(r.engine.lookup(r.tokens("old", 3), lease_s=60))
        await backend.reached("contains")
        await r.engine.clear()
        backend.release()
        found = await lookup
        assert (found.hit_tokens, found.stopped) == (0, StopReason.CLEARED)
        assert found.lease is not None
        assert found.lease.tokens == 0
        found.lease.release()
        await r.rest()


async def test_a_retrieve_during_clear_does_not_save_what_a_later_tier_still_holds() -> None:
    """Invariant 9: no tier is read while another one is being cleared."""
    first, second = FaultyBackend(MemoryBackend(name="first")), FaultyBackend(MemoryBackend(name="second"))
    async with rig([first, second]) as r:
        await written(r, "old", 3)
        first.hold("scan")
        second.hold("scan")
        clear = asyncio.create_task(r.engine.clear())
        await first.reached("scan")
        assert await r.hit("old", 3) == 0
        assert (await r.retrieve("old", 3)).loaded_tokens == 0
        first.release()
        second.release()
        await clear
        assert await r.hit("old", 3) == 0
        assert (await r.retrieve("old", 3)).loaded_tokens == 0
        await r.rest()


async def test_a_cancelled_clear_does_not_bring_back_what_it_had_begun_to_clear() -> None:
    backend = FaultyBackend(MemoryBackend())
    async with rig([backend]) as r:
        await written(r, "old", 3)
        backend.hold("delete")
        clear = asyncio.create_task(r.engine.clear())
        await backend.reached("delete")
        clear.cancel()
        await asyncio.wait([clear])
        assert clear.cancelled()
        assert await r.hit("old", 3) == 0
        backend.release()
        await r.rest()
        assert await r.hit("old", 3) == 0
        await r.works("after")


# -- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.HANG])
async def test_a_tier_that_refuses_the_next_weights_goes_out_of_use(kind: FaultKind) -> None:
    bad = FaultyBackend(MemoryBackend(name="bad"))
    async with rig([bad, MemoryBackend(name="good")], **FAST) as r:
        await written(r, "old", 3)
        bad.plan = [fault(Op.ATTACH, kind)]
        await r.engine.set_weights_version("next")
        assert "namespace refused" in (r.engine.health().tiers["bad"].inactive or "")
        assert await r.hit("old", 3) == 0
        await r.works("after")
        bad.release()
        await r.rest()


async def test_requests_during_a_change_of_weights_do_not_fail() -> None:
    backend = FaultyBackend(MemoryBackend())
    async with rig([backend], breaker_failures=1) as r:
        await written(r, "p", 3)
        backend.hold("attach")
        change = asyncio.create_task(r.engine.set_weights_version("next"))
        await backend.reached("attach")
        assert (await r.retrieve("p", 3)).loaded_tokens == 3 * CHUNK
        backend.release()
        await change
        assert await r.hit("p", 3) == 0
        assert r.engine.health().tiers["memory"].breaker == "closed"
        await r.works("after")
        await r.rest()


# -- opening ---------------------------------------------------------------------------------------------------------


async def test_a_tier_that_does_not_open_is_inactive_and_the_rest_works() -> None:
    bad = FaultyBackend(MemoryBackend(name="bad"), plan=[fault(Op.OPEN, FaultKind.FAIL, error=BackendUnavailable)])
    async with rig([bad, MemoryBackend(name="good")]) as r:
        assert "injected" in (r.engine.health().tiers["bad"].inactive or "")
        await written(r, "p", 3)
        assert (await r.retrieve("p", 3)).by_tier == {"good": 3 * CHUNK}
        await r.engine.clear()
        await r.works("after")
        await r.rest()


async def test_an_engine_whose_tiers_all_fail_to_open_serves_from_host_memory() -> None:
    """SH-05: every call is safe."""
    plan = [fault(Op.OPEN, FaultKind.FAIL)]
    async with rig([FaultyBackend(MemoryBackend(), plan=plan), FaultyBackend(MemoryBackend(), plan=plan)]) as r:
        await r.works("all")
        assert (await r.store("p", 2)).stored_tokens == 2 * CHUNK
        assert (await r.engine.prefetch(r.tokens("p", 2))).ready_tokens == 2 * CHUNK
        await r.engine.set_weights_version("next")
        await r.engine.flush()
        await r.engine.clear()
        await r.rest()


@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.HANG, FaultKind.NEVER])
async def test_a_tier_that_does_not_close_is_left_behind(kind: FaultKind) -> None:
    bad = FaultyBackend(MemoryBackend(), plan=[fault(Op.ACLOSE, kind)])
    good = CountedBackend()
    async with rig([bad, good], **FAST) as r:
        await r.works("before")
    assert good.closed == 1
    bad.release()
    await asyncio.sleep(0)


@pytest.mark.parametrize("kind", [FaultKind.HANG, FaultKind.NEVER])
@pytest.mark.parametrize("op", [Op.WRITE, Op.READ, Op.CONTAINS, Op.DELETE])
async def test_closing_gives_up_on_what_never_ends(op: Op, kind: FaultKind, caplog: pytest.LogCaptureFixture) -> None:
    """SH-02: closing has a limit, says what it left, and leaves no task behind."""
    medium = MemoryStore()
    backend = FaultyBackend(MemoryBackend(medium))
    async with rig([backend], close_timeout_s=0.05, **FAST) as r:
        await written(r, "p", 2)
        medium.frames[r.keys("p", 2)[1]] = b""
        backend.plan = [fault(op, kind)]
        loaded = await r.retrieve("p", 2, deadline_s=0.01)
        assert loaded.loaded_tokens < 2 * CHUNK
        await r.store("q", 2)
    assert r.context.supervisor.num_tasks == 0
    if op is Op.WRITE:
        assert "closed with 0 writes given up and 2 unfinished" in caplog.text
    backend.release()
    await asyncio.sleep(0)
