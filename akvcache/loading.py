"""From any tier to the device: loads shared by all who want a chunk, streamed through a window of host slots.

::

    chunks   0 1 2 3 | 4 5 6 7 8 9 | 10 11 ...
             on the  | in flight:  | not asked for yet
             device  | tier -> slot|
                     ^done         ^next           next - done <= window

Chunks are consumed in order. A request that waits for a slot holds none that it does not need for its next copy, so
two large requests cannot block each other. The first failure ends the prefix; loads behind it go on and leave their
chunks in host memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from akvcache.buffers import SlotLease
from akvcache.context import Budget, Context
from akvcache.errors import TransferError
from akvcache.host import Arrival
from akvcache.index import Entry, Hold
from akvcache.planner import HOST, Plan
from akvcache.request import Request
from akvcache.results import StopReason
from akvcache.telemetry import Phase, names
from akvcache.tiers import Outcome, OutcomeKind

__all__ = ("Loader", "Loading", "plan_loading")

KV = TypeVar("KV")

_REASONS: Final = {
    OutcomeKind.MISSING: StopReason.MISSING,
    OutcomeKind.CORRUPT: StopReason.CORRUPT,
    OutcomeKind.CAPACITY: StopReason.CAPACITY,
    OutcomeKind.ERROR: StopReason.BACKEND_ERROR,
    OutcomeKind.TIMEOUT: StopReason.BACKEND_ERROR,
    OutcomeKind.UNAVAILABLE: StopReason.BACKEND_ERROR,
}


@dataclass(slots=True)
class Loading:
    """Progress of one request: what the result, the span and the metrics are made of."""

    sources: list[str] = field(default_factory=list)
    stopped: StopReason | None = None
    h2d: Phase = field(default_factory=Phase)
    reads: dict[str, Phase] = field(default_factory=dict)


@dataclass(slots=True)
class _Wanted:
    """A chunk in flight for one request."""

    entry: Entry
    arrival: Arrival | None

    @property
    def source(self) -> str:
        """The tier that served it."""
        return HOST if self.arrival is None else self.entry.source or HOST

    @property
    def ready(self) -> bool:
        return self.arrival is None or (self.arrival.done() and self.arrival.result() is None)


class Loader(Generic[KV]):
    """Loads one planned run of chunks for one request.

    Args:
        context: The engine's parts.
        request: The prompt's chunks, from its first chunk on.
        plan: Where those chunks are.
        budget: Time left.
    """

    def __init__(self, context: Context[KV], request: Request, plan: Plan, budget: Budget) -> None:
        self._context = context
        self._run = request.run
        self._first = request.first
        self._plan = plan
        self._budget = budget
        self._epoch = request.epoch
        self._tick = context.host.index.touch(request.run.keys)
        self._wanted: deque[_Wanted] = deque()
        self._next = 0
        self.progress = Loading()

    async def into(self, kv: KV) -> Loading:
        """Stream the chunks into `kv`.

        Cancellation:
            Waits for a running device copy, so that nothing writes into `kv` afterwards; loads go on and leave their
            chunks in host memory.
        """
        hold = self._context.host.hold("retrieve")
        try:
            while len(self.progress.sources) < len(self._plan.sources):
                if not self._budget.left_s:
                    self.progress.stopped = StopReason.DEADLINE
                    break
                wave = await self._wave(hold, self._context.window_chunks)
                if not wave or not await self._scatter(kv, wave):
                    break
                for wanted in wave:
                    hold.discard(wanted.entry)
                    self.progress.sources.append(wanted.source)
        finally:
            hold.release()
        return self.progress

    async def into_host(self) -> Loading:
        """Bring the chunks into host memory and keep the prefix there until all are loaded."""
        hold = self._context.host.hold("prefetch")
        host = self._context.host
        room = host.pool.num_slots - host.reserve
        try:
            while len(self.progress.sources) < len(self._plan.sources):
                if room == len(self.progress.sources):
                    self.progress.stopped = StopReason.MEMORY_PRESSURE
                    break
                wave = await self._wave(hold, room - len(self.progress.sources))
                if not wave:
                    break
                self.progress.sources.extend(wanted.source for wanted in wave)
        finally:
            hold.release()
        return self.progress

    async def _wave(self, hold: Hold, window: int) -> list[_Wanted]:
        """Ask ahead, wait for the next chunk, and return it with what has arrived right behind it."""
        if not await self._ask_ahead(hold, window):
            return []
        head = self._wanted[0]
        if head.arrival is not None and not head.arrival.done():
            await asyncio.wait([head.arrival], timeout=self._budget.left_s)
        if not head.ready:
            arrived = head.arrival.result() if head.arrival is not None and head.arrival.done() else None
            self.progress.stopped = arrived or StopReason.DEADLINE
            return []
        wave: list[_Wanted] = []
        while self._wanted and self._wanted[0].ready and len(wave) < self._context.wave_chunks:
            wave.append(self._wanted.popleft())
        return wave

    async def _ask_ahead(self, hold: Hold, window: int) -> bool:
        """Request chunks up to the window; wait for a slot only when nothing is in flight."""
        while self._context.epoch == self._epoch:
            if self._next == len(self._plan.sources) or len(self._wanted) >= window:
                return True
            wanted = self._at_hand(hold)
            if wanted is None:
                lease = self._context.host.pool.try_lease(1)
                if lease is None and self._wanted:
                    return True
                if lease is None:
                    lease = await self._wait_for_slot()
                    if lease is None:
                        return False
                    if self._context.epoch != self._epoch:
                        lease.release()
                        continue
                    wanted = self._at_hand(hold)  # it may have come while we waited
                if wanted is None:
                    wanted = self._start(lease, hold)
                lease.release()
            self._wanted.append(wanted)
            self._next += 1
        self.progress.stopped = StopReason.CLEARED
        return False

    async def _wait_for_slot(self) -> SlotLease | None:
        limit = min(self._context.config.memory_wait_s, self._budget.left_s)
        lease = await self._context.host.pool.lease(1, timeout_s=limit)
        if lease is None:
            self.progress.stopped = StopReason.MEMORY_PRESSURE if self._budget.left_s else StopReason.DEADLINE
        return lease

    def _at_hand(self, hold: Hold) -> _Wanted | None:
        """Take a chunk that is in host memory or on its way there."""
        key = self._run.keys[self._first + self._next]
        if (entry := self._context.host.resident(key)) is not None:
            hold.add(entry)
            return _Wanted(entry, None)
        if (filling := self._context.host.filling(key)) is not None:
            hold.add(filling[0])
            return _Wanted(*filling)
        return None

    def _start(self, lease: SlotLease, hold: Hold) -> _Wanted:
        """Start the one load of a chunk that nobody else has started."""
        index = self._first + self._next
        start, stop = self._run.span(index)
        entry, arrival = self._context.host.begin(self._run.keys[index], lease.take(), stop - start)
        hold.add(entry)
        known = [name for name in self._plan.sources[self._next] if name != HOST]
        # What was planned from host memory may have been written down and evicted since: then any tier may have it.
        sources = known or [tier.name for tier in self._context.tiers]
        self._context.supervisor.spawn(self._load(entry, sources), name="load")
        return _Wanted(entry, arrival)

    async def _load(self, entry: Entry, sources: Sequence[str]) -> None:
        """Fill one slot from the first tier that can; shared by everyone who waits for its arrival."""
        context = self._context
        outcome, name = Outcome(OutcomeKind.MISSING), ""
        try:
            for name in sources:
                phase = self.progress.reads.setdefault(name, Phase())
                frame = context.frame(entry)
                with phase.piece(1, len(frame)):
                    outcome = await context.tier(name).read(
                        entry.key,
                        frame,
                        num_tokens=entry.num_tokens,
                        part_bytes=context.layout.part_bytes(entry.num_tokens),
                    )
                if outcome.kind is OutcomeKind.OK or outcome.late is not None:
                    break
        finally:
            if outcome.kind is OutcomeKind.OK:
                entry.sealed, entry.source = True, name
                context.host.publish(entry, self._tick)
            else:
                self._give_up(entry, outcome)

    def _give_up(self, entry: Entry, outcome: Outcome) -> None:
        """Fail the arrival; a slot that a late read still writes into stays held until that read ends."""
        if outcome.late is not None:
            hold = self._context.host.hold("late")
            hold.add(entry)
            self._context.supervisor.spawn(_release_after(hold, outcome.late), name="late")
        self._context.host.abandon(entry, _REASONS[outcome.kind])

    async def _scatter(self, kv: KV, wave: Sequence[_Wanted]) -> bool:
        """Copy a wave to the device; return whether its bytes are there."""
        spans = [self._run.span(self._first + len(self.progress.sources) + i) for i in range(len(wave))]
        entries = [wanted.entry for wanted in wave]
        size = sum(self._context.layout.payload_bytes(entry.num_tokens) for entry in entries)
        with self.progress.h2d.piece(len(wave), size):
            copy = _copy_out(self._context, kv, spans, entries)
            self.progress.stopped = await self._context.copy(copy, "h2d")
        return self.progress.stopped is None


async def plan_loading(context: Context[KV], request: Request, budget: Budget, op: str) -> tuple[Plan, Loader[KV]]:
    """Plan a request's load and note the use of what it hits."""
    phase = Phase()
    with phase.piece():
        limit = min(budget.left_s, context.config.lookup_deadline_s)
        plan = await context.plan(request.run, context.host.expected, limit, first=request.first)
    context.telemetry.phase(op, names.PLAN, phase)
    for tier in context.tiers:
        tier.touch(request.run.keys[: request.first + len(plan.sources)])
    return plan, Loader(context, request, plan, budget)


async def _copy_out(
    context: Context[KV], kv: KV, spans: Sequence[tuple[int, int]], entries: Sequence[Entry]
) -> StopReason | None:
    """Copy under an own hold, so that the slots outlive a caller that gives up on a hung device."""
    hold = context.host.hold("h2d")
    for entry in entries:
        hold.add(entry)
    try:
        await context.transfer.scatter(kv, spans, [context.payload(entry) for entry in entries])
    except TransferError as error:
        context.log_transfer(error)
        return StopReason.TRANSFER_ERROR
    finally:
        hold.release()
    return None


async def _release_after(hold: Hold, late: asyncio.Task[object]) -> None:
    await asyncio.wait([late])
    hold.release()
