"""The whole engine against a model, for Hypothesis: any calls, in any order, half-way through one another, with faults.

::

    from hypothesis import settings
    from hypothesis.stateful import run_state_machine_as_test
    from akvcache.testing import EngineMachine

    class MyMachine(EngineMachine):
        def make_backend(self, tier, capacity_bytes): ...   # the same storage each time it is asked for a tier

    def test_engine():
        run_state_machine_as_test(MyMachine, settings=settings(max_examples=50))

A chunk's bytes follow from its key and from how often its namespace was cleared, so bytes of another key and bytes
from before a `clear` are both seen. After every step, not only at the end, everything visible must be right.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from typing_extensions import override

from akvcache.backend import Backend
from akvcache.config import EngineConfig
from akvcache.connector import PagedConnector, Span
from akvcache.frame import frame_bytes
from akvcache.host import HostLease
from akvcache.keys import CacheNamespace, ChunkKey, RequestScope
from akvcache.layout import KVLayout
from akvcache.results import LookupResult, PrefetchResult, RetrieveResult, StopReason, StoreResult
from akvcache.testing.clock import VirtualClock
from akvcache.testing.device import CopyFault, FakeDevice, FakeDeviceConnector, FakeEvent, Stepping
from akvcache.testing.faulty import Fault, FaultKind, FaultyBackend, Op
from akvcache.testing.inspection import Inspected, open_inspected
from akvcache.testing.loop import JumpingLoop
from akvcache.testing.memory import MemoryBackend, MemoryStore
from akvcache.testing.regions import RegionKV, make_rows
from akvcache.tokens import canonical_tokens

__all__ = ("EngineMachine",)

R = TypeVar("R")
CHUNK: Final = 8
MAX_CHUNKS: Final = 6
MAX_OPS: Final = 6
LIMIT_S: Final = 300.0
COPY_THREADS: Final = 2
EVENTS_SEEN_S: Final = 0.02
_FAULTS: Final = st.one_of(
    st.tuples(
        st.sampled_from((Op.CONTAINS, Op.READ, Op.WRITE, Op.DELETE, Op.SCAN, Op.ATTACH)),
        st.sampled_from((FaultKind.FAIL, FaultKind.FAIL_AFTER, FaultKind.HANG, FaultKind.SLOW)),
    ),
    st.tuples(
        st.sampled_from((Op.READ, Op.WRITE)),
        st.sampled_from((FaultKind.LOSE, FaultKind.TRUNCATE, FaultKind.CORRUPT)),
    ),
)
_rows = functools.cache(make_rows)


class _Prompt(NamedTuple):
    salt: str
    path: tuple[int, ...]
    tail: int = 0

    @property
    def tokens(self) -> list[int]:
        return [100 * chunk + at for chunk in self.path for at in range(CHUNK)] + [99] * self.tail

    @property
    def scope(self) -> RequestScope:
        return RequestScope(salt=self.salt or None)


_PATHS: Final = ((1,), (1, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2, 1, 1), (1, 1, 1, 2, 2), (2, 1, 1, 1, 1, 1))
_PROMPTS: Final = st.builds(
    _Prompt,
    st.sampled_from(("", "", "", "salted")),
    st.sampled_from((*_PATHS, *_PATHS, ())),
    st.sampled_from((0, 3)),
)


class _Chunk(NamedTuple):
    """What a key stands for; `path` ends with the chunk itself."""

    version: str
    salt: str
    path: tuple[int, ...]

    def rows(self, generation: int, token_bytes: int) -> np.ndarray:
        return _rows(f"{self}/{generation}", CHUNK, token_bytes)


@dataclass(slots=True, kw_only=True)
class _Op:
    """A call in flight."""

    task: asyncio.Task[object]
    check: Callable[[], None]
    region: int | None
    cancelled: bool = False


class EngineMachine(RuleBasedStateMachine):
    """A `CacheEngine` with a pool of a few slots over two small tiers; subclass to bring your own backends."""

    NUM_SLOTS: Final = 8
    TIER_FRAMES: Final = (10, 24)

    def __init__(self) -> None:
        super().__init__()
        self.loop = JumpingLoop()
        self.errors: list[str] = []
        self.loop.set_exception_handler(lambda _loop, context: self.errors.append(str(context)))
        self._log = _ErrorLog(self.errors)
        logging.getLogger("akvcache").addHandler(self._log)
        self.kv = RegionKV(num_regions=4, region_tokens=(MAX_CHUNKS + 1) * CHUNK)
        self.frame_bytes = frame_bytes(self.kv.token_bytes * CHUNK)
        self.clock = VirtualClock()
        self.stores = [MemoryStore() for _ in self.TIER_FRAMES]
        self.version, self.generations = "v1", {"v1": 0, "v2": 0}
        self.offered: set[tuple[_Chunk, int]] = set()
        self.chunks: dict[ChunkKey, _Chunk] = {}
        self.leases: list[HostLease] = []
        self.ops: list[_Op] = []
        self.idle: dict[int, np.ndarray] = {}
        self.serial = 10
        self.calm = True
        for region in range(self.kv.num_regions):
            self._lay_idle(region)
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
    @rule(prompt=_PROMPTS, head=st.sampled_from((0, 0, 0, 1, 3)))
    def start_store(self, prompt: _Prompt, head: int) -> None:
        """Begin a store; its source is overwritten as soon as it has ended."""
        chunks, generation = self._chunks(prompt), self._generation
        region, head = self._take_region(), min(head, len(chunks))
        if chunks:
            self.kv.write(region, np.concatenate([self._expected(chunk) for chunk in chunks]))
        self.offered.update((chunk, generation) for chunk in chunks[head:])
        mask = _mask(prompt, head)
        call = self.engine.store(prompt.tokens, self.kv.slots(region), scope=prompt.scope, mask=mask)

        def check(kept: StoreResult) -> None:
            whole = len(chunks) * CHUNK
            assert kept.total_tokens == len(prompt.tokens), kept
            assert 0 <= kept.stored_tokens <= whole, kept
            assert kept.stored_tokens % CHUNK == 0, kept
            assert min(kept.new_tokens, kept.existing_tokens) >= 0, kept
            assert kept.new_tokens + kept.existing_tokens <= whole - head * CHUNK, kept
            assert kept.stopped is not None or kept.new_tokens + kept.existing_tokens == whole - head * CHUNK, kept

        self._start(call, check, region)

    @precondition(lambda self: self.idle and len(self.ops) < MAX_OPS)
    @rule(prompt=_PROMPTS, head=st.sampled_from((0, 0, 0, 1, 3)))
    def start_retrieve(self, prompt: _Prompt, head: int) -> None:
        """Begin a retrieve into a region of noise."""
        head = min(head, len(prompt.path))
        region = self._take_region()
        call = self.engine.retrieve(prompt.tokens, self.kv.slots(region), scope=prompt.scope, mask=_mask(prompt, head))
        self._start(call, self._loaded_check(prompt, region, head), region)

    @precondition(lambda self: len(self.ops) < MAX_OPS)
    @rule(prompt=_PROMPTS, lease_s=st.sampled_from((None, 5.0, 60.0)))
    def start_lookup(self, prompt: _Prompt, lease_s: float | None) -> None:
        """Begin a lookup; keep its lease."""
        promised = self._hit_check(prompt)

        def check(found: LookupResult) -> None:
            promised(found.hit_tokens)
            assert sum(found.by_tier.values()) == found.hit_tokens, found
            if found.lease is not None:
                assert found.lease.tokens <= found.hit_tokens, found
                self.leases.append(found.lease)

        self._start(self.engine.lookup(prompt.tokens, scope=prompt.scope, lease_s=lease_s), check, None)

    @precondition(lambda self: len(self.ops) < MAX_OPS)
    @rule(prompt=_PROMPTS)
    def start_prefetch(self, prompt: _Prompt) -> None:
        """Begin a prefetch."""
        promised = self._hit_check(prompt)

        def check(ready: PrefetchResult) -> None:
            promised(ready.hit_tokens)
            assert ready.ready_tokens <= ready.hit_tokens, ready

        self._start(self.engine.prefetch(prompt.tokens, scope=prompt.scope), check, None)

    @precondition(lambda self: self.idle and len(self.ops) < MAX_OPS)
    @rule(prompt=_PROMPTS)
    def store(self, prompt: _Prompt) -> None:
        """Store, start to end."""
        self.start_store(prompt, 0)
        self._finish(self.ops[-1])

    @precondition(lambda self: self.idle and len(self.ops) < MAX_OPS)
    @rule(prompt=_PROMPTS)
    def retrieve(self, prompt: _Prompt) -> None:
        """Retrieve, start to end."""
        self.start_retrieve(prompt, 0)
        self._finish(self.ops[-1])

    @precondition(lambda self: self.ops)
    @rule(which=st.integers(0, MAX_OPS - 1))
    def finish(self, which: int) -> None:
        """Let one call end."""
        self._finish(self.ops[which % len(self.ops)])

    @precondition(lambda self: self.ops)
    @rule(which=st.integers(0, MAX_OPS - 1), times=st.integers(1, 2), wait=st.booleans())
    def cancel(self, which: int, times: int, wait: bool) -> None:  # noqa: FBT001 - drawn by Hypothesis
        """Cancel one call, perhaps twice, perhaps without waiting for its end."""
        op = self.ops[which % len(self.ops)]
        for _ in range(times):
            op.cancelled = True
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
        self.start_store(_Prompt("", (self.serial,) * chunks), 0)
        self._finish(self.ops[-1])

    @precondition(lambda self: self.calm and self.idle and not self.ops)
    @rule(prompt=_PROMPTS)
    def promise_and_keep(self, prompt: _Prompt) -> None:
        """In calm weather, a lease is kept whatever is stored in between."""
        found = self._do(self.engine.lookup(prompt.tokens, scope=prompt.scope, lease_s=60.0))
        assert found.lease is not None or not prompt.path
        if found.lease is not None:
            self.leases.append(found.lease)
            self.press(MAX_CHUNKS)
            region = self._take_region()
            call = self.engine.retrieve(prompt.tokens, self.kv.slots(region), scope=prompt.scope, lease=found.lease)
            loaded = self._do(call)
            self._loaded_check(prompt, region, 0)(loaded)
            self._lay_idle(region)
            assert loaded.loaded_tokens >= found.lease.tokens, (found, loaded)

    # -- everything else that happens to an engine -----------------------------------------------------------------

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 9), times=st.integers(1, 2))
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
            self.clear()
        elif what == "weights":
            self._do(self.engine.set_weights_version(version))
            self.version = version
        elif what == "freeze":
            self._do(self._frozen_store())
        elif what == "rest":
            self.rest()
        else:
            self.restart()

    def clear(self) -> None:
        """Forget everything; stores of the same keys have other bytes from now on."""
        self._do(self.engine.clear(timeout_s=5.0))
        self.generations[self.version] += 1
        assert not any(lease.live for lease in self.leases)

    async def _frozen_store(self) -> None:
        self.engine.freeze(True)  # noqa: FBT003
        kept = await self.engine.store([1] * CHUNK, self.kv.slots(0))
        assert (kept.stopped, kept.new_tokens) == (StopReason.FROZEN, 0), kept
        self.engine.freeze(False)  # noqa: FBT003

    @precondition(lambda self: not self.calm)
    @rule(tier=st.integers(0, 1), fault=_FAULTS, count=st.integers(1, 6), retryable=st.booleans())
    def break_tier(self, tier: int, fault: tuple[Op, FaultKind], count: int, retryable: bool) -> None:  # noqa: FBT001
        """Let the next few calls of one operation go wrong."""
        backend, (op, kind) = self.backends[tier], fault
        first = backend.calls[op]
        calls = range(first, first + count)
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

    def rest(self) -> None:
        """Let everything end: nothing may be left over."""
        self.heal()
        for op in list(self.ops):
            self._finish(op)
        self._collect_leases()
        self._do(self.inspected.rest(leases=len(self.leases)))

    def restart(self) -> None:
        """Close and open on the same storage."""
        self.rest()
        tiers = enumerate(self.inspected.context.tiers)
        failed = [number for number, tier in tiers if tier.inactive is not None or tier.num_doomed]
        self._close()
        for number in failed:
            self.wipe_storage(number)
        self.leases.clear()
        self._open()

    # -- what must hold after every step ---------------------------------------------------------------------------

    @invariant()
    def everything_visible_is_right(self) -> None:
        """Visible means complete, and the bytes of exactly this key, none from before a clear."""
        context = self.inspected.context
        for key, chunk in self.chunks.items():
            entry = context.host.resident(key)
            if entry is not None:
                held = self._whose(bytes(context.payload(entry)))
                assert (chunk, self.generations[chunk.version]) in held, f"{entry} of {chunk} holds {held}"

    @invariant()
    def no_call_touches_memory_after_its_end(self) -> None:
        """Memory of no call in flight is as its last user left it."""
        for region, rows in self.idle.items():
            assert np.array_equal(self.kv.read(region), rows), f"region {region} was written after the call had ended"

    @invariant()
    def counts_are_sound(self) -> None:
        """Caps hold, slots and leases are counted right, nothing failed unseen."""
        host = self.inspected.context.host
        assert host.pool.num_free + len(host.index) + host.index.num_leaving <= host.pool.num_slots
        for number, frames in enumerate(self.TIER_FRAMES):
            assert self.stored_bytes(number) <= frames * self.frame_bytes
        self._collect_leases()
        results = [op.task.result() for op in self.ops if op.task.done() and not op.task.cancelled()]
        uncollected = [found.lease for found in results if isinstance(found, LookupResult) and found.lease]
        assert host.num_leases == len(self.leases) + sum(not lease.released for lease in uncollected)
        assert not self.errors, self.errors

    @override
    def teardown(self) -> None:
        """Come to rest and close."""
        try:
            self.rest()
            self._close()
            assert not self.errors, self.errors
        finally:
            logging.getLogger("akvcache").removeHandler(self._log)
            self.loop.close()

    # -- machinery -------------------------------------------------------------------------------------------------

    @property
    def _generation(self) -> int:
        return self.generations[self.version]

    def _open(self) -> None:
        self.device = _Device(self.kv.connector)
        backends = [self.make_backend(i, frames * self.frame_bytes) for i, frames in enumerate(self.TIER_FRAMES)]
        self.backends = [FaultyBackend(backend, seed=i) for i, backend in enumerate(backends)]
        config = EngineConfig(
            chunk_tokens=CHUNK,
            host_bytes=self.NUM_SLOTS * self.frame_bytes,
            wave_bytes=2 * self.frame_bytes,
            window_bytes=4 * self.frame_bytes,
            copy_threads=COPY_THREADS,
            prefault=False,
            strict=True,
        )
        self.stack = AsyncExitStack()
        opening = open_inspected(
            config,
            connector=self.device,
            tiers=self.backends,
            namespace=CacheNamespace(model="machine", weights_version=self.version),
            clock=self.clock,
        )
        self.inspected: Inspected[torch.Tensor] = self._do(self.stack.enter_async_context(opening))
        self.engine = self.inspected.engine
        self.loop.jump(self._threads_settle)

    def _close(self) -> None:
        self.loop.stay()
        self._do(self.stack.aclose())

    def _threads_settle(self) -> None:
        """Wait until no copy thread is about to report to the loop."""
        together = threading.Barrier(COPY_THREADS + 1)
        for _ in range(COPY_THREADS):
            self.inspected.context.executor.submit(together.wait)
        together.wait()

    def _do(self, call: Coroutine[object, object, R]) -> R:
        """Run a call to its end."""
        self.device.run()
        return self.loop.run_until_complete(asyncio.wait_for(call, LIMIT_S))

    def _start(self, call: Coroutine[object, object, R], check: Callable[[R], None], region: int | None) -> None:
        task = self.loop.create_task(call)
        self.ops.append(_Op(task=task, check=lambda: check(task.result()), region=region))
        self.loop.step()  # it has begun before anything else happens

    def _finish(self, op: _Op) -> None:
        self._do(asyncio.wait([op.task], timeout=LIMIT_S))
        assert op.task.done(), f"{op.task} hangs"
        self.ops.remove(op)
        if op.task.cancelled():
            assert op.cancelled, "cancelled, but not by us"
        else:
            op.check()
        if op.region is not None:
            self._lay_idle(op.region)

    def _take_region(self) -> int:
        return self.idle.popitem()[0]

    def _lay_idle(self, region: int) -> None:
        """Fill a region with noise that must stay."""
        self.serial += 1
        self.kv.write(region, _noise(self.serial, self.kv.region_tokens, self.kv.token_bytes))
        self.idle[region] = self.kv.read(region)

    def _chunks(self, prompt: _Prompt) -> list[_Chunk]:
        chunks = [_Chunk(self.version, prompt.salt, prompt.path[: depth + 1]) for depth in range(len(prompt.path))]
        run = self.inspected.context.schema.run(canonical_tokens(prompt.tokens), prompt.scope)
        self.chunks.update(zip(run.keys, chunks, strict=True))
        return chunks

    def _expected(self, chunk: _Chunk) -> np.ndarray:
        return chunk.rows(self.generations[chunk.version], self.kv.token_bytes)

    def _whose(self, payload: bytes) -> list[tuple[_Chunk, int]]:
        """Return which chunks, and of which generation, have these bytes."""
        known = [(chunk, past) for chunk in self.chunks.values() for past in range(self.generations[chunk.version] + 1)]
        return [(c, past) for c, past in known if self.kv.payload(c.rows(past, self.kv.token_bytes)) == payload]

    def _hit_check(self, prompt: _Prompt, head: int = 0) -> Callable[[int], None]:
        """Return a check that an answer promises no more than was ever handed over since the last clear."""
        chunks, began = self._chunks(prompt)[head:], self._generation

        def check(hit_tokens: int) -> None:
            ended = self.generations[chunks[0].version] if chunks else began
            hits = [
                next((i for i, chunk in enumerate(chunks) if (chunk, generation) not in self.offered), len(chunks))
                for generation in range(began, ended + 1)
            ]
            assert hit_tokens % CHUNK == 0
            assert hit_tokens <= max(hits) * CHUNK, f"promises {hit_tokens} tokens of {prompt}"

        return check

    def _loaded_check(self, prompt: _Prompt, region: int, head: int) -> Callable[[RetrieveResult], None]:
        """Return a check that a retrieve brought the right bytes, all of one generation, and wrote nothing else."""
        chunks, began, before = self._chunks(prompt), self._generation, self.kv.read(region)
        promised = self._hit_check(prompt, head)

        def check(loaded: RetrieveResult) -> None:
            promised(loaded.hit_tokens)
            start, stop = head * CHUNK, head * CHUNK + loaded.loaded_tokens
            mask = [start <= at < stop for at in range(len(prompt.tokens))]
            assert torch.equal(loaded.mask, torch.tensor(mask, dtype=torch.bool)), loaded
            assert loaded.loaded_tokens <= loaded.hit_tokens, loaded
            assert sum(loaded.by_tier.values()) == loaded.loaded_tokens, loaded
            after = self.kv.read(region)
            assert np.array_equal(after[:start], before[:start]), "rows in front of the mask were written"
            assert np.array_equal(after[stop:], before[stop:]), "rows behind the mask were written"
            brought = chunks[head : stop // CHUNK]
            ended = self.generations[chunks[0].version] if chunks else began
            fits = [
                all(
                    np.array_equal(part, chunk.rows(generation, self.kv.token_bytes))
                    for part, chunk in zip(
                        after[start:stop].reshape(-1, CHUNK, self.kv.token_bytes), brought, strict=True
                    )
                )
                for generation in range(began, ended + 1)
            ]
            assert any(fits), f"wrong bytes for {prompt}"

        return check

    def _collect_leases(self) -> None:
        self.inspected.context.host.expire()
        self.leases = [lease for lease in self.leases if not lease.released]


class _SeenEvent:
    """Knows whether the engine has seen that it is over."""

    def __init__(self, event: FakeEvent) -> None:
        self._event = event
        self.seen = False

    def query(self) -> bool:
        done = False
        try:
            done = self._event.query()
        except RuntimeError:
            done = True
            raise
        finally:
            self.seen = self.seen or done
        return done


class _Device:
    """A fake device behind `KVConnector` that can wait until the engine has seen everything it did."""

    def __init__(self, inner: PagedConnector) -> None:
        self.device = FakeDevice()
        self._copies = FakeDeviceConnector(inner, self.device)
        self._stalled: list[_SeenEvent] = []

    @property
    def layout(self) -> KVLayout:
        return self._copies.layout

    def check(self, kv: torch.Tensor, num_tokens: int) -> None:
        self._copies.check(kv, num_tokens)

    def gather(self, kv: torch.Tensor, spans: Sequence[Span], out: Sequence[memoryview]) -> _SeenEvent | None:
        return self._enqueued(self._copies.gather(kv, spans, out))

    def scatter(self, kv: torch.Tensor, spans: Sequence[Span], src: Sequence[memoryview]) -> _SeenEvent | None:
        return self._enqueued(self._copies.scatter(kv, spans, src))

    def _enqueued(self, event: FakeEvent) -> _SeenEvent | None:
        if event.query():
            return None
        self._stalled.append(_SeenEvent(event))
        return self._stalled[-1]

    def fail_next(self, fault: CopyFault) -> None:
        self._copies.fail_next(fault)

    def stall(self) -> None:
        self.device.stepping = Stepping.MANUAL

    def run(self) -> None:
        """Run what was stalled; the engine learns of it before this returns."""
        self.device.stepping = Stepping.AUTO
        self.device.run()
        end = time.monotonic() + EVENTS_SEEN_S
        while not all(event.seen for event in self._stalled) and time.monotonic() < end:
            time.sleep(0.0001)
        self._stalled = [event for event in self._stalled if not event.seen]


class _ErrorLog(logging.Handler):
    """Notes what only a bug logs."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._errors = errors

    @override
    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.levelno >= logging.ERROR or "closed with" in message or "closing failed" in message:
            self._errors.append(f"{message}: {record.exc_info and record.exc_info[1]!r}")


def _mask(prompt: _Prompt, head: int) -> Sequence[bool] | None:
    return [at >= head * CHUNK for at in range(len(prompt.tokens))] if head else None


def _noise(serial: int, num_tokens: int, token_bytes: int) -> np.ndarray:
    return np.random.default_rng(serial).integers(0, 256, (num_tokens, token_bytes), dtype=np.uint8)
