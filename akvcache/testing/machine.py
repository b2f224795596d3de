"""The whole engine against a model, for Hypothesis: any calls, in any order, half-way through one another, with faults.

::

    class MyMachine(EngineMachine):
        def make_backend(self, tier, capacity_bytes): ...   # the same storage each time it is asked for a tier
        def wipe_storage(self, tier): ...
        def stored_bytes(self, tier): ...

    def test_engine():
        run_state_machine_as_test(MyMachine, settings=settings(max_examples=50))  # from hypothesis.stateful

Everything visible must be right after every step, not only at the end. Timers cost no time (`JumpingLoop`), and each
step waits for the copy threads, so that a failing run can be repeated.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Final, TypeVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from typing_extensions import override

from akvcache.backend import Backend
from akvcache.frame import frame_bytes
from akvcache.host import HostLease
from akvcache.keys import CacheNamespace
from akvcache.results import LookupResult, PrefetchResult, StoreResult
from akvcache.testing.clock import VirtualClock
from akvcache.testing.device import CopyFault
from akvcache.testing.faulty import Fault, FaultKind, FaultyBackend, Op
from akvcache.testing.inspection import Inspected, open_inspected
from akvcache.testing.loop import JumpingLoop, threads_settle
from akvcache.testing.memory import MemoryBackend, MemoryStore
from akvcache.testing.model import (
    CHUNK,
    FAULTS,
    MAX_CHUNKS,
    PROMPTS,
    Chunk,
    EngineModel,
    ErrorLog,
    IdleRegions,
    InFlight,
    Prompt,
    small_config,
    store_while_frozen,
)
from akvcache.testing.regions import RegionKV
from akvcache.testing.stalling import StallingDevice

__all__ = ("EngineMachine",)

R = TypeVar("R")
MAX_OPS: Final = 6
LIMIT_S: Final = 300.0
COPY_THREADS: Final = 2
_HEADS: Final = st.sampled_from((0, 0, 0, 1, 3))
_WHICH: Final = st.integers(0, MAX_OPS - 1)


class EngineMachine(RuleBasedStateMachine):
    """A `CacheEngine` with a pool of a few slots over two small tiers; subclass it to bring your own backends."""

    NUM_SLOTS: Final = 8
    TIER_FRAMES: Final = (10, 24)

    def __init__(self) -> None:
        super().__init__()
        self.loop = JumpingLoop()
        self.errors: list[str] = []
        self.loop.set_exception_handler(lambda _loop, context: self.errors.append(str(context)))
        self._log = ErrorLog(self.errors)
        logging.getLogger("akvcache").addHandler(self._log)
        self.kv = RegionKV(num_regions=4, region_tokens=(MAX_CHUNKS + 1) * CHUNK)
        self.frame_bytes = frame_bytes(self.kv.token_bytes * CHUNK)
        self.model = EngineModel(self.kv)
        self.clock = VirtualClock()
        self.stores = [MemoryStore() for _ in self.TIER_FRAMES]
        self.leases: list[HostLease] = []
        self.ops: list[InFlight] = []
        self.idle = IdleRegions(self.kv)
        self.serial = 10
        self.calm = True
        self._open()

    @initialize(calm=st.sampled_from((True, False, False)))
    def choose_weather(self, calm: bool) -> None:  # noqa: FBT001 - drawn by Hypothesis
        """Decide whether anything will fail in this run."""
        self.calm = calm

    def make_backend(self, tier: int, capacity_bytes: int) -> Backend:
        """Return an unopened backend over the storage of tier number `tier`; asked again after each restart."""
        return MemoryBackend(self.stores[tier], capacity_bytes=capacity_bytes, name=f"tier{tier}")

    def wipe_storage(self, tier: int) -> None:
        """Empty the storage of a closed backend: what an operator does when `clear` could not."""
        self.stores[tier] = MemoryStore()

    def stored_bytes(self, tier: int) -> int:
        """Return how many bytes the storage holds now."""
        return self.stores[tier].stored_bytes

    # -- calls ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.idle and len(self.ops) < MAX_OPS)
    @rule(prompt=PROMPTS, head=_HEADS)
    def start_store(self, prompt: Prompt, head: int) -> None:
        """Begin a store; its source is overwritten as soon as it has ended."""
        chunks, head, region = self._chunks(prompt), min(head, len(prompt.path)), self.idle.take()
        self.kv.write(region, self.model.rows(chunks))
        self.model.offer(chunks[head:])
        slots, mask = self.kv.slots(region), prompt.mask(head)
        call = self.engine.store(prompt.tokens, slots, scope=prompt.scope, mask=mask)
        self._start(call, self.model.store_check(prompt, head), region)

    @precondition(lambda self: self.idle and len(self.ops) < MAX_OPS)
    @rule(prompt=PROMPTS, head=_HEADS)
    def start_retrieve(self, prompt: Prompt, head: int) -> None:
        """Begin a retrieve into a region of noise."""
        chunks, head, region = self._chunks(prompt), min(head, len(prompt.path)), self.idle.take()
        slots, mask = self.kv.slots(region), prompt.mask(head)
        call = self.engine.retrieve(prompt.tokens, slots, scope=prompt.scope, mask=mask)
        self._start(call, self.model.loaded_check(prompt, chunks, region, head), region)

    @precondition(lambda self: len(self.ops) < MAX_OPS)
    @rule(prompt=PROMPTS, lease_s=st.sampled_from((None, 5.0, 60.0)))
    def start_lookup(self, prompt: Prompt, lease_s: float | None) -> None:
        """Begin a lookup; keep its lease."""
        promised = self.model.hit_check(self._chunks(prompt))

        def check(found: LookupResult) -> None:
            promised(found.hit_tokens)
            assert sum(found.by_tier.values()) == found.hit_tokens, found
            if found.lease is not None:
                assert found.lease.tokens <= found.hit_tokens, found
                self.leases.append(found.lease)

        self._start(self.engine.lookup(prompt.tokens, scope=prompt.scope, lease_s=lease_s), check, None)

    @precondition(lambda self: len(self.ops) < MAX_OPS)
    @rule(prompt=PROMPTS)
    def start_prefetch(self, prompt: Prompt) -> None:
        """Begin a prefetch."""
        promised = self.model.hit_check(self._chunks(prompt))

        def check(ready: PrefetchResult) -> None:
            promised(ready.hit_tokens)
            assert ready.ready_tokens <= ready.hit_tokens, ready

        self._start(self.engine.prefetch(prompt.tokens, scope=prompt.scope), check, None)

    @precondition(lambda self: self.idle and len(self.ops) < MAX_OPS)
    @rule(prompt=PROMPTS)
    def store(self, prompt: Prompt) -> None:
        """Store, start to end; in calm weather what it says it kept is found."""
        alone = not self.ops
        self.start_store(prompt, 0)
        task = self.ops[-1].task
        self._finish(self.ops[-1])
        kept = task.result()
        if self.calm and alone and isinstance(kept, StoreResult):
            found = self._do(self.engine.lookup(prompt.tokens, scope=prompt.scope))
            assert found.hit_tokens >= kept.stored_tokens, (kept, found)

    @precondition(lambda self: self.idle and len(self.ops) < MAX_OPS)
    @rule(prompt=PROMPTS)
    def retrieve(self, prompt: Prompt) -> None:
        """Retrieve, start to end."""
        self.start_retrieve(prompt, 0)
        self._finish(self.ops[-1])

    @precondition(lambda self: self.ops)
    @rule(which=_WHICH)
    def finish(self, which: int) -> None:
        """Let one call end."""
        self._finish(self.ops[which % len(self.ops)])

    @precondition(lambda self: self.ops)
    @rule(which=_WHICH, times=st.integers(1, 2), wait=st.booleans())
    def cancel(self, which: int, times: int, wait: bool) -> None:  # noqa: FBT001 - drawn by Hypothesis
        """Cancel one call, perhaps twice, perhaps without waiting for its end."""
        op = self.ops[which % len(self.ops)]
        op.cancelled = True
        for _ in range(times):
            op.task.cancel()
            self.loop.step()
        if wait:
            self._finish(op)

    @rule(steps=st.integers(1, 15))
    def step(self, steps: int) -> None:
        """Let everything go on a little."""
        for _ in range(steps):
            self.loop.step()

    @precondition(lambda self: self.idle)
    @rule(chunks=st.integers(2, MAX_CHUNKS))
    def press(self, chunks: int) -> None:
        """Store a prompt that nobody asks for again, to push others out."""
        self.serial += 1
        self.start_store(Prompt("", (self.serial,) * chunks), 0)
        self._finish(self.ops[-1])

    @precondition(lambda self: self.calm and self.idle and not self.ops)
    @rule(prompt=PROMPTS)
    def promise_and_keep(self, prompt: Prompt) -> None:
        """In calm weather, a lease is kept whatever is stored in between."""
        chunks = self._chunks(prompt)
        found = self._do(self.engine.lookup(prompt.tokens, scope=prompt.scope, lease_s=60.0))
        assert found.lease is not None or not prompt.path
        if found.lease is not None:
            self.leases.append(found.lease)
            self.press(MAX_CHUNKS)
            region = self.idle.take()
            check = self.model.loaded_check(prompt, chunks, region, 0)
            call = self.engine.retrieve(prompt.tokens, self.kv.slots(region), scope=prompt.scope, lease=found.lease)
            loaded = self._do(call)
            check(loaded)
            self.idle.lay(region)
            assert loaded.loaded_tokens >= found.lease.tokens, (found, loaded)

    # -- everything else that happens to an engine -----------------------------------------------------------------

    @precondition(lambda self: self.leases)
    @rule(which=_WHICH, times=st.integers(1, 2))
    def release(self, which: int, times: int) -> None:
        """Give a lease back, perhaps twice."""
        for _ in range(times):
            self.leases[which % len(self.leases)].release()

    @rule(seconds=st.sampled_from((1.0, 6.0, 61.0)))
    def advance(self, seconds: float) -> None:
        """Let leases expire and breakers close."""
        self.clock.advance(seconds)

    @rule(
        what=st.sampled_from(("clear", "weights", "freeze", "rest", "restart")), version=st.sampled_from(("v1", "v2"))
    )
    def change(self, what: str, version: str) -> None:
        """Do something to the whole cache."""
        if what == "clear":
            self._do(self.engine.clear(timeout_s=5.0))
            self.model.generations[self.model.version] += 1
            assert not any(lease.live for lease in self.leases)
        elif what == "weights":
            self._do(self.engine.set_weights_version(version))
            self.model.version = version
        elif what == "freeze":
            self._do(store_while_frozen(self.engine, self.kv.slots(0)))
        elif what == "rest":
            self._rest()
        else:
            self._restart()

    @precondition(lambda self: not self.calm)
    @rule(tier=st.integers(0, 1), fault=FAULTS, count=st.integers(1, 6), retryable=st.booleans())
    def break_tier(self, tier: int, fault: tuple[Op, FaultKind], count: int, retryable: bool) -> None:  # noqa: FBT001
        """Let the next few calls of one operation go wrong."""
        backend, (op, kind) = self.backends[tier], fault
        calls = range(backend.calls[op], backend.calls[op] + count)
        backend.plan = [*backend.plan[-3:], Fault(op=op, kind=kind, calls=calls, retryable=retryable)]

    @precondition(lambda self: not self.calm)
    @rule()
    def heal(self) -> None:
        """End all faults of the tiers; what hung goes on."""
        for backend in self.backends:
            backend.plan = []
            backend.release()

    @precondition(lambda self: not self.calm)
    @rule(fault=st.sampled_from((CopyFault.RAISE, CopyFault.BREAK)))
    def break_copy(self, fault: CopyFault) -> None:
        """Let the next device copy fail."""
        self.device.fail_next(fault)

    @rule()
    def stall_device(self) -> None:
        """From now on copies wait until a call has to end."""
        self.device.stall()

    # -- what must hold after every step ---------------------------------------------------------------------------

    @invariant()
    def everything_visible_is_right(self) -> None:
        """Visible means complete, and the bytes of exactly this key, none from before a clear."""
        context = self.inspected.context
        for key, chunk in self.model.chunks.items():
            entry = context.host.resident(key)
            if entry is not None:
                payload = bytes(context.payload(entry))
                assert self.model.is_current(key, payload), f"{entry} of {chunk} holds {self.model.whose(payload)}"

    @invariant()
    def no_call_touches_memory_after_its_end(self) -> None:
        """Memory of no call in flight is as its last user left it."""
        assert not self.idle.touched(), f"regions {self.idle.touched()} were written after their calls had ended"

    @invariant()
    def counts_are_sound(self) -> None:
        """Caps hold, slots and leases are counted right, nothing failed unseen."""
        host = self.inspected.context.host
        assert host.pool.num_free + len(host.index) + host.index.num_leaving <= host.pool.num_slots
        for tier, frames in enumerate(self.TIER_FRAMES):
            assert self.stored_bytes(tier) <= frames * self.frame_bytes
        self._collect_leases()
        results = [op.task.result() for op in self.ops if op.task.done() and not op.task.cancelled()]
        uncollected = [found.lease for found in results if isinstance(found, LookupResult) and found.lease]
        assert host.num_leases == len(self.leases) + sum(not lease.released for lease in uncollected)
        assert not self.errors, self.errors

    @override
    def teardown(self) -> None:
        """Come to rest and close."""
        try:
            self._rest()
            self._close()
            assert not self.errors, self.errors
        finally:
            logging.getLogger("akvcache").removeHandler(self._log)
            self.loop.close()

    # -- machinery -------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self.device = StallingDevice(self.kv.connector)
        backends = [self.make_backend(i, frames * self.frame_bytes) for i, frames in enumerate(self.TIER_FRAMES)]
        self.backends = [FaultyBackend(backend, seed=i) for i, backend in enumerate(backends)]
        self.stack = AsyncExitStack()
        opening = open_inspected(
            small_config(self.frame_bytes, self.NUM_SLOTS, COPY_THREADS),
            connector=self.device,
            tiers=self.backends,
            namespace=CacheNamespace(model="machine", weights_version=self.model.version),
            clock=self.clock,
        )
        self.inspected: Inspected[torch.Tensor] = self._do(self.stack.enter_async_context(opening))
        self.engine = self.inspected.engine
        self.loop.jump(lambda: threads_settle(self.inspected.context.executor, COPY_THREADS))

    def _close(self) -> None:
        self.loop.stay()
        self._do(self.stack.aclose())

    def _rest(self) -> None:
        """Let everything end: nothing may be left over."""
        for backend in self.backends:
            backend.plan = []
            backend.release()
        for op in list(self.ops):
            self._finish(op)
        self._collect_leases()
        self._do(self.inspected.rest(leases=len(self.leases)))

    def _restart(self) -> None:
        """Close and open on the same storage."""
        self._rest()
        tiers = enumerate(self.inspected.context.tiers)
        failed = [number for number, tier in tiers if tier.inactive is not None or tier.num_doomed]
        self._close()
        for number in failed:
            self.wipe_storage(number)
        self.leases.clear()
        self._open()

    def _do(self, call: Coroutine[object, object, R]) -> R:
        """Run a call to its end."""
        self.device.run()
        return self.loop.run_until_complete(asyncio.wait_for(call, LIMIT_S))

    def _start(self, call: Coroutine[object, object, R], check: Callable[[R], None], region: int | None) -> None:
        task = self.loop.create_task(call)
        self.ops.append(InFlight(task=task, check=lambda: check(task.result()), region=region))
        self.loop.step()  # it has begun before anything else happens

    def _finish(self, op: InFlight) -> None:
        self._do(asyncio.wait([op.task], timeout=LIMIT_S))
        assert op.task.done(), f"{op.task} hangs"
        self.ops.remove(op)
        if op.task.cancelled():
            assert op.cancelled, "cancelled, but not by us"
        else:
            op.check()
        if op.region is not None:
            self.idle.lay(op.region)

    def _chunks(self, prompt: Prompt) -> list[Chunk]:
        return self.model.chunks_of(prompt, self.inspected.context.schema)

    def _collect_leases(self) -> None:
        self.inspected.context.host.expire()
        self.leases = [lease for lease in self.leases if not lease.released]
