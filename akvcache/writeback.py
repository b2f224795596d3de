"""Background writes to one lower tier: a queue bounded in bytes, drained by a few workers.

Owned by the engine, touched from its loop only. A queued chunk is held in the host tier until its write has really
ended, so the queue is bounded by the pool as well. Workers exist only while there is work; nothing polls.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

from opentelemetry.trace import Span, SpanContext

from akvcache import frame as frames
from akvcache.host import HostTier
from akvcache.index import ChunkState, Entry
from akvcache.keys import ChunkKey
from akvcache.layout import KVLayout
from akvcache.results import StopReason
from akvcache.supervision import Supervisor, run_blocking
from akvcache.telemetry import Phase, Telemetry, names
from akvcache.tiers import Outcome, OutcomeKind, Tier

__all__ = ("WriteQueue", "WriteSpan")

_REASONS: Final = {
    OutcomeKind.CAPACITY: StopReason.CAPACITY,
    OutcomeKind.ERROR: StopReason.BACKEND_ERROR,
    OutcomeKind.TIMEOUT: StopReason.BACKEND_ERROR,
    OutcomeKind.UNAVAILABLE: StopReason.BACKEND_ERROR,
}
READ_YIELD_S: Final = 0.2
"""Longest a second writer stands back for reads before it goes on anyway."""


class WriteSpan:
    """The span of one store's writes to one tier: linked to the store, ended with the last write.

    A store that has nothing to write makes no span.

    Args:
        start: Starts the span, with the first write.
        ended: Called with the last write, or at the store's end.

    Attributes:
        failed: Why a write of this store failed, or was given up.
        done: What was written, and how long that took.
    """

    def __init__(self, start: Callable[[], Span], ended: Callable[[], None]) -> None:
        self._start = start
        self._span: Span | None = None
        self._ended = ended
        self._open = 1
        self.failed: StopReason | None = None
        self.done = Phase()

    def begin(self) -> None:
        """Count a write that will report to this span."""
        self._open += 1
        self._span = self._span or self._start()

    def end(self, failed: StopReason | None = None) -> None:
        """Count a write that ended, or the store's own end."""
        self._open -= 1
        self.failed = failed or self.failed
        if self._open:
            return
        if self._span is not None:
            self._span.set_attributes({names.CHUNKS: self.done.chunks, names.BYTES: self.done.num_bytes})
            if self.failed:
                self._span.set_attribute(names.STOPPED, self.failed)
            self._span.end()
        self._ended()


@dataclass(frozen=True, slots=True)
class _Item:
    entry: Entry
    span: WriteSpan
    done: asyncio.Future[object]


class WriteQueue:
    """Writes queued for one tier.

    Args:
        tier: Where they go.
        host: Holds the chunks meanwhile.
        layout: Sizes of the frames' parts.
        limit_bytes: Bound of the queue, running writes included.
        supervisor: Owns the workers.
        executor: Threads that seal.
        telemetry: Where drops are counted.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        host: HostTier,
        layout: KVLayout,
        limit_bytes: int,
        supervisor: Supervisor,
        executor: ThreadPoolExecutor,
        telemetry: Telemetry,
    ) -> None:
        self.tier = tier
        self._host = host
        self._layout = layout
        self._limit = limit_bytes
        self._supervisor = supervisor
        self._executor = executor
        self._telemetry = telemetry
        self._hold = host.hold(f"write-{tier.name}")
        self._queue: deque[_Item] = deque()
        self._pending: dict[ChunkKey, _Item] = {}
        self._workers = 0
        self._room: deque[asyncio.Future[None]] = deque()
        self.queued_bytes = 0

    def __repr__(self) -> str:
        return f"<WriteQueue {self.tier.name} {len(self._pending)} chunks, {self.queued_bytes} bytes>"

    @property
    def num_pending(self) -> int:
        """Chunks queued or being written."""
        return len(self._pending)

    def pending(self, key: ChunkKey) -> bool:
        """Return whether a write of `key` is queued or running."""
        return key in self._pending

    def span(self, cause: SpanContext, path: Sequence[ChunkKey]) -> WriteSpan:
        """Open the span for the writes of one store; `end` it when the store has queued its last.

        The tier learns that one request uses the whole `path`: now, so that the new chunks rank above older requests
        when the tier must make room for them, and with the last write, so that they rank as one request.
        """
        self.tier.touch(path)

        def ended() -> None:
            self.tier.touch(path)
            if span.done.first_ns:
                self._telemetry.written(self.tier.name, span.done)

        span = WriteSpan(lambda: self._telemetry.write_span(self.tier.name, cause), ended)
        return span

    async def offer(self, entry: Entry, span: WriteSpan, *, timeout_s: float) -> bool:
        """Queue a visible chunk for writing; a chunk already queued is not queued again.

        Returns:
            False if the tier is out of use or the queue had no room within `timeout_s`: the write is given up and
            counted, and the chunk stays in host memory only.
        """
        if entry.key in self._pending:
            return True
        if not self.tier.usable:
            return self._refuse(span, "unavailable")
        size = self._size(entry)
        if self.queued_bytes and self.queued_bytes + size > self._limit and not await self._has_room(size, timeout_s):
            return self._refuse(span, "queue_full")
        if entry.key in self._pending:
            return True
        if entry.state is not ChunkState.RESIDENT:
            return False  # cleared while this waited
        item = _Item(entry, span, asyncio.get_running_loop().create_future())
        span.begin()
        self._hold.add(entry)
        self._pending[entry.key] = item
        self._queue.append(item)
        self.queued_bytes += size
        if self._workers < self.tier.backend.capabilities.max_writes:
            self._workers += 1
            self._supervisor.spawn(self._work(first=self._workers == 1), name=f"{self.tier.name}-writer")
        return True

    def _refuse(self, span: WriteSpan, why: str) -> bool:
        self._telemetry.write_dropped(self.tier.name, why)
        span.failed = StopReason.BACKEND_ERROR
        return False

    async def _has_room(self, size: int, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while self.queued_bytes and self.queued_bytes + size > self._limit:
                    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._room.append(waiter)
                    try:
                        await waiter
                    finally:
                        if waiter in self._room:
                            self._room.remove(waiter)
        except TimeoutError:
            return False
        return True

    async def settled(self, keys: Iterable[ChunkKey]) -> None:
        """Wait until no write of these keys is queued or running."""
        waits = [item.done for key in keys if (item := self._pending.get(key)) is not None]
        if waits:
            await asyncio.wait(waits)

    async def idle(self) -> None:
        """Wait until nothing is queued or running."""
        while self._pending:
            await self.settled(list(self._pending))

    def drop_queued(self, reason: StopReason) -> int:
        """Give up writes that have not begun; return how many."""
        dropped = list(self._queue)
        self._queue.clear()
        for item in dropped:
            self._finish(item, reason)
        if dropped:
            self._telemetry.write_dropped(self.tier.name, reason, len(dropped))
        return len(dropped)

    def disown_running(self) -> None:
        """Have the tier hide what is being written now, and delete it when it is."""
        for key, item in self._pending.items():
            self.tier.doom(key, item.done)

    # -- workers -------------------------------------------------------------------------------------------------

    async def _work(self, *, first: bool) -> None:
        try:
            while self._queue:
                if not first and not self.tier.quiet.is_set():
                    await _stand_back(self.tier.quiet)
                if self._queue:
                    await self._write(self._queue.popleft())
        finally:
            self._workers -= 1

    async def _write(self, item: _Item) -> None:
        entry, frame = item.entry, item.entry.slot.frame[: self._size(item.entry)]
        outcome = Outcome(OutcomeKind.ERROR)
        try:
            if not entry.sealed:
                await run_blocking(self._executor, _seal, frame, entry, self._layout.part_bytes(entry.num_tokens))
                entry.sealed = True
            with item.span.done.piece():
                outcome = await self.tier.write(entry.key, frame)
        finally:
            if outcome.kind is OutcomeKind.OK:
                item.span.done.chunks += 1
                item.span.done.num_bytes += len(frame)
            else:
                self._telemetry.write_dropped(self.tier.name, outcome.kind)
            if outcome.late is None:
                self._finish(item, _REASONS.get(outcome.kind))
            else:
                waiting = self._supervisor.spawn(_ended(outcome.late), name=f"{self.tier.name}-late")
                waiting.add_done_callback(partial(self._late_ended, item))

    def _late_ended(self, item: _Item, waiting: asyncio.Task[None]) -> None:
        """Finish a write that overran its time; if closing gave up on it, its slot stays with it and its span ends.

        A callback, because a task that is cancelled before its first step runs none of its own clean-up.
        """
        if waiting.cancelled():
            item.span.end(StopReason.BACKEND_ERROR)
        else:
            self._finish(item, StopReason.BACKEND_ERROR)

    def _finish(self, item: _Item, failed: StopReason | None) -> None:
        self._pending.pop(item.entry.key, None)
        self.queued_bytes -= self._size(item.entry)
        item.span.end(failed)
        item.done.set_result(None)
        self._hold.discard(item.entry)
        for waiter in self._room:
            if not waiter.done():
                waiter.set_result(None)

    def _size(self, entry: Entry) -> int:
        return frames.frame_bytes(self._layout.payload_bytes(entry.num_tokens))


async def _ended(late: asyncio.Task[object]) -> None:
    await asyncio.wait([late])


async def _stand_back(quiet: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(READ_YIELD_S):
            await quiet.wait()
    except TimeoutError:
        pass


def _seal(frame: memoryview, entry: Entry, part_bytes: tuple[int, ...]) -> None:
    frames.seal(frame, key=entry.key, num_tokens=entry.num_tokens, part_bytes=part_bytes)
