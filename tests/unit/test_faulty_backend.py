"""FaultyBackend does what its plan says, as often as it says, and stops where it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import pytest

from akvcache.backend import BackendContext
from akvcache.errors import BackendTimeout, BackendUnavailable, ChunkCorrupt, CommitFailed, ConfigurationError
from akvcache.frame import HEADER_BYTES, verify
from akvcache.keys import ChunkKey
from akvcache.testing import (
    Fault,
    FaultKind,
    FaultyBackend,
    MemoryBackend,
    Op,
    Stop,
    aligned_buffer,
    make_frame,
    make_keys,
    make_namespace_id,
    make_payload,
)

PAYLOAD = make_payload(20_000)
FRAME_BYTES = HEADER_BYTES + 20_480


@asynccontextmanager
async def opened(*plan: Fault, seed: int = 0) -> AsyncGenerator[tuple[FaultyBackend, MemoryBackend]]:
    inner = MemoryBackend()
    faulty = FaultyBackend(inner, seed=seed, plan=plan)
    await faulty.open(BackendContext(frame_bytes=FRAME_BYTES))
    await faulty.attach(make_namespace_id(), {})
    yield faulty, inner
    faulty.plan = ()
    faulty.release()
    await faulty.aclose()


async def write_all(faulty: FaultyBackend, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
    """Write each key; return those whose write raised."""
    failed: list[ChunkKey] = []
    for key in keys:
        try:
            await faulty.write(key, make_frame(key, PAYLOAD))
        except BackendUnavailable:
            failed.append(key)
    return failed


@pytest.mark.asyncio
async def test_fail_raises_the_planned_error_and_does_nothing() -> None:
    key = make_keys(1)[0]
    plan = Fault(op=Op.WRITE, kind=FaultKind.FAIL, calls=(0,), error=BackendTimeout, retryable=True)
    async with opened(plan) as (faulty, inner):
        with pytest.raises(BackendTimeout, match="injected") as caught:
            await faulty.write(key, make_frame(key, PAYLOAD))
        assert caught.value.retryable
        assert (caught.value.backend, caught.value.op, caught.value.key) == ("memory", "write", key)
        assert inner.store.frames == {}
        await faulty.write(key, make_frame(key, PAYLOAD))
        assert set(inner.store.frames) == {key}
        assert faulty.injected == {FaultKind.FAIL: 1}
        assert faulty.calls[Op.WRITE] == 2


@pytest.mark.asyncio
async def test_fail_after_raises_although_it_took_effect() -> None:
    key = make_keys(1)[0]
    async with opened(Fault(op=Op.WRITE, kind=FaultKind.FAIL_AFTER, error=CommitFailed)) as (faulty, inner):
        with pytest.raises(CommitFailed) as caught:
            await faulty.write(key, make_frame(key, PAYLOAD))
        assert not caught.value.retryable
        assert set(inner.store.frames) == {key}


@pytest.mark.parametrize("op", [op for op in Op if op not in (Op.OPEN, Op.ATTACH)])
@pytest.mark.asyncio
async def test_every_operation_can_fail(op: Op) -> None:
    key = make_keys(1)[0]
    async with opened(Fault(op=op, kind=FaultKind.FAIL)) as (faulty, _inner):
        calls = {
            Op.CONTAINS: lambda: faulty.contains([key]),
            Op.READ: lambda: faulty.read(key, aligned_buffer(FRAME_BYTES)),
            Op.WRITE: lambda: faulty.write(key, make_frame(key, PAYLOAD)),
            Op.DELETE: lambda: faulty.delete(key),
            Op.SCAN: lambda: anext(faulty.scan(make_namespace_id())),
            Op.ACLOSE: faulty.aclose,
        }
        with pytest.raises(BackendUnavailable):
            await calls[op]()
        assert faulty.injected == {FaultKind.FAIL: 1}


@pytest.mark.parametrize("op", [Op.OPEN, Op.ATTACH])
@pytest.mark.asyncio
async def test_getting_ready_can_fail(op: Op) -> None:
    with pytest.raises(BackendUnavailable):
        async with opened(Fault(op=op, kind=FaultKind.FAIL)):
            pass


@pytest.mark.asyncio
async def test_slow_is_slow_and_right() -> None:
    key = make_keys(1)[0]
    async with opened(Fault(op=Op.READ, kind=FaultKind.SLOW, delay_s=0.02)) as (faulty, _inner):
        await faulty.write(key, make_frame(key, PAYLOAD))
        into = aligned_buffer(FRAME_BYTES)
        before = asyncio.get_running_loop().time()
        assert await faulty.read(key, into) == FRAME_BYTES
        assert asyncio.get_running_loop().time() - before >= 0.019
        verify(into, key=key, num_tokens=1, part_bytes=(len(PAYLOAD),))


@pytest.mark.asyncio
async def test_truncate_read_delivers_half_and_clears_the_rest() -> None:
    key = make_keys(1)[0]
    async with opened(Fault(op=Op.READ, kind=FaultKind.TRUNCATE)) as (faulty, inner):
        frame = make_frame(key, PAYLOAD)
        await faulty.write(key, frame)
        into = aligned_buffer(FRAME_BYTES)
        assert await faulty.read(key, into) == FRAME_BYTES // 2
        assert into[: FRAME_BYTES // 2] == frame[: FRAME_BYTES // 2]
        assert not any(into[FRAME_BYTES // 2 :])
        assert inner.store.frames[key] == bytes(frame)


@pytest.mark.asyncio
async def test_truncate_write_stores_half() -> None:
    key = make_keys(1)[0]
    async with opened(Fault(op=Op.WRITE, kind=FaultKind.TRUNCATE)) as (faulty, inner):
        frame = make_frame(key, PAYLOAD)
        await faulty.write(key, frame)
        assert inner.store.frames[key] == bytes(frame[: FRAME_BYTES // 2])


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
@pytest.mark.asyncio
async def test_corrupt_flips_one_bit_that_the_checksums_see(op: Op) -> None:
    in_header = 0
    async with opened(Fault(op=op, kind=FaultKind.CORRUPT), seed=3) as (faulty, inner):
        for key in make_keys(24):
            frame = make_frame(key, PAYLOAD)
            original = bytes(frame)
            await faulty.write(key, frame)
            assert bytes(frame) == original, "the caller's frame is not ours to touch"
            into = aligned_buffer(FRAME_BYTES)
            assert await faulty.read(key, into) == FRAME_BYTES
            differing = [at for at in range(FRAME_BYTES) if into[at] != original[at]]
            assert len(differing) == 1
            assert (into[differing[0]] ^ original[differing[0]]).bit_count() == 1
            assert (inner.store.frames[key] == original) is (op is Op.READ)
            in_header += differing[0] < HEADER_BYTES
            with pytest.raises(ChunkCorrupt):
                verify(into, key=key, num_tokens=1, part_bytes=(len(PAYLOAD),))
    assert 0 < in_header < 24, "both header and payload are hit"


@pytest.mark.asyncio
async def test_lose_finds_nothing_and_stores_nothing() -> None:
    first, second = make_keys(2)
    async with opened() as (faulty, inner):
        await faulty.write(first, make_frame(first, PAYLOAD))
        faulty.plan = [Fault(op=op, kind=FaultKind.LOSE) for op in (Op.CONTAINS, Op.READ, Op.WRITE)]
        await faulty.write(second, make_frame(second, PAYLOAD))
        assert set(inner.store.frames) == {first}
        assert await faulty.contains([first, second]) == [False, False]
        assert await faulty.read(first, aligned_buffer(FRAME_BYTES)) is None
        assert faulty.injected == {FaultKind.LOSE: 3}


@pytest.mark.parametrize(
    ("op", "kind"),
    [(Op.DELETE, FaultKind.LOSE), (Op.CONTAINS, FaultKind.CORRUPT), (Op.SCAN, FaultKind.TRUNCATE)],
)
def test_a_fault_that_makes_no_sense_is_refused(op: Op, kind: FaultKind) -> None:
    with pytest.raises(ConfigurationError, match=f"{op} has nothing to {kind}"):
        Fault(op=op, kind=kind)


@pytest.mark.asyncio
async def test_probability_is_reproduced_by_the_seed() -> None:
    keys = make_keys(200)
    plan = Fault(op=Op.WRITE, kind=FaultKind.FAIL, probability=0.25)
    outcomes = []
    for seed in (1, 1, 2):
        async with opened(plan, seed=seed) as (faulty, _inner):
            outcomes.append(await write_all(faulty, keys))
            assert faulty.injected == {FaultKind.FAIL: len(outcomes[-1])}
    assert outcomes[0] == outcomes[1] != outcomes[2]
    assert 25 <= len(outcomes[0]) <= 75


@pytest.mark.asyncio
async def test_the_first_matching_fault_wins() -> None:
    key = make_keys(1)[0]
    plan = (
        Fault(op=Op.WRITE, kind=FaultKind.FAIL, calls=(1,)),
        Fault(op=Op.WRITE, kind=FaultKind.LOSE),
    )
    async with opened(*plan) as (faulty, _inner):
        await faulty.write(key, make_frame(key, PAYLOAD))
        with pytest.raises(BackendUnavailable):
            await faulty.write(key, make_frame(key, PAYLOAD))
        assert faulty.injected == {FaultKind.LOSE: 1, FaultKind.FAIL: 1}


@pytest.mark.parametrize(("stop", "visible"), [(Stop.BEFORE, False), (Stop.AFTER, True)])
@pytest.mark.asyncio
async def test_hold_stops_a_call_and_release_lets_it_go(stop: Stop, visible: bool) -> None:
    keys = make_keys(3)
    async with opened() as (faulty, inner):
        faulty.hold("write", stop)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(faulty.write(key, make_frame(key, PAYLOAD))) for key in keys]
            await faulty.reached("write", 3)
            assert (set(inner.store.frames) == set(keys)) is visible
            assert not any(task.done() for task in tasks)
            faulty.release()
        assert set(inner.store.frames) == set(keys)


@pytest.mark.asyncio
async def test_reached_counts_only_calls_that_stand_still_now() -> None:
    keys = make_keys(2)
    async with opened() as (faulty, _inner):
        faulty.hold(Op.WRITE)
        async with asyncio.TaskGroup() as group:
            group.create_task(faulty.write(keys[0], make_frame(keys[0], PAYLOAD)))
            await faulty.reached(Op.WRITE)
            faulty.release()
            faulty.hold(Op.WRITE)
            waiter = group.create_task(faulty.reached(Op.WRITE))
            await asyncio.sleep(0)
            assert not waiter.done()
            group.create_task(faulty.write(keys[1], make_frame(keys[1], PAYLOAD)))
            await waiter
            faulty.release()


@pytest.mark.asyncio
async def test_a_held_call_can_be_cancelled_and_no_longer_counts() -> None:
    key = make_keys(1)[0]
    async with opened() as (faulty, inner):
        faulty.hold(Op.WRITE)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(faulty.write(key, make_frame(key, PAYLOAD)))
            await faulty.reached(Op.WRITE)
            task.cancel()
        assert task.cancelled()
        assert inner.store.frames == {}
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await faulty.reached(Op.WRITE)


@pytest.mark.asyncio
async def test_hang_waits_for_release_and_never_waits_for_ever() -> None:
    key = make_keys(1)[0]
    plan = (
        Fault(op=Op.WRITE, kind=FaultKind.HANG),
        Fault(op=Op.READ, kind=FaultKind.NEVER),
    )
    async with opened(*plan) as (faulty, _inner), asyncio.TaskGroup() as group:
        write = group.create_task(faulty.write(key, make_frame(key, PAYLOAD)))
        await faulty.reached(Op.WRITE)
        read = group.create_task(faulty.read(key, aligned_buffer(FRAME_BYTES)))
        faulty.release()
        await write
        faulty.release()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not read.done()
        assert faulty.injected == {FaultKind.HANG: 1, FaultKind.NEVER: 1}
        read.cancel()
