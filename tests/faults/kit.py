"""A small engine over known bytes, and a way to cancel a call at every one of its awaits."""

from __future__ import annotations

import asyncio
import enum
import hashlib
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager

import anyio
import numpy as np
import torch
from opentelemetry.metrics import Meter

from akvcache import CacheEngine, EngineConfig, RequestScope, RetrieveResult, StoreResult
from akvcache.backend import Backend, BackendContext
from akvcache.clock import Clock
from akvcache.connector import Span
from akvcache.frame import frame_bytes
from akvcache.keys import ChunkKey
from akvcache.layout import KVLayout
from akvcache.testing import (
    CopyFault,
    FakeDevice,
    FakeDeviceConnector,
    FakeEvent,
    Inspected,
    MemoryBackend,
    RegionKV,
    make_rows,
    open_inspected,
)
from akvcache.tokens import canonical_tokens

CHUNK = 8
REGION_CHUNKS = 24


class Rig:
    """An engine whose prompts are named by labels: tokens and bytes follow from the label."""

    def __init__(self, kv: RegionKV, inspected: Inspected[torch.Tensor]) -> None:
        self.kv = kv
        self.inspected = inspected
        self.engine: CacheEngine[torch.Tensor] = inspected.engine
        self.context = inspected.context
        self.host = inspected.context.host
        self._pushed = 0

    def tokens(self, label: str, chunks: int) -> list[int]:
        digest = hashlib.sha256(label.encode()).digest()
        return [int.from_bytes(digest[:3], "big") * 256 + at for at in range(chunks * CHUNK)]

    def keys(self, label: str, chunks: int) -> Sequence[ChunkKey]:
        return self.context.schema.run(canonical_tokens(self.tokens(label, chunks)), RequestScope()).keys

    def rows(self, label: str, chunks: int) -> np.ndarray:
        return make_rows(label, chunks * CHUNK, self.kv.token_bytes)

    def fill(self, label: str, chunks: int, region: int = 0) -> torch.Tensor:
        """Put a prompt's bytes into a region; return its slot mapping."""
        self.kv.write(region, self.rows(label, chunks))
        return self.kv.slots(region)

    def blank(self, region: int) -> torch.Tensor:
        """Fill a region with noise; return its slot mapping."""
        self.kv.write(region, self.noise)
        return self.kv.slots(region)

    @property
    def noise(self) -> np.ndarray:
        return make_rows("noise", self.kv.region_tokens, self.kv.token_bytes)

    async def store(self, label: str, chunks: int, region: int = 0, deadline_s: float | None = None) -> StoreResult:
        """Store a prompt, then overwrite its source."""
        kept = await self.engine.store(
            self.tokens(label, chunks), self.fill(label, chunks, region), deadline_s=deadline_s
        )
        self.blank(region)
        return kept

    async def retrieve(
        self, label: str, chunks: int, region: int = 1, deadline_s: float | None = None
    ) -> RetrieveResult:
        """Retrieve into noise and prove that exactly the rows of the mask hold the prompt's bytes."""
        slots = self.blank(region)
        loaded = await self.engine.retrieve(self.tokens(label, chunks), slots, deadline_s=deadline_s)
        self.check(label, chunks, loaded, region)
        return loaded

    def check(self, label: str, chunks: int, loaded: RetrieveResult, region: int = 1) -> None:
        rows, stop = self.kv.read(region), loaded.loaded_tokens
        assert loaded.mask.tolist() == [at < stop for at in range(chunks * CHUNK)]
        assert np.array_equal(rows[:stop], self.rows(label, chunks)[:stop]), "wrong bytes"
        assert np.array_equal(rows[stop:], self.noise[stop:]), "rows behind the mask were written"

    async def push_out(self) -> None:
        """Store so much that everything else leaves host memory; the lower tiers have it all when this returns."""
        self._pushed += 1
        await self.engine.flush()
        await self.store(f"pushes out {self._pushed}", 2 * self.host.pool.num_slots)
        await self.engine.flush()

    async def hit(self, label: str, chunks: int) -> int:
        """Return how many chunks a lookup finds."""
        return (await self.engine.lookup(self.tokens(label, chunks))).hit_tokens // CHUNK

    async def works(self, label: str) -> None:
        """Prove that the engine serves a store and a retrieve."""
        kept = await self.store(label, 3, region=2)
        assert (kept.stored_tokens, kept.stopped) == (3 * CHUNK, None)
        loaded = await self.retrieve(label, 3, region=3)
        assert (loaded.loaded_tokens, loaded.stopped) == (3 * CHUNK, None)

    async def rest(self, *, leases: int = 0) -> None:
        await self.inspected.rest(leases=leases)


def slot_bytes(kv: RegionKV) -> int:
    return frame_bytes(kv.token_bytes * CHUNK)


def config_for(kv: RegionKV, num_slots: int, **options: object) -> EngineConfig:
    """Return a strict configuration: pool of `num_slots` chunks, waves of two, windows of four."""
    slot = slot_bytes(kv)
    values: dict[str, object] = {
        "chunk_tokens": CHUNK,
        "host_bytes": num_slots * slot,
        "wave_bytes": 2 * slot,
        "window_bytes": 4 * slot,
        "memory_wait_s": 0.1,
        "lookup_deadline_s": 1.0,
        "prefault": False,
        "strict": True,
    }
    return EngineConfig.from_mapping({**values, **options})


@asynccontextmanager
async def rig(
    tiers: Sequence[Backend] = (),
    *,
    num_slots: int = 8,
    connector: Callable[[RegionKV], object] | None = None,
    clock: Clock | None = None,
    meter: Meter | None = None,
    **options: object,
) -> AsyncGenerator[Rig]:
    """Open an engine over a fresh `RegionKV`; `connector` may wrap the one that moves its bytes."""
    kv = RegionKV(num_regions=4, region_tokens=REGION_CHUNKS * CHUNK)
    moves = kv.connector if connector is None else connector(kv)
    config = config_for(kv, num_slots, **options)
    async with open_inspected(config, connector=moves, tiers=list(tiers), clock=clock, meter=meter) as inspected:
        yield Rig(kv, inspected)


class BlockingConnector:
    """A connector whose copies wait in their thread for `go`, half-way through."""

    def __init__(self, kv: RegionKV) -> None:
        self._inner = kv.connector
        self._loop = asyncio.get_running_loop()
        self.entered = asyncio.Event()
        self.go = threading.Event()
        self.go.set()
        self.copies = 0

    @property
    def layout(self) -> KVLayout:
        return self._inner.layout

    def check(self, kv: torch.Tensor, num_tokens: int) -> None:
        self._inner.check(kv, num_tokens)

    def gather(self, kv: torch.Tensor, spans: Sequence[Span], out: Sequence[memoryview]) -> None:
        self._inner.gather(kv, spans[:1], out[:1])
        self._block()
        self._inner.gather(kv, spans, out)

    def scatter(self, kv: torch.Tensor, spans: Sequence[Span], src: Sequence[memoryview]) -> None:
        self._inner.scatter(kv, spans[:1], src[:1])
        self._block()
        self._inner.scatter(kv, spans, src)

    def _block(self) -> None:
        self.copies += 1
        self._loop.call_soon_threadsafe(self.entered.set)
        assert self.go.wait(10), "the test never let the copy go on"


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until something is so."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)


class CountedBackend(MemoryBackend):
    """Knows how often it was opened and closed."""

    opened = 0
    closed = 0

    async def open(self, context: BackendContext) -> None:
        await super().open(context)
        self.opened += 1

    async def aclose(self) -> None:
        await super().aclose()
        self.closed += 1


class FailingConnector:
    """A connector on a fake device that lets one of the coming copies go wrong.

    Attributes:
        good_chunks: Chunks copied well since `fail_after`.
    """

    def __init__(self, kv: RegionKV) -> None:
        self._copies = FakeDeviceConnector(kv.connector, FakeDevice())
        self._good: int | None = None
        self._fault = CopyFault.RAISE
        self.good_chunks = 0

    def fail_after(self, good: int, fault: CopyFault) -> None:
        """Let `good` copies go well, and the next one not."""
        self._good, self._fault, self.good_chunks = good, fault, 0

    @property
    def layout(self) -> KVLayout:
        return self._copies.layout

    def check(self, kv: torch.Tensor, num_tokens: int) -> None:
        self._copies.check(kv, num_tokens)

    def gather(self, kv: torch.Tensor, spans: Sequence[Span], out: Sequence[memoryview]) -> FakeEvent:
        self._count(len(spans))
        return self._copies.gather(kv, spans, out)

    def scatter(self, kv: torch.Tensor, spans: Sequence[Span], src: Sequence[memoryview]) -> FakeEvent:
        self._count(len(spans))
        return self._copies.scatter(kv, spans, src)

    def _count(self, chunks: int) -> None:
        if self._good == 0:
            self._copies.fail_next(self._fault)
        else:
            self.good_chunks += chunks
        self._good = None if not self._good else self._good - 1


class How(enum.Enum):
    """Ways to be cancelled."""

    NATIVE = "task.cancel"
    TWICE = "task.cancel, and again at the next await"
    TIMEOUT = "asyncio.timeout"
    SCOPE = "anyio.CancelScope"


class When(enum.Enum):
    """Moments of one await at which to be cancelled."""

    WAITING = "while it waits"
    ARRIVED = "when what it waits for has just come, before the call learns of it"


class _Counted:
    """Awaits a coroutine and calls back at its n-th suspension."""

    def __init__(self, call: Awaitable[object], point: int, fire: Callable[[object], None]) -> None:
        self._call = call
        self._point = point
        self._fire = fire
        self.suspensions = 0

    def __await__(self) -> Generator[object, object, object]:
        steps = self._call.__await__()
        resume: Callable[[], object] = lambda: steps.send(None)  # noqa: E731
        while True:
            try:
                waits_for = resume()
            except StopIteration as end:
                return end.value
            self.suspensions += 1
            if self.suspensions >= self._point:
                self._fire(waits_for)
            try:
                sent = yield waits_for
            except BaseException as error:
                thrown = error
                resume = lambda: steps.throw(thrown)  # noqa: E731, B023
            else:
                resume = lambda: steps.send(sent)  # noqa: E731, B023


async def cancel_at(point: int, call: Callable[[], Coroutine[object, object, object]], how: How, when: When) -> bool:
    """Run `call` and cancel it at its `point`-th await, counted from 1; return whether it came that far."""
    loop = asyncio.get_running_loop()
    fired = 0

    def fire(waits_for: object) -> None:
        nonlocal fired
        if fired == (2 if how is How.TWICE else 1):
            return
        fired += 1
        if when is When.ARRIVED and isinstance(waits_for, asyncio.Future):
            waits_for.add_done_callback(lambda _: cancel())  # runs before the one that wakes the task
        else:
            loop.call_soon(cancel)

    counted = _Counted(call(), point, fire)
    timeout: asyncio.Timeout | None = None
    scope: anyio.CancelScope | None = None

    def cancel() -> None:
        if how is How.TIMEOUT and timeout is not None:
            timeout.reschedule(loop.time())
        elif how is How.SCOPE and scope is not None:
            scope.cancel()
        else:
            task.cancel()

    async def run() -> None:
        nonlocal timeout, scope
        if how is How.TIMEOUT:
            try:
                async with asyncio.timeout(None) as timeout:
                    await counted
            except TimeoutError:
                pass
        elif how is How.SCOPE:
            with anyio.CancelScope() as scope:
                await counted
        else:
            await counted

    task = asyncio.create_task(run())
    done, _ = await asyncio.wait([task], timeout=10)
    assert done, f"cancelled at await {point} by {how.value}, the call hangs"
    if not task.cancelled() and task.exception() is not None:
        raise task.exception()
    return fired > 0
