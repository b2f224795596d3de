"""From the device to the host pool, wave by wave, and on to the lower tiers in the background.

A wave is copied, published and queued for writing before the next one is copied; while it is copied, the writers move
the waves before it. What is cached already is neither copied nor written again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from opentelemetry.trace import SpanContext

from akvcache.context import Budget, Context
from akvcache.errors import TransferError
from akvcache.index import Entry
from akvcache.keys import ChunkRun
from akvcache.planner import plan_prefix
from akvcache.request import Request, check_seconds
from akvcache.results import DurableResult, StopReason
from akvcache.telemetry import Phase
from akvcache.writeback import WriteQueue, WriteSpan

__all__ = ("Storer", "Storing", "durable", "store_run")

KV = TypeVar("KV")


@dataclass(slots=True)
class Storing:
    """Progress of one store.

    Attributes:
        done: Index behind the last chunk that was stored or skipped.
        head: Index of the first chunk before the mask's end that is not cached, if there is one.
        new_tokens: Tokens copied.
        existing_tokens: Tokens that were cached already.
    """

    done: int = 0
    head: int | None = None
    new_tokens: int = 0
    existing_tokens: int = 0
    stopped: StopReason | None = None
    lease: Phase = field(default_factory=Phase)
    d2h: Phase = field(default_factory=Phase)

    @property
    def reached(self) -> int:
        """Index behind the longest prefix that is cached now."""
        if self.stopped is StopReason.CLEARED:
            return 0
        return self.done if self.head is None else self.head


class Storer(Generic[KV]):
    """Stores one prompt's chunks.

    Args:
        context: The engine's parts.
        request: The prompt's chunks, from its first chunk on.
        presence: Which lower tier holds which chunk of the whole run.
        budget: Time left.
        spans: One span per write queue, for the writes of this store.
    """

    def __init__(
        self,
        context: Context[KV],
        request: Request,
        presence: Mapping[str, Sequence[bool]],
        budget: Budget,
        spans: Mapping[WriteQueue, WriteSpan],
    ) -> None:
        self._context = context
        self._run = request.run
        self._presence = presence
        self._budget = budget
        self._epoch = request.epoch
        self._tick = context.host.index.touch(request.run.keys)
        self._hold = context.host.hold("store")
        self._queues = dict(spans)
        self._absent = [index for index in range(request.first) if not self._keep_head(index)]
        self.progress = Storing(done=request.first)

    async def run(self, kv: KV) -> Storing:
        """Copy what is missing.

        Cancellation:
            Waits for a running device copy, so that nothing reads `kv` afterwards; chunks copied so far stay cached.
        """
        progress = self.progress
        try:
            while progress.done < len(self._run.keys) and progress.stopped is None:
                if self._context.epoch != self._epoch:
                    progress.stopped = StopReason.CLEARED
                elif not self._budget.left_s:
                    progress.stopped = StopReason.DEADLINE
                elif not await self._skip_existing():
                    await self._copy_wave(kv)
        finally:
            self._hold.release()
        still = (index for index in self._absent if self._context.host.resident(self._run.keys[index]) is None)
        progress.head = next(still, None)
        return progress

    def _keep_head(self, index: int) -> bool:
        """Return whether a chunk before the mask's end is cached; one that only host memory has is kept there."""
        key = self._run.keys[index]
        if self._in_tiers(index) or any(queue.pending(key) for queue in self._context.queues):
            return True
        entry = self._context.host.resident(key)
        if entry is not None:
            self._hold.add(entry)
        return entry is not None

    def _in_tiers(self, index: int) -> bool:
        return any(index < len(has) and has[index] for has in self._presence.values())

    async def _skip_existing(self) -> bool:
        """Pass over the next chunk if it is cached or on its way; return whether it was."""
        index = self.progress.done
        key = self._run.keys[index]
        entry = self._context.host.resident(key)
        if entry is None and (filling := self._context.host.filling(key)) is not None:
            self._hold.add(filling[0])
            await asyncio.wait([filling[1]], timeout=self._budget.left_s)
            if not (filling[1].done() and filling[1].result() is None):
                self._hold.discard(filling[0])
                return True  # it failed or is late: look again, and copy it ourselves if it is gone
            entry = filling[0]
        if entry is not None:
            await self._hand_over([entry], index)
        elif not self._in_tiers(index):
            return False
        start, stop = self._run.span(index)
        self.progress.existing_tokens += stop - start
        self.progress.done += 1
        return True

    async def _copy_wave(self, kv: KV) -> None:
        """Copy the next few missing chunks into leased slots."""
        context, progress, first = self._context, self.progress, self.progress.done
        # A short first wave puts the writers to work early; without any it would only cost a hop.
        most = context.wave_chunks if progress.new_tokens or not self._queues else 1
        count = 1
        while count < most and self._missing(first + count):
            count += 1
        limit = min(context.config.memory_wait_s, self._budget.left_s)
        with progress.lease.piece():
            lease = await context.host.acquire(count, timeout_s=limit)
        if lease is None:
            progress.stopped = StopReason.MEMORY_PRESSURE if self._budget.left_s else StopReason.DEADLINE
            return
        entries: list[Entry] = []
        if context.epoch == self._epoch:
            for index in range(first, first + len(lease)):
                if not self._missing(index):
                    break  # somebody else stored it while we waited
                start, stop = self._run.span(index)
                entries.append(context.host.begin(self._run.keys[index], lease.take(), stop - start)[0])
                self._hold.add(entries[-1])
        lease.release()
        if entries and await self._gather(kv, first, entries):
            progress.done += len(entries)
            progress.new_tokens += sum(entry.num_tokens for entry in entries)
            await self._hand_over(entries, first)

    def _missing(self, index: int) -> bool:
        if index >= len(self._run.keys) or self._in_tiers(index):
            return False
        key = self._run.keys[index]
        return self._context.host.resident(key) is None and self._context.host.filling(key) is None

    async def _gather(self, kv: KV, first: int, entries: Sequence[Entry]) -> bool:
        spans = [self._run.span(first + offset) for offset in range(len(entries))]
        size = sum(self._context.layout.payload_bytes(entry.num_tokens) for entry in entries)
        with self.progress.d2h.piece(len(entries), size):
            copy = _copy_in(self._context, kv, spans, entries, self._tick)
            self.progress.stopped = await self._context.copy(copy, "d2h")
        return self.progress.stopped is None

    async def _hand_over(self, entries: Sequence[Entry], first: int) -> None:
        """Queue chunks for the tiers that lack them; a chunk that no tier will have stays held until the end."""
        for entry in entries:
            self._hold.add(entry)
        for offset, entry in enumerate(entries):
            written = self._in_tiers(first + offset)
            for queue, span in list(self._queues.items()):
                has = self._presence.get(queue.tier.name, ())
                if first + offset < len(has) and has[first + offset]:
                    continue
                limit = min(self._context.config.memory_wait_s, self._budget.left_s)
                if await queue.offer(entry, span, timeout_s=limit):
                    written = True
                else:
                    del self._queues[queue]  # without this chunk, later ones are of no use to that tier
            if written:
                self._hold.discard(entry)


async def store_run(
    context: Context[KV], request: Request, kv: KV, budget: Budget, cause: SpanContext
) -> tuple[Storing, Sequence[WriteSpan]]:
    """Store a request's chunks; their background writes get spans linked to `cause`, which are returned as well."""
    keys = request.run.keys
    presence = await context.presence(keys, min(budget.left_s, context.config.lookup_deadline_s))
    spans = {queue: queue.span(cause, keys) for queue in context.queues if queue.tier.usable}
    storer = Storer(context, request, presence, budget, spans)
    try:
        return await storer.run(kv), list(spans.values())
    finally:
        for span in spans.values():
            span.end()


async def durable(
    context: Context[KV], run: ChunkRun, stored: int, writes: Sequence[WriteSpan], timeout_s: float | None
) -> DurableResult:
    """Wait for the writes of a store, then ask the persistent tiers what they hold of it."""
    context.check_usable()
    check_seconds("timeout_s", timeout_s)
    late = False
    try:
        async with asyncio.timeout(context.config.store_deadline_s if timeout_s is None else timeout_s):
            for queue in context.queues:
                await queue.settled(run.keys)
    except TimeoutError:
        late = True
    lasting = {t.name for t in context.tiers if t.inactive is None and t.backend.capabilities.persistent}
    presence = await context.presence(run.keys, context.config.lookup_deadline_s)
    plan = plan_prefix(run, {name: has for name, has in presence.items() if name in lasting})
    kept = min(plan.hit_tokens, stored)
    if kept >= stored:
        return DurableResult(durable_tokens=kept)
    failed = next((write.failed for write in writes if write.failed), StopReason.MISSING)
    return DurableResult(durable_tokens=kept, stopped=StopReason.DEADLINE if late else failed)


async def _copy_in(
    context: Context[KV], kv: KV, spans: Sequence[tuple[int, int]], entries: Sequence[Entry], tick: int
) -> StopReason | None:
    """Fill slots from the device and publish them; owns the slots, whatever happens to the caller."""
    reason: StopReason | None = StopReason.TRANSFER_ERROR
    try:
        await context.transfer.gather(kv, spans, [context.payload(entry) for entry in entries])
        reason = None
    except TransferError as error:
        context.log_transfer(error)
    finally:
        for entry in entries:
            if reason is not None:
                context.host.abandon(entry, reason)
            elif not context.host.publish(entry, tick):
                reason = StopReason.CLEARED
    return reason
