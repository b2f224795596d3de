"""`CacheEngine`: lookup, retrieve, store. The degrade boundary.

Whatever breaks below, a caller sees a shorter hit with a reason. Only `UsageError` and cancellation leave `lookup`,
`retrieve`, `store` and `prefetch`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from opentelemetry.metrics import Meter
from opentelemetry.trace import Span, Tracer

from akvcache.assembly import assemble, dismantle
from akvcache.backend import Backend
from akvcache.clock import Clock
from akvcache.config import EngineConfig
from akvcache.connector import KVConnector
from akvcache.context import Budget, Context, by_source
from akvcache.errors import InvariantError, UsageError
from akvcache.host import HostLease
from akvcache.keys import CacheNamespace, ChunkRun, KeySchema, RequestScope, TokenSequence
from akvcache.loading import Loader
from akvcache.planner import Plan, plan_prefix
from akvcache.request import Mask, Request, prepare, without_keys
from akvcache.results import (
    NO_TIERS,
    ClearResult,
    DurableResult,
    FlushResult,
    Health,
    LookupResult,
    PrefetchResult,
    RetrieveResult,
    StopReason,
    StoreResult,
    TierHealth,
)
from akvcache.storing import Storer
from akvcache.supervision import shielded
from akvcache.telemetry import Phase, Telemetry, names

__all__ = ("CacheEngine",)

KV = TypeVar("KV")
R = TypeVar("R")
_log = logging.getLogger("akvcache")
_NO_SCOPE = RequestScope()


class CacheEngine(Generic[KV]):
    """A KV cache over host memory and lower tiers. Made by `open`; bound to the loop that opened it.

    One engine serves any number of concurrent calls. Using it from another loop or after closing raises `UsageError`.
    """

    def __init__(self, context: Context[KV] | None, config: EngineConfig, degraded: str | None) -> None:
        self._context_or_none = context
        self._config = config
        self._degraded = degraded
        self._loop = asyncio.get_running_loop()
        self._frozen = False
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else self._degraded or "healthy"
        return f"<CacheEngine {state} {self._context_or_none and self._context_or_none.host!r}>"

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        config: EngineConfig,
        *,
        connector: KVConnector[KV],
        namespace: CacheNamespace | None = None,
        tiers: Sequence[Backend] | None = None,
        clock: Clock | None = None,
        tracer: Tracer | None = None,
        meter: Meter | None = None,
    ) -> AsyncIterator[CacheEngine[KV]]:
        """Open an engine for the length of an ``async with`` block.

        Leaving the block stops intake, waits for queued writes (at most ``close_timeout_s``) and closes the tiers.

        Args:
            config: How it behaves.
            connector: The seam to the serving engine.
            namespace: Model, weights version and parallel ranks. Without one, engines of equal layout share entries
                on a shared tier, which a warning says.
            tiers: Backends to use instead of ``config.tiers``, fastest first.
            clock: Time of leases and breakers.
            tracer: Where spans go; the global provider's by default.
            meter: Where metrics go; the global provider's by default.

        Raises:
            ConfigurationError: The configuration is not usable. A tier that is merely broken does not raise: the
                engine opens without it, and `health` says why.
        """
        telemetry = Telemetry(tracer, meter)
        engine: CacheEngine[KV]
        try:
            parts = await assemble(
                config,
                connector,
                namespace,
                tiers,
                clock,
                telemetry,
                lambda reason: engine.degrade(reason),  # noqa: PLW0108 - bound later
            )
            engine = cls(parts, config, None)
        except (MemoryError, InvariantError, OSError) as error:
            _log.exception("akvcache could not open and stays out of use")
            engine = cls(None, config, f"init failed: {type(error).__name__}: {error}")
        try:
            yield engine
        finally:
            await engine.aclose()

    # -- the four calls ------------------------------------------------------------------------------------------

    async def lookup(
        self, tokens: TokenSequence, *, scope: RequestScope = _NO_SCOPE, lease_s: float | None = None
    ) -> LookupResult:
        """Return the longest cached prefix; no side effect but the lease.

        Args:
            tokens: The prompt.
            scope: What else changes the bytes.
            lease_s: Protect the prefix from eviction for this many seconds (at most ``max_lease_s``).

        Raises:
            UsageError: Tokens, scope or `lease_s` are not valid, or the engine is closed or on another loop.
        """
        if lease_s is not None and not 0 < lease_s < float("inf"):
            raise UsageError(f"lease_s must be a positive number of seconds, got {lease_s!r}")
        request = await self._request(tokens, scope, None)
        if request.stopped is not None:
            return LookupResult(hit_tokens=0, stopped=request.stopped)
        return await self._guard(
            self._lookup(request, lease_s), lambda reason: LookupResult(hit_tokens=0, stopped=reason)
        )

    async def _lookup(self, request: Request, lease_s: float | None) -> LookupResult:
        context, run = self._context, request.run
        with context.telemetry.request(names.LOOKUP, request.num_tokens) as span:
            plan = await context.plan(run, self._config.lookup_deadline_s)
            count = len(plan.sources)
            lease = None
            if lease_s is not None:
                seconds = min(lease_s, self._config.max_lease_s)
                lease = context.host.lease(run.keys[:count], run.stops, seconds)
            stopped = None if count == len(run.keys) else StopReason.MISSING
            self._finish(names.LOOKUP, span, stopped, {names.TOKENS_HIT: plan.hit_tokens}, plan.by_tier)
            return LookupResult(hit_tokens=plan.hit_tokens, by_tier=plan.by_tier, lease=lease, stopped=stopped)

    async def retrieve(
        self,
        tokens: TokenSequence,
        kv: KV,
        *,
        scope: RequestScope = _NO_SCOPE,
        mask: Mask | None = None,
        lease: HostLease | None = None,
        deadline_s: float | None = None,
    ) -> RetrieveResult:
        """Bring the longest cached prefix into `kv`.

        Args:
            tokens: The prompt.
            kv: Where the bytes go; what it is, the connector knows.
            scope: What else changes the bytes.
            mask: ``F...FT...T``: the F tokens are on the device already and are not touched; their number is a
                multiple of ``chunk_tokens``.
            lease: A lease of `lookup`, if there is one; it stays the caller's to release.
            deadline_s: Bring what can be brought in this many seconds.

        Raises:
            UsageError: An argument is not valid, before any I/O.

        Cancellation:
            Waits for a running device copy; nothing writes into `kv` afterwards.
        """
        request = await self._request(tokens, scope, mask, kv)
        self._check_lease(lease)
        empty = torch.zeros(request.num_tokens, dtype=torch.bool)
        if request.stopped is not None:
            return RetrieveResult(mask=empty, hit_tokens=0, loaded_tokens=0, stopped=request.stopped)
        return await self._guard(
            self._retrieve(request, kv, empty, self._budget(deadline_s, self._config.retrieve_deadline_s)),
            lambda reason: RetrieveResult(mask=empty.zero_(), hit_tokens=0, loaded_tokens=0, stopped=reason),
        )

    async def _retrieve(self, request: Request, kv: KV, mask: torch.Tensor, budget: Budget) -> RetrieveResult:
        context, run, first = self._context, request.run, request.first
        with context.telemetry.request(names.RETRIEVE, request.num_tokens) as span:
            plan, loader = await self._plan(request, budget, names.RETRIEVE)
            done = await loader.into(kv)
            for tier, phase in done.reads.items():
                context.telemetry.phase(names.RETRIEVE, names.TIER_READ, phase, tier=tier)
            context.telemetry.phase(names.RETRIEVE, names.H2D, done.h2d)
            start, stop = run.tokens_before(first), run.tokens_before(first + len(done.sources))
            mask[start:stop] = True
            stopped = done.stopped
            if stopped is None and first + len(plan.sources) < len(run.keys):
                stopped = StopReason.MISSING
            by_tier = by_source(done.sources, run, first)
            context.telemetry.broken_promise(plan.hit_tokens - (stop - start))
            counts = {names.TOKENS_HIT: plan.hit_tokens, names.TOKENS_LOADED: stop - start}
            self._finish(names.RETRIEVE, span, stopped, counts, by_tier)
            return RetrieveResult(
                mask=mask, hit_tokens=plan.hit_tokens, loaded_tokens=stop - start, by_tier=by_tier, stopped=stopped
            )

    async def store(
        self,
        tokens: TokenSequence,
        kv: KV,
        *,
        scope: RequestScope = _NO_SCOPE,
        mask: Mask | None = None,
        deadline_s: float | None = None,
    ) -> StoreResult:
        """Keep the KV of a prompt. Returns when `kv` may be reused: its bytes are in host memory.

        Writing to lower tiers goes on in the background; `StoreResult.durable` waits for it. Tokens behind the last
        whole chunk are not kept.

        Args:
            tokens: The prompt.
            kv: Where its KV lies.
            scope: What else changes the bytes.
            mask: ``F...FT...T``: the F tokens are not stored (they came from the cache).
            deadline_s: Keep what can be kept in this many seconds.

        Raises:
            UsageError: An argument is not valid, before any I/O.

        Cancellation:
            Waits for a running device copy; nothing reads `kv` afterwards. Chunks copied so far stay cached.
        """
        request = await self._request(tokens, scope, mask, kv)
        stopped = request.stopped
        if stopped is None and self._frozen:
            stopped = StopReason.FROZEN
        if stopped is not None:
            return self._stored_nothing(request.num_tokens, stopped)
        return await self._guard(
            self._store(request, kv, self._budget(deadline_s, self._config.store_deadline_s)),
            lambda reason: self._stored_nothing(request.num_tokens, reason),
        )

    async def _store(self, request: Request, kv: KV, budget: Budget) -> StoreResult:
        context, run, first = self._context, request.run, request.first
        with context.telemetry.request(names.STORE, request.num_tokens) as span:
            presence = await context.presence(run.keys, min(budget.left_s, self._config.lookup_deadline_s))
            head = next((i for i in range(first) if not self._cached(run, i, presence)), first)
            writes = {
                queue: queue.span(span.get_span_context(), run.keys) for queue in context.queues if queue.tier.usable
            }
            try:
                done = await Storer(context, run, first, presence, budget, writes).run(kv)
            finally:
                for write in writes.values():
                    write.end()
            context.telemetry.phase(names.STORE, names.LEASE, done.lease)
            context.telemetry.phase(names.STORE, names.D2H, done.d2h)
            stored = run.tokens_before(done.done if head == first else head)
            counts = {names.TOKENS_STORED: stored, names.TOKENS_NEW: done.new_tokens}
            self._finish(names.STORE, span, done.stopped, counts)
            why = f" ({done.stopped.value.replace('_', ' ')})" if done.stopped else ""
            _log.info("stored %d of %d tokens%s", stored, request.num_tokens, why)
            return StoreResult(
                total_tokens=request.num_tokens,
                stored_tokens=stored,
                new_tokens=done.new_tokens,
                existing_tokens=done.existing_tokens,
                stopped=done.stopped,
                _durable=lambda timeout_s: self._durable(run, stored, timeout_s),
            )

    async def prefetch(
        self, tokens: TokenSequence, *, scope: RequestScope = _NO_SCOPE, deadline_s: float | None = None
    ) -> PrefetchResult:
        """Bring the longest cached prefix from the lower tiers into host memory.

        Raises:
            UsageError: An argument is not valid, before any I/O.

        Cancellation:
            Reads that have begun go on and leave their chunks in host memory.
        """
        request = await self._request(tokens, scope, None)
        if request.stopped is not None:
            return PrefetchResult(hit_tokens=0, ready_tokens=0, stopped=request.stopped)
        return await self._guard(
            self._prefetch(request, self._budget(deadline_s, self._config.retrieve_deadline_s)),
            lambda reason: PrefetchResult(hit_tokens=0, ready_tokens=0, stopped=reason),
        )

    async def _prefetch(self, request: Request, budget: Budget) -> PrefetchResult:
        context, run = self._context, request.run
        with context.telemetry.request(names.PREFETCH, request.num_tokens) as span:
            plan, loader = await self._plan(request, budget, names.PREFETCH)
            done = await loader.into_host()
            for tier, phase in done.reads.items():
                context.telemetry.phase(names.PREFETCH, names.TIER_READ, phase, tier=tier)
            ready = run.tokens_before(len(done.sources))
            stopped = done.stopped or (StopReason.MISSING if len(plan.sources) < len(run.keys) else None)
            counts = {names.TOKENS_HIT: plan.hit_tokens, names.TOKENS_LOADED: ready}
            self._finish(names.PREFETCH, span, stopped, counts)
            return PrefetchResult(hit_tokens=plan.hit_tokens, ready_tokens=ready, stopped=stopped)

    # -- the whole cache -----------------------------------------------------------------------------------------

    async def flush(self, *, timeout_s: float = 30.0) -> FlushResult:
        """Wait until every queued write has ended; the result says how many had not in time."""
        self._check_usable()
        context = self._context_or_none
        if context is None:
            return FlushResult(pending_chunks=0)
        try:
            async with asyncio.timeout(timeout_s):
                for queue in context.queues:
                    await queue.idle()
        except TimeoutError:
            pass
        return FlushResult(pending_chunks=sum(queue.num_pending for queue in context.queues))

    async def clear(self, *, timeout_s: float = 60.0) -> ClearResult:
        """Forget everything of this namespace in every tier; after this returns nothing from before is visible.

        Stores and retrieves in flight end with `StopReason.CLEARED`. A tier that cannot be emptied is taken out of
        use and named in the result.
        """
        self._check_usable()
        context = self._context_or_none
        if context is None:
            return ClearResult(dropped_chunks=0, failed_tiers=())
        context.epoch += 1
        dropped = context.host.clear()
        for queue in context.queues:
            queue.clear(StopReason.CLEARED.value)
        failed = [tier.name for tier in context.tiers if not await tier.clear(context.schema, timeout_s=timeout_s)]
        return ClearResult(dropped_chunks=dropped, failed_tiers=failed)

    async def set_weights_version(self, weights_version: str) -> None:
        """Move to a namespace with other weights: nothing stored before is visible, until the version comes back.

        Entries of other versions in lower tiers stay there and leave by eviction.
        """
        self._check_usable()
        context = self._context_or_none
        if context is None:
            return
        old = context.schema
        namespace = replace(old.namespace, weights_version=weights_version)
        context.schema = KeySchema(namespace=namespace, layout=old.layout, chunker=old.chunker, algorithm=old.algorithm)
        context.epoch += 1
        context.host.clear()
        for tier in context.tiers:
            if tier.inactive is None:
                await tier.attach(context.schema)

    def freeze(self, frozen: bool) -> None:  # noqa: FBT001 - the name and form are part of the fixed API
        """Stop storing (True) or store again (False); reading goes on."""
        self._check_usable()
        self._frozen = frozen

    def health(self) -> Health:
        """Return whether the engine works and which tiers do."""
        tiers = self._context_or_none.tiers if self._context_or_none else ()
        return Health(
            degraded=self._degraded,
            tiers={t.name: TierHealth(inactive=t.inactive, breaker=t.breaker.state.value) for t in tiers},
        )

    def degrade(self, reason: str) -> None:
        """Take the engine out of use: from now on it answers as an empty cache."""
        if self._degraded is None:
            self._degraded = reason
            _log.error("akvcache is out of use: %s", reason)

    async def aclose(self) -> None:
        """Stop intake, wait for queued writes, close the tiers. Idempotent; leaving the ``async with`` calls it."""
        if self._closed:
            return
        self._check_loop()
        self._closed = True
        if self._context_or_none is not None:
            await shielded(dismantle(self._context_or_none))

    # -- shared steps --------------------------------------------------------------------------------------------

    @property
    def _context(self) -> Context[KV]:
        assert self._context_or_none is not None
        return self._context_or_none

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise UsageError("this engine belongs to another event loop; open one per loop, or use SyncCacheEngine")

    def _check_usable(self) -> None:
        self._check_loop()
        if self._closed:
            raise UsageError("this engine is closed")

    def _check_lease(self, lease: HostLease | None) -> None:
        context = self._context_or_none
        if lease is not None and context is not None and not lease.belongs_to(context.host):
            raise UsageError(f"{lease!r} was granted by another engine")

    @staticmethod
    def _budget(deadline_s: float | None, default_s: float) -> Budget:
        if deadline_s is not None and not deadline_s >= 0:
            raise UsageError(f"deadline_s must be a number of seconds, at least 0, got {deadline_s!r}")
        return Budget(default_s if deadline_s is None else deadline_s)

    async def _request(
        self, tokens: TokenSequence, scope: RequestScope, mask: Mask | None, kv: KV | None = None
    ) -> Request:
        """Validate a call, then ask the gates in order: init failed, unhealthy, passive, too short."""
        self._check_usable()
        context = self._context_or_none
        if context is None:
            return without_keys(tokens, mask)
        request = await prepare(context.schema, context.executor, tokens, scope, mask)
        if kv is not None:
            context.connector.check(kv, request.num_tokens)
        if self._degraded is not None:
            return replace(request, stopped=StopReason.UNHEALTHY)
        if self._config.passive:
            return replace(request, stopped=StopReason.PASSIVE)
        if not request.run.keys or request.num_tokens < self._config.min_tokens:
            return replace(request, stopped=StopReason.TOO_SHORT)
        return request

    async def _guard(self, call: Coroutine[object, object, R], empty: Callable[[StopReason], R]) -> R:
        """The engine edge: what is left of a fault becomes an empty answer and a degraded engine."""
        try:
            return await call
        except UsageError:
            raise
        except Exception as error:
            if self._config.strict:
                raise InvariantError(f"unexpected {type(error).__name__}: {error}") from error
            _log.exception("akvcache has a bug; please report it")
            self.degrade(f"{type(error).__name__}: {error}")
            return empty(StopReason.UNHEALTHY)

    async def _plan(self, request: Request, budget: Budget, op: str) -> tuple[Plan, Loader[KV]]:
        context, run, phase = self._context, request.run, Phase()
        with phase.piece():
            limit = min(budget.left_s, self._config.lookup_deadline_s)
            plan = await context.plan(run, limit, first=request.first)
        context.telemetry.phase(op, names.PLAN, phase)
        for tier in context.tiers:
            tier.touch(run.keys[: request.first + len(plan.sources)])
        return plan, Loader(context, run, request.first, plan, budget)

    def _cached(self, run: ChunkRun, index: int, presence: Mapping[str, Sequence[bool]]) -> bool:
        return self._context.host.resident(run.keys[index]) is not None or any(has[index] for has in presence.values())

    def _finish(
        self,
        op: str,
        span: Span,
        stopped: StopReason | None,
        tokens: Mapping[str, int],
        by_tier: Mapping[str, int] = NO_TIERS,
    ) -> None:
        telemetry = self._context.telemetry
        telemetry.finished(op, span, stopped.value if stopped else None, tokens)
        telemetry.served(op, span, by_tier)

    async def _durable(self, run: ChunkRun, stored: int, timeout_s: float | None) -> DurableResult:
        """Wait for the writes of a store, then ask the persistent tiers what they hold of it."""
        context = self._context
        try:
            async with asyncio.timeout(self._config.store_deadline_s if timeout_s is None else timeout_s):
                for queue in context.queues:
                    await queue.settled(run.keys)
        except TimeoutError:
            return DurableResult(durable_tokens=0, stopped=StopReason.DEADLINE)
        lasting = {t.name for t in context.tiers if t.inactive is None and t.backend.capabilities.persistent}
        presence = await context.presence(run.keys, self._config.lookup_deadline_s)
        plan = plan_prefix(run, {name: has for name, has in presence.items() if name in lasting})
        kept = min(plan.hit_tokens, stored)
        if kept >= stored:
            return DurableResult(durable_tokens=kept)
        reasons = [queue.failed for queue in context.queues if queue.failed is not None]
        return DurableResult(durable_tokens=kept, stopped=reasons[0] if reasons else StopReason.MISSING)

    @staticmethod
    def _stored_nothing(num_tokens: int, stopped: StopReason) -> StoreResult:
        return StoreResult(total_tokens=num_tokens, stored_tokens=0, new_tokens=0, existing_tokens=0, stopped=stopped)
