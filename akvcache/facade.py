"""The engine for callers without a running loop: vLLM's scheduler and workers, scripts, threads.

A private loop thread runs one `CacheEngine`. `submit` starts any of its calls and gives a ticket to poll, for callers
that must never wait; the named calls block, with a deadline.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Final, Generic, Self, TypeVar

from akvcache.backend import Backend
from akvcache.config import EngineConfig
from akvcache.connector import KVConnector
from akvcache.engine import CacheEngine
from akvcache.errors import UsageError
from akvcache.host import HostLease
from akvcache.keys import CacheNamespace, RequestScope
from akvcache.request import check_seconds
from akvcache.results import ClearResult, FlushResult, Health, LookupResult, RetrieveResult, StoreResult
from akvcache.tokens import Mask, TokenSequence

__all__ = ("SyncCacheEngine", "Ticket")

KV = TypeVar("KV")
T = TypeVar("T")
MARGIN_S: Final = 5.0
"""Added to an operation's own deadline before a blocking call gives up on the loop thread itself."""


class Ticket(Generic[T]):
    """A call that is under way on the loop thread."""

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def __repr__(self) -> str:
        return f"<Ticket {'done' if self._future.done() else 'running'}>"

    def poll(self) -> T | None:
        """Return the result if it is there, else None. Never blocks.

        Raises:
            UsageError: The call was not valid.
            CancelledError: It was cancelled (`concurrent.futures.CancelledError`).
        """
        return self._future.result() if self._future.done() else None

    def wait(self, timeout_s: float) -> T:
        """Return the result, waiting for it.

        Raises:
            TimeoutError: It did not come in time; the call goes on.
            UsageError: The call was not valid.
        """
        return self._future.result(timeout_s)

    def cancel(self) -> None:
        """Cancel the call; what that leaves behind, the call's own documentation says."""
        self._future.cancel()


class SyncCacheEngine(Generic[KV]):
    """A `CacheEngine` on a private loop thread. A context manager; safe from any thread but its own.

    Blocking calls raise TimeoutError if the loop thread does not answer within the operation's own deadline and a
    margin; the call then goes on, and `kv` must be left alone until `close`.

    Args are those of `CacheEngine.open`, but for clock, tracer and meter, which are the defaults.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        connector: KVConnector[KV],
        namespace: CacheNamespace | None = None,
        tiers: Sequence[Backend] | None = None,
    ) -> None:
        self._config = config
        self._stack = AsyncExitStack()
        self._lock = threading.RLock()  # between threads that submit and one that closes
        self._connector = connector
        self._namespace = namespace
        self._tiers = tiers
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._engine: CacheEngine[KV] | None = None

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def open(self) -> Self:
        """Start the thread and open the engine.

        Raises:
            ConfigurationError: The configuration is not usable.
        """
        with self._lock:
            if self._thread is not None:
                raise UsageError("this engine is open already")
            loop = self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_run, args=(loop,), name="akv-loop", daemon=True)
            self._thread.start()
        try:
            self._engine = asyncio.run_coroutine_threadsafe(self._enter(), loop).result()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Close the engine and end the thread; calls that are still under way are cancelled. Idempotent.

        Raises:
            UsageError: This is its own loop thread.
        """
        self._check_thread()
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop, self._thread, self._engine = None, None, None
        if loop is None or thread is None:
            return
        try:
            asyncio.run_coroutine_threadsafe(self._stack.aclose(), loop).result()
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def submit(self, call: Callable[[CacheEngine[KV]], Coroutine[object, object, T]]) -> Ticket[T]:
        """Start a call: ``engine.submit(lambda e: e.store(tokens, kv))``.

        Raises:
            UsageError: The engine is closed, or this is its own loop thread.
        """
        self._check_thread()
        with self._lock:
            if self._engine is None or self._loop is None:
                raise UsageError("this engine is closed")
            return Ticket(asyncio.run_coroutine_threadsafe(call(self._engine), self._loop))

    def lookup(
        self, tokens: TokenSequence, *, scope: RequestScope | None = None, lease_s: float | None = None
    ) -> LookupResult:
        """`CacheEngine.lookup`, blocking."""
        asked = scope or RequestScope()
        ticket = self.submit(lambda engine: engine.lookup(tokens, scope=asked, lease_s=lease_s))
        return ticket.wait(self._config.lookup_deadline_s + MARGIN_S)

    def retrieve(
        self,
        tokens: TokenSequence,
        kv: KV,
        *,
        scope: RequestScope | None = None,
        mask: Mask | None = None,
        lease: HostLease | None = None,
        deadline_s: float | None = None,
    ) -> RetrieveResult:
        """`CacheEngine.retrieve`, blocking."""
        asked = scope or RequestScope()
        ticket = self.submit(
            lambda engine: engine.retrieve(tokens, kv, scope=asked, mask=mask, lease=lease, deadline_s=deadline_s)
        )
        return ticket.wait(self._limit(deadline_s, self._config.retrieve_deadline_s))

    def store(
        self,
        tokens: TokenSequence,
        kv: KV,
        *,
        scope: RequestScope | None = None,
        mask: Mask | None = None,
        deadline_s: float | None = None,
    ) -> StoreResult:
        """`CacheEngine.store`, blocking until `kv` may be reused."""
        asked = scope or RequestScope()
        ticket = self.submit(lambda engine: engine.store(tokens, kv, scope=asked, mask=mask, deadline_s=deadline_s))
        return ticket.wait(self._limit(deadline_s, self._config.store_deadline_s))

    def release(self, lease: HostLease | None) -> None:
        """Release a lease of `lookup`. Idempotent; None, the lease of a lookup that was turned away, is fine."""
        with self._lock:
            if lease is not None and self._loop is not None:
                self._loop.call_soon_threadsafe(lease.release)

    def flush(self, *, timeout_s: float = 30.0) -> FlushResult:
        """`CacheEngine.flush`, blocking."""
        return self.submit(lambda engine: engine.flush(timeout_s=timeout_s)).wait(self._limit(timeout_s, timeout_s))

    def clear(self, *, timeout_s: float = 60.0) -> ClearResult:
        """`CacheEngine.clear`, blocking."""
        return self.submit(lambda engine: engine.clear(timeout_s=timeout_s)).wait(self._limit(timeout_s, timeout_s))

    def health(self) -> Health:
        """`CacheEngine.health`."""
        if self._engine is None:
            raise UsageError("this engine is closed")
        return self._engine.health()

    async def _enter(self) -> CacheEngine[KV]:
        opening = CacheEngine.open(
            self._config, connector=self._connector, namespace=self._namespace, tiers=self._tiers
        )
        return await self._stack.enter_async_context(opening)

    def _limit(self, deadline_s: float | None, default_s: float) -> float:
        check_seconds("deadline_s", deadline_s)
        limit = (default_s if deadline_s is None else float(deadline_s)) + self._config.copy_timeout_s + MARGIN_S
        return min(limit, threading.TIMEOUT_MAX)

    def _check_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise UsageError("called from the engine's own loop thread, which would wait for itself")


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, then end what is left on it, so that nobody waits for it for ever."""
    asyncio.set_event_loop(loop)
    loop.run_forever()
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left, timeout=MARGIN_S))
    loop.close()
