"""`CacheEngine`: lookup, retrieve, store. The degrade boundary.

Whatever breaks below, a caller sees a shorter hit with a reason. Only `UsageError` and cancellation leave `lookup`,
`retrieve`, `store` and `prefetch`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Generic, TypeVar

import numpy as np
import torch
from opentelemetry.metrics import Meter
from opentelemetry.trace import Tracer

from akvcache import operations, whole
from akvcache.assembly import assemble, dismantle
from akvcache.backend import Backend
from akvcache.clock import Clock
from akvcache.config import EngineConfig
from akvcache.connector import KVConnector
from akvcache.context import Budget, Context
from akvcache.errors import ConfigurationError, InvariantError, UsageError
from akvcache.host import HostLease
from akvcache.keys import CacheNamespace, RequestScope
from akvcache.request import Request, check_lease_s, check_seconds, prepare, without_keys
from akvcache.results import (
    ClearResult,
    FlushResult,
    Health,
    LookupResult,
    PrefetchResult,
    RetrieveResult,
    StopReason,
    StoreResult,
    TierHealth,
)
from akvcache.supervision import shielded
from akvcache.telemetry import Telemetry, names
from akvcache.tokens import Mask, TokenSequence

__all__ = ("CacheEngine",)

KV = TypeVar("KV")
OpenKV = TypeVar("OpenKV")
R = TypeVar("R")
_log = logging.getLogger("akvcache")
_NO_SCOPE = RequestScope()


class CacheEngine(Generic[KV]):
    """A KV cache over host memory and lower tiers. Made by `open`; bound to the loop that opened it.

    One engine serves any number of concurrent calls. Using it from another loop or after closing raises `UsageError`.
    """

    def __init__(
        self, context: Context[KV] | None, config: EngineConfig, telemetry: Telemetry, degraded: str | None
    ) -> None:
        self._context_or_none = context
        self._config = config
        self._telemetry = telemetry
        self._degraded = degraded
        self._loop = asyncio.get_running_loop()
        self._frozen = False
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else self._degraded or "healthy"
        return f"<CacheEngine {state} {self._context_or_none and self._context_or_none.host!r}>"

    @staticmethod
    @asynccontextmanager
    async def open(
        config: EngineConfig,
        *,
        connector: KVConnector[OpenKV],
        namespace: CacheNamespace | None = None,
        tiers: Sequence[Backend] | None = None,
        clock: Clock | None = None,
        tracer: Tracer | None = None,
        meter: Meter | None = None,
    ) -> AsyncGenerator[CacheEngine[OpenKV]]:
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
        engine: CacheEngine[OpenKV]
        try:
            parts = await assemble(
                config,
                connector,
                namespace,
                tiers,
                clock,
                telemetry,
                lambda reason: engine.degrade(reason),  # noqa: PLW0108 - bound later
                lambda: engine.check_usable(),  # noqa: PLW0108
            )
            engine = CacheEngine(parts, config, telemetry, None)
        except (ConfigurationError, UsageError):
            raise
        except Exception as error:  # noqa: BLE001 - engine edge: an engine that cannot open is an empty cache
            _log.exception("akvcache could not open and stays out of use")
            engine = CacheEngine(None, config, telemetry, f"init failed: {type(error).__name__}: {error}")
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
        check_lease_s(lease_s)
        request = await self._request(names.LOOKUP, tokens, scope, None)
        if request.stopped is not None:
            return LookupResult(hit_tokens=0, stopped=request.stopped)
        return await self._guard(
            operations.lookup(self._context, request, lease_s),
            lambda reason: LookupResult(hit_tokens=0, stopped=reason),
        )

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
            Waits for a running device copy, at most ``copy_timeout_s``; nothing writes into `kv` afterwards unless the
            device hung for longer.
        """
        budget = self._budget(deadline_s, self._config.retrieve_deadline_s)
        request = await self._request(names.RETRIEVE, tokens, scope, mask)
        self._check_kv(kv, request.num_tokens)
        self._check_lease(lease)

        def nothing(reason: StopReason | None) -> RetrieveResult:
            mask = torch.as_tensor(np.zeros(request.num_tokens, dtype=np.bool_))
            return RetrieveResult(mask=mask, hit_tokens=0, loaded_tokens=0, stopped=reason)

        if request.stopped is not None:
            return nothing(request.stopped)
        return await self._guard(
            operations.retrieve(self._context, request, kv, budget),
            nothing,
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
            Waits for a running device copy, at most ``copy_timeout_s``; nothing reads `kv` afterwards unless the device
            hung for longer. Chunks copied so far stay cached.
        """
        budget = self._budget(deadline_s, self._config.store_deadline_s)
        request = await self._request(names.STORE, tokens, scope, mask)
        self._check_kv(kv, request.num_tokens)
        if request.stopped is not None:
            return self._stored_nothing(request.num_tokens, request.stopped)
        return await self._guard(
            operations.store(self._context, request, kv, budget),
            lambda reason: self._stored_nothing(request.num_tokens, reason),
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
        budget = self._budget(deadline_s, self._config.retrieve_deadline_s)
        request = await self._request(names.PREFETCH, tokens, scope, None)
        if request.stopped is not None:
            return PrefetchResult(hit_tokens=0, ready_tokens=0, stopped=request.stopped)
        return await self._guard(
            operations.prefetch(self._context, request, budget),
            lambda reason: PrefetchResult(hit_tokens=0, ready_tokens=0, stopped=reason),
        )

    # -- the whole cache -----------------------------------------------------------------------------------------

    async def flush(self, *, timeout_s: float = 30.0) -> FlushResult:
        """Wait until every queued write has ended; the result says how many had not in time."""
        self.check_usable()
        context = self._context_or_none
        return FlushResult(pending_chunks=0) if context is None else await whole.flush(context, timeout_s)

    async def clear(self, *, timeout_s: float = 60.0) -> ClearResult:
        """Forget everything of this namespace in every tier; after this returns nothing from before is visible.

        Stores in flight, and retrieves that have not asked for all their chunks yet, end with `StopReason.CLEARED`. A
        tier that cannot be emptied is taken out of use and named in the result.
        """
        self.check_usable()
        context = self._context_or_none
        if context is None:
            return ClearResult(dropped_chunks=0, failed_tiers=())
        return await whole.clear(context, timeout_s)

    async def set_weights_version(self, weights_version: str) -> None:
        """Move to a namespace with other weights: nothing stored before is visible, until the version comes back.

        Entries of other versions in lower tiers stay there and leave by eviction.
        """
        self.check_usable()
        if self._context_or_none is not None:
            await whole.set_weights_version(self._context_or_none, weights_version)

    def freeze(self, frozen: bool) -> None:  # noqa: FBT001 - the name and form are part of the fixed API
        """Stop storing (True) or store again (False); reading goes on."""
        self.check_usable()
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
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is not self._loop:
            raise UsageError("this engine belongs to another event loop; open one per loop, or use SyncCacheEngine")

    def check_usable(self) -> None:
        """Raise `UsageError` on another loop than the engine's, or after closing."""
        self._check_loop()
        if self._closed:
            raise UsageError("this engine is closed")

    def _check_lease(self, lease: HostLease | None) -> None:
        context = self._context_or_none
        if lease is not None and not isinstance(lease, HostLease):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"lease must be the one of a lookup, got {lease!r}")
        if lease is not None and context is not None and not lease.belongs_to(context.host):
            raise UsageError(f"{lease!r} was granted by another engine")

    def _check_kv(self, kv: KV, num_tokens: int) -> None:
        if self._context_or_none is None:
            return
        try:
            self._context_or_none.connector.check(kv, num_tokens)
        except UsageError:
            raise
        except Exception as error:  # the connector is foreign code: what it cannot read is not a valid kv
            raise UsageError(f"kv is not understood: {type(error).__name__}: {error}") from error

    @staticmethod
    def _budget(deadline_s: float | None, default_s: float) -> Budget:
        check_seconds("deadline_s", deadline_s)
        return Budget(default_s if deadline_s is None else deadline_s)

    async def _request(self, op: str, tokens: TokenSequence, scope: RequestScope, mask: Mask | None) -> Request:
        """Validate a call and ask the gates; a closed one is counted as such, not as a miss."""
        self.check_usable()
        context = self._context_or_none
        if context is None:
            request = without_keys(tokens, mask)
        else:
            epoch = context.epoch
            request = replace(await prepare(context.schema, context.executor, tokens, scope, mask), epoch=epoch)
        stopped = self._closed_gate(op, request)
        if stopped is not None:
            with self._telemetry.request(op, request.num_tokens, request.keyed) as span:
                self._telemetry.finished(op, span, stopped, {})
        return replace(request, stopped=stopped)

    def _closed_gate(self, op: str, request: Request) -> StopReason | None:
        """Ask the gates in order: init failed or unhealthy, passive, frozen, too short."""
        if self._context_or_none is None or self._degraded is not None:
            return StopReason.UNHEALTHY
        if self._config.passive:
            return StopReason.PASSIVE
        if self._frozen and op == names.STORE:
            return StopReason.FROZEN
        if not request.run.keys or request.num_tokens < self._config.min_tokens:
            return StopReason.TOO_SHORT
        return None

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

    @staticmethod
    def _stored_nothing(num_tokens: int, stopped: StopReason) -> StoreResult:
        return StoreResult(total_tokens=num_tokens, stored_tokens=0, new_tokens=0, existing_tokens=0, stopped=stopped)
