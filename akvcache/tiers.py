"""One lower tier: a backend behind deadlines, concurrency limits, retries, a circuit breaker and checksums.

Owned by the engine, touched from its loop only. This is the tier edge: nothing raises out of here but cancellation; a
tier that fails is a miss, a metric and a log line.

A backend call that has a buffer is never cancelled while the engine is open. One that overruns its time counts as
failed at once, and whoever owns the buffer keeps it until the call really ends (`Outcome.late`).
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

from akvcache import frame as frames
from akvcache.backend import Backend, BackendContext
from akvcache.config import EngineConfig
from akvcache.errors import BackendError, BackendTimeout, CapacityExhausted, ChunkCorrupt, ConfigurationError
from akvcache.keys import ChunkKey, KeySchema
from akvcache.supervision import BreakerState, CircuitBreaker, Supervisor, run_blocking
from akvcache.telemetry import Telemetry

__all__ = ("Outcome", "OutcomeKind", "Tier")

T = TypeVar("T")
_log = logging.getLogger("akvcache.tiers")
READ_AHEAD_BYTES: Final = 100 << 20
"""Bytes that reads have in flight at most, but two reads always: large chunks read all at once would also all arrive at
once, and their verification and copies could not overlap the disk (docs/reference/benchmarks.md)."""
MISSES_LOGGED_S: Final = 5.0


class OutcomeKind(enum.StrEnum):
    """How a call to a tier ended."""

    OK = "ok"
    MISSING = "missing"
    CORRUPT = "corrupt"
    CAPACITY = "capacity"
    ERROR = "error"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one call, and the call itself if it is still running and still owns its buffer."""

    kind: OutcomeKind
    late: asyncio.Task[object] | None = None


class Tier:
    """A lower tier.

    Args:
        backend: Stores the frames.
        config: Deadlines, retries, breaker.
        supervisor: Owns the calls.
        executor: Threads that verify.
        breaker: Keeps the tier out of the way while it fails.
        telemetry: Where operations are counted.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        config: EngineConfig,
        supervisor: Supervisor,
        executor: ThreadPoolExecutor,
        breaker: CircuitBreaker,
        telemetry: Telemetry,
    ) -> None:
        self.backend = backend
        self.name = backend.name
        self.inactive: str | None = "not open"
        self.breaker = breaker
        self._config = config
        self._supervisor = supervisor
        self._executor = executor
        self._telemetry = telemetry
        self._hidden = 0
        self._doomed: set[ChunkKey] = set()
        self._reads = asyncio.Semaphore(1)
        self._reading = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._logged_at = -MISSES_LOGGED_S

    def __repr__(self) -> str:
        return f"<Tier {self.name} {self.inactive or self.breaker.state.value} {self._reading} reading>"

    async def open(self, context: BackendContext, schema: KeySchema) -> None:
        """Open the backend; a backend that cannot work leaves the tier inactive with the reason.

        Raises:
            ConfigurationError: The backend is configured wrongly.
        """
        try:
            async with asyncio.timeout(self._config.open_timeout_s):
                await self.backend.open(context)
            ahead = max(2, READ_AHEAD_BYTES // context.frame_bytes)
            self._reads = asyncio.Semaphore(min(ahead, self.backend.capabilities.max_reads))
            await self.backend.attach(schema.namespace_id, schema.describe())
            self.inactive = None
        except ConfigurationError:
            raise
        except Exception as error:  # noqa: BLE001 - tier edge: a backend that fails to open is an inactive tier
            self.inactive = f"{type(error).__name__}: {error}"
            _log.warning("tier %s is inactive: %s", self.name, self.inactive)

    async def attach(self, schema: KeySchema) -> None:
        """Tell the backend about another namespace; a tier that does not take it in time goes out of use."""
        if self.inactive is not None:
            return
        call = self.backend.attach(schema.namespace_id, schema.describe())
        task = self._supervisor.spawn(_caught(call), name=f"{self.name}-attach")
        await asyncio.wait([task], timeout=self._config.io_timeout_s)
        _, error = task.result() if task.done() and not task.cancelled() else (None, BackendTimeout())
        if error is not None:
            self.retire(f"namespace refused: {type(error).__name__}: {error}")

    @property
    def usable(self) -> bool:
        """Whether it is worth asking; does not use up a half-open probe."""
        return self.inactive is None and not self._hidden and self.breaker.state is not BreakerState.OPEN

    @property
    def num_doomed(self) -> int:
        """Chunks it hides until they are deleted."""
        return len(self._doomed)

    @property
    def quiet(self) -> asyncio.Event:
        """Set while nobody reads; writers beyond the first wait for it, so reads go ahead."""
        return self._quiet

    # -- calls ---------------------------------------------------------------------------------------------------

    async def contains(self, keys: Sequence[ChunkKey], *, timeout_s: float) -> Sequence[bool]:
        """Return which of these consecutive chunks the tier holds; all False if it cannot tell in time."""
        if not keys or not self.usable:
            return [False] * len(keys)
        outcome, found = await self._call("contains", lambda: self.backend.contains(keys), timeout_s, retries=0)
        if outcome.kind is not OutcomeKind.OK or found is None or not self.usable:
            return [False] * len(keys)
        if self._doomed:
            return [has and key not in self._doomed for key, has in zip(keys, found, strict=True)]
        return found

    async def read(self, key: ChunkKey, into: memoryview, *, num_tokens: int, part_bytes: Sequence[int]) -> Outcome:
        """Read a frame and prove that it is the chunk of `key`; a bad one is dropped."""
        if not self.usable or key in self._doomed:
            return Outcome(OutcomeKind.UNAVAILABLE)
        self._reading += 1
        self._quiet.clear()
        try:
            async with self._reads:
                outcome, size = await self._call(
                    "read", lambda: self.backend.read(key, into), self._config.io_timeout_s, self._config.io_retries
                )
        finally:
            self._reading -= 1
            if not self._reading:
                self._quiet.set()
        if outcome.kind is not OutcomeKind.OK:
            return outcome
        if size is None:
            return Outcome(OutcomeKind.MISSING)
        try:
            await run_blocking(self._executor, _verify, into, size, key, num_tokens, part_bytes)
        except ChunkCorrupt as error:
            self._telemetry.corrupt(self.name)
            self._log("tier %s: dropped a corrupt chunk: %s", error)
            await self._drop(key, retries=0)
            return Outcome(OutcomeKind.CORRUPT)
        return outcome

    async def write(self, key: ChunkKey, frame: memoryview) -> Outcome:
        """Write a sealed frame."""
        if not self.usable or key in self._doomed:
            return Outcome(OutcomeKind.UNAVAILABLE)
        outcome, _ = await self._call(
            "write", lambda: self.backend.write(key, frame), self._config.io_timeout_s, self._config.io_retries
        )
        return outcome

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Tell the backend that one request used this path."""
        if self.inactive is None:
            try:
                self.backend.touch(keys)
            except Exception as error:  # noqa: BLE001 - tier edge: order of eviction is not worth a request
                self._log("tier %s: touch failed: %s", error)

    async def _call(
        self, op: str, call: Callable[[], Coroutine[object, object, T]], timeout_s: float, retries: int
    ) -> tuple[Outcome, T | None]:
        """Make one call within its time, feeding the breaker; retry what the backend calls retryable."""
        kind, late = OutcomeKind.UNAVAILABLE, None
        for attempt in range(retries + 1):
            if not self.breaker.allow():
                break
            task = self._supervisor.spawn(_caught(call()), name=f"{self.name}-{op}")
            try:
                await asyncio.wait([task], timeout=timeout_s)
            except asyncio.CancelledError:
                self.breaker.undecided()
                raise
            if not task.done():
                kind, late = OutcomeKind.TIMEOUT, task
                patience = min(self._config.lookup_deadline_s, self._config.io_timeout_s) - timeout_s
                if patience > 0:  # the caller's own deadline was short: no fault of the tier yet
                    self._supervisor.spawn(self._judge(task, patience), name=f"{self.name}-judge")
                    break
                self.breaker.failed()
                self._log("tier %s: %s took longer than %.1f s", op, timeout_s)
                break
            value, error = task.result() if not task.cancelled() else (None, BackendError("cancelled while closing"))
            if error is None:
                self.breaker.succeeded()
                self._telemetry.operation(self.name, op, OutcomeKind.OK)
                return Outcome(OutcomeKind.OK), value
            if isinstance(error, CapacityExhausted):
                kind = OutcomeKind.CAPACITY
                self.breaker.succeeded()  # it answered: full is not broken
                break
            kind = OutcomeKind.ERROR
            self.breaker.failed()
            self._log("tier %s: %s failed: %s", op, error)
            if not (isinstance(error, BackendError) and error.retryable) or attempt == retries:
                break
        self._telemetry.operation(self.name, op, kind)
        return Outcome(kind, late), None

    async def _judge(self, call: asyncio.Task[tuple[T | None, Exception | None]], timeout_s: float) -> None:
        """Tell the breaker about a call whose caller did not wait: what counts is the tier's own time."""
        await asyncio.wait([call], timeout=timeout_s)
        if call.cancelled():
            self.breaker.undecided()
        elif call.done() and call.result()[1] is None:
            self.breaker.succeeded()
        else:
            self.breaker.failed()

    def _log(self, message: str, *args: object) -> None:
        """Warn at most once per `MISSES_LOGGED_S`; the metrics count every one."""
        now = asyncio.get_running_loop().time()
        if now - self._logged_at >= MISSES_LOGGED_S:
            self._logged_at = now
            _log.warning(message, self.name, *args)

    # -- all -----------------------------------------------------------------------------------------------------

    def doom(self, key: ChunkKey, late: asyncio.Task[object] | asyncio.Future[object]) -> None:
        """Hide a key whose write was overtaken by `clear`, and delete it when that write has ended."""
        self._doomed.add(key)
        self._supervisor.spawn(self._bury(key, late), name=f"{self.name}-bury")

    async def _bury(self, key: ChunkKey, late: asyncio.Future[object]) -> None:
        await asyncio.wait([late])
        await self._drop(key, retries=1)

    async def _drop(self, key: ChunkKey, *, retries: int) -> None:
        """Delete a chunk that must not be served again; what cannot be deleted stays hidden."""
        self._doomed.add(key)
        outcome, _ = await self._call("delete", lambda: self.backend.delete(key), self._config.io_timeout_s, retries)
        if outcome.kind is OutcomeKind.OK:
            self._doomed.discard(key)

    def empty(self, schema: KeySchema) -> asyncio.Task[None]:
        """Start to delete everything of a namespace; the tier shows and takes nothing until that has ended.

        A failure takes the tier out of use.
        """
        self._hidden += 1
        return self._supervisor.spawn(self._empty(schema), name=f"{self.name}-clear")

    async def _empty(self, schema: KeySchema) -> None:
        try:
            stored = [chunk.key async for chunk in self.backend.scan(schema.namespace_id)]
            for key in stored:
                await self.backend.delete(key)
        except Exception as error:  # noqa: BLE001 - tier edge
            self.retire(f"clear failed: {type(error).__name__}: {error}")
        finally:
            self._hidden -= 1

    def retire(self, reason: str) -> None:
        """Take the tier out of use for good."""
        if self.inactive is None:
            self.inactive = reason
            _log.warning("tier %s is inactive: %s", self.name, reason)

    async def aclose(self, timeout_s: float) -> None:
        """Close the backend; never raises."""
        self.inactive = "closed"
        task = self._supervisor.spawn(_caught(self.backend.aclose()), name=f"{self.name}-close")
        await asyncio.wait([task], timeout=timeout_s)
        if not task.done():
            _log.warning("tier %s did not close within %.1f s", self.name, timeout_s)
        elif not task.cancelled() and (error := task.result()[1]) is not None:
            _log.warning("tier %s: closing failed: %s", self.name, error)


async def _caught(call: Coroutine[object, object, T]) -> tuple[T | None, Exception | None]:
    """Turn an exception into a value, so that a late one is nobody's unhandled error."""
    try:
        return await call, None
    except Exception as error:  # noqa: BLE001 - tier edge: a plug-in may raise anything
        return None, error


def _verify(into: memoryview, size: int, key: ChunkKey, num_tokens: int, part_bytes: Sequence[int]) -> None:
    if size != len(into):
        raise ChunkCorrupt(f"stored frame has {size} bytes, expected {len(into)}", key=key)
    frames.verify(into, key=key, num_tokens=num_tokens, part_bytes=part_bytes)
