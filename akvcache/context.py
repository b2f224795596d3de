"""What the operations of one engine share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from akvcache.config import EngineConfig
from akvcache.connector import KVConnector
from akvcache.errors import TransferError
from akvcache.frame import HEADER_BYTES, frame_bytes
from akvcache.host import HostTier
from akvcache.index import Entry
from akvcache.keys import ChunkKey, ChunkRun, KeySchema
from akvcache.layout import KVLayout
from akvcache.planner import HOST, Plan, plan_prefix
from akvcache.results import StopReason
from akvcache.supervision import BreakerState, Supervisor, settle
from akvcache.telemetry import Telemetry
from akvcache.tiers import Tier
from akvcache.transfer import Transfer
from akvcache.writeback import WriteQueue

__all__ = ("Budget", "Context", "by_source")

KV = TypeVar("KV")
_log = logging.getLogger("akvcache")
_BREAKER_VALUE: Final = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}


class Budget:
    """Time left of one call."""

    def __init__(self, seconds: float) -> None:
        self._end = asyncio.get_running_loop().time() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left; 0 when it is used up."""
        return max(0.0, self._end - asyncio.get_running_loop().time())


@dataclass(slots=True, kw_only=True)
class Context(Generic[KV]):
    """The parts of an open engine. Touched from its loop only.

    Attributes:
        epoch: Counts `clear` and weights changes; an operation of an older epoch publishes nothing.
        wave_chunks: Chunks per device copy.
        window_chunks: Chunks one retrieve may have in flight.
        degrade: Takes the engine out of use, with a reason.
        check_usable: Raises `UsageError` on another loop or after closing.
    """

    config: EngineConfig
    connector: KVConnector[KV]
    layout: KVLayout
    schema: KeySchema
    host: HostTier
    tiers: Sequence[Tier]
    queues: Sequence[WriteQueue]
    transfer: Transfer[KV]
    supervisor: Supervisor
    executor: ThreadPoolExecutor
    telemetry: Telemetry
    wave_chunks: int
    window_chunks: int
    degrade: Callable[[str], None]
    check_usable: Callable[[], None]
    epoch: int = 0

    def payload(self, entry: Entry) -> memoryview:
        """Return the payload inside an entry's slot."""
        return entry.slot.frame[HEADER_BYTES : HEADER_BYTES + self.layout.payload_bytes(entry.num_tokens)]

    def frame(self, entry: Entry) -> memoryview:
        """Return the whole frame inside an entry's slot."""
        return entry.slot.frame[: frame_bytes(self.layout.payload_bytes(entry.num_tokens))]

    async def presence(self, keys: Sequence[ChunkKey], timeout_s: float) -> dict[str, Sequence[bool]]:
        """Return which lower tier holds which of these consecutive chunks; all tiers are asked at once."""
        asked = {
            tier.name: self.supervisor.spawn(tier.contains(keys, timeout_s=timeout_s), name="contains")
            for tier in self.tiers
        }
        if asked:
            await asyncio.wait(asked.values())
        nothing = [False] * len(keys)
        return {name: nothing if task.cancelled() else task.result() for name, task in asked.items()}

    def observe(self) -> None:
        """Set the gauges."""
        pool, idle = self.host.pool, self.host.index.reclaimable
        in_use = pool.num_slots - pool.num_free - idle
        self.telemetry.pool({"free": pool.num_free, "cached": idle, "in_use": in_use})
        for queue in self.queues:
            state = _BREAKER_VALUE[queue.tier.breaker.state]
            self.telemetry.tier(queue.tier.name, state, queue.queued_bytes)

    async def plan(
        self, run: ChunkRun, in_host: Callable[[ChunkKey], object | None], timeout_s: float, *, first: int = 0
    ) -> Plan:
        """Return the longest cached run of chunks from `first` on.

        The lower tiers are asked for what is not in host memory only, so a prefix in host memory costs no I/O.

        Args:
            run: The prompt's chunks.
            in_host: What counts as being in host memory: `HostTier.resident` or `HostTier.expected`.
            timeout_s: Longest wait for the tiers.
            first: Index of the first chunk wanted.
        """
        part = ChunkRun(run.keys[first:], [stop - run.tokens_before(first) for stop in run.stops[first:]])
        host = [in_host(key) is not None for key in part.keys]
        presence: dict[str, Sequence[bool]] = {HOST: host}
        if not all(host):
            gap = host.index(False)
            lower = await self.presence(part.keys[gap:], timeout_s)
            presence.update({name: [False] * gap + list(has) for name, has in lower.items()})
        return plan_prefix(part, presence)

    def tier(self, name: str) -> Tier:
        """Return a lower tier by name."""
        return next(tier for tier in self.tiers if tier.name == name)

    async def copy(self, copy: Coroutine[object, object, StopReason | None], name: str) -> StopReason | None:
        """Run one device copy as an owned task, within its time.

        A copy that hangs keeps its slots and degrades the engine: a device that lost one copy is not to be trusted.

        Cancellation:
            Waits for the copy to end, at most its time, then raises.
        """
        limit = self.config.copy_timeout_s
        task = self.supervisor.spawn(copy, name=name)
        try:
            await asyncio.wait([task], timeout=limit)
        except asyncio.CancelledError:
            await settle(task, limit)
            raise
        finally:
            if not task.done():
                self.degrade(f"a device copy ({name}) took longer than {limit} s")
        if not task.done():
            return StopReason.TRANSFER_ERROR
        return StopReason.CLOSED if task.cancelled() else task.result()

    def log_transfer(self, error: TransferError) -> None:
        """Log a failed device copy with its cause."""
        _log.warning("device copy failed: %s", error, exc_info=error.__cause__)


def by_source(sources: Sequence[str], run: ChunkRun, first: int) -> dict[str, int]:
    """Return tier name to tokens for the chunks from `first` on that came from these sources."""
    tokens: dict[str, int] = {}
    for offset, source in enumerate(sources):
        start, stop = run.span(first + offset)
        tokens[source] = tokens.get(source, 0) + stop - start
    return tokens
