"""Much of everything for long: exact bytes, and at the end the engine is as new."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import numpy as np
import pytest

from akvcache.testing import (
    Fault,
    FaultKind,
    FaultyBackend,
    MemoryBackend,
    Op,
    VirtualClock,
)
from tests.faults.kit import CHUNK, Rig, rig, until

pytestmark = pytest.mark.asyncio


async def test_no_session_ever_sees_another_ones_bytes() -> None:
    """CB-03: 6 sessions of 20 chunks go through a pool of 8 and a tier, interleaved, for 200 rounds."""
    rng = random.Random(3)
    async with rig([MemoryBackend()], num_slots=8) as r:
        lengths = dict.fromkeys(range(6), 0)
        for round_ in range(200):
            session = rng.randrange(6)
            lengths[session] = min(20, lengths[session] + rng.randrange(1, 6))
            other = rng.randrange(6)
            store = asyncio.create_task(r.store(f"session {session}", lengths[session], region=0))
            load = asyncio.create_task(r.retrieve(f"session {other}", max(1, lengths[other]), region=1))
            await asyncio.wait([store, load])
            assert store.result().stopped is None, round_
            load.result()
        for session, length in lengths.items():
            await r.engine.flush()
            assert (await r.retrieve(f"session {session}", length)).loaded_tokens == length * CHUNK
        await r.rest()


async def test_stored_bytes_do_not_alias_the_callers_memory() -> None:
    """CB-09: source and destination are the caller's again when the call has returned."""
    async with rig([MemoryBackend()]) as r:
        slots = r.fill("p", 4)
        await r.engine.store(r.tokens("p", 4), slots)
        r.blank(0)
        for _ in range(2):
            assert (await r.retrieve("p", 4)).loaded_tokens == 4 * CHUNK
            r.kv.write(1, np.zeros((r.kv.region_tokens, r.kv.token_bytes), dtype=np.uint8))
        await r.push_out()
        assert (await r.retrieve("p", 4)).loaded_tokens == 4 * CHUNK


async def test_the_fifth_reuse_is_as_good_as_the_first() -> None:
    """CB-10."""
    async with rig([MemoryBackend()]) as r:
        await r.store("p", 5)
        for turn in range(5):
            assert (await r.retrieve("p", 5)).loaded_tokens == 5 * CHUNK
            await r.store(f"between {turn}", 6)


async def test_a_lease_that_expires_while_slots_are_granted_serves_each_waiter_once() -> None:
    """RL-03: expiry is noticed in the middle of a grant and makes room for those who wait already."""
    clock = VirtualClock()
    async with rig(num_slots=4, clock=clock) as r:
        await r.store("p", 4)
        found = await r.engine.lookup(r.tokens("p", 4), lease_s=5)
        assert found.lease is not None
        assert found.lease.tokens == 4 * CHUNK
        waiting = [asyncio.create_task(r.host.pool.lease(1, timeout_s=5)) for _ in range(3)]
        await until(lambda: r.host.pool.num_waiters == 3)
        clock.advance(6)
        r.host.pool.serve()
        await asyncio.wait(waiting)
        granted = [lease for task in waiting if (lease := task.result()) is not None]
        assert len({slot.index for lease in granted for slot in lease.slots}) == 3
        for lease in granted:
            lease.release()
        await r.rest()


async def test_two_thousand_retrieves_end_where_they_began() -> None:
    """RL-02."""
    async with rig([MemoryBackend()], num_slots=8) as r:
        await r.store("p", 4)
        await r.store("q", 4)
        await r.engine.flush()
        await r.rest()
        for number in range(2000):
            await r.engine.retrieve(r.tokens("pq"[number % 2], 4), r.kv.slots(number % 4))
        await r.rest()
        assert (await r.retrieve("p", 4)).loaded_tokens == 4 * CHUNK


async def weather(rng: random.Random, backend: FaultyBackend) -> None:
    op = rng.choice((Op.CONTAINS, Op.READ, Op.WRITE, Op.DELETE))
    kinds = [FaultKind.FAIL, FaultKind.FAIL_AFTER, FaultKind.HANG, FaultKind.SLOW]
    if op in (Op.READ, Op.WRITE):
        kinds += [FaultKind.LOSE, FaultKind.TRUNCATE, FaultKind.CORRUPT]
    backend.release()
    backend.plan = (
        [Fault(op=op, kind=rng.choice(kinds), probability=0.3, retryable=rng.random() < 0.5, delay_s=0.001)]
        if rng.random() < 0.5
        else []
    )


async def churn(r: Rig, clock: VirtualClock, backends: Sequence[FaultyBackend], rng: random.Random, steps: int) -> None:
    """Random calls, faults and cancellations, three regions at once; every answer is checked byte for byte."""

    async def work(region: int, count: int) -> None:
        for _ in range(count):
            label, chunks = f"p{min(rng.randrange(12), rng.randrange(12))}", rng.randrange(1, 6)
            call = rng.choice((r.store, r.retrieve, r.retrieve))
            task = asyncio.create_task(call(label, chunks, region, rng.choice((None, 0.02))))
            if rng.random() < 0.2:
                for _ in range(rng.randrange(12)):
                    await asyncio.sleep(0)
                task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()
            if rng.random() < 0.02:
                await weather(rng, rng.choice(backends))
            if rng.random() < 0.02:
                clock.advance(10)
            if rng.random() < 0.05:
                await r.engine.lookup(r.tokens(label, chunks), lease_s=5)

    await asyncio.gather(*(work(region, steps // 4) for region in range(4)))


async def soak(seed: int, steps: int) -> None:
    print(f"seed {seed}")
    rng, clock = random.Random(seed), VirtualClock()
    backends = [
        FaultyBackend(MemoryBackend(capacity_bytes=20 * 8192, name="small"), seed=seed),
        FaultyBackend(MemoryBackend(capacity_bytes=200 * 8192, name="large"), seed=seed + 1),
    ]
    async with rig(
        backends, clock=clock, num_slots=16, memory_wait_s=0.02, io_timeout_s=0.02, lookup_deadline_s=0.02
    ) as r:
        for _ in range(10):
            await churn(r, clock, backends, rng, steps // 10)
            for backend in backends:
                backend.plan = []
                backend.release()
            clock.advance(400)
            await r.rest()
        # RL-04: in calm weather the hit rate of a working set below capacity is what it was in the beginning
        for number in range(3):
            await r.store(f"p{number}", 4)
            assert (await r.retrieve(f"p{number}", 4)).loaded_tokens == 4 * CHUNK
        await r.rest()


async def test_ten_thousand_random_calls_leave_the_engine_as_new() -> None:
    """RL-04, short."""
    await soak(seed=20_240_501, steps=10_000)


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_a_million_random_calls_leave_the_engine_as_new() -> None:
    await soak(seed=random.SystemRandom().randrange(1 << 32), steps=1_000_000)
