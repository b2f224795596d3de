"""Copies between device and host, awaitable.

Owned by the engine. Copies run on copy threads, never on the loop. Where the connector returns a device event, one
waiter thread polls all pending events and wakes the loop: a blocking wait per copy would eat the thread pool, and a
device-wide synchronise would stall inference.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final, Generic, TypeVar

from akvcache.connector import DeviceEvent, KVConnector, Span
from akvcache.errors import TransferError
from akvcache.supervision import run_blocking_all

__all__ = ("EventWaiter", "Transfer")

KV = TypeVar("KV")
POLL_S: Final = 50e-6


class EventWaiter:
    """One thread that turns device events into futures; started on first use."""

    def __init__(self) -> None:
        self._pending: list[tuple[DeviceEvent, Future[None]]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, event: DeviceEvent) -> Future[None]:
        """Return a future that ends when `event` has happened, or fails if the event does."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # a waiter that gives up must not cancel it under the thread
        with self._changed:
            if self._closed:
                raise TransferError("the engine is closing")
            self._pending.append((event, future))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="akv-events", daemon=True)
                self._thread.start()
            self._changed.notify()
        return future

    def close(self) -> None:
        """Tell the thread to fail what is pending and end; does not wait for it."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._pending and not self._closed:
                    self._changed.wait()
                if self._closed:
                    for _, future in self._pending:
                        future.set_exception(TransferError("the engine closed before the device finished"))
                    return
                self._pending = [item for item in self._pending if not self._ended(*item)]
            time.sleep(POLL_S)

    @staticmethod
    def _ended(event: DeviceEvent, future: Future[None]) -> bool:
        try:
            if not event.query():
                return False
        except Exception as error:  # noqa: BLE001 - a device error must reach the waiter, not kill this thread
            future.set_exception(error)
            return True
        future.set_result(None)
        return True


class Transfer(Generic[KV]):
    """Runs a connector's copies on threads and waits for their events.

    Args:
        connector: Does the copies.
        executor: Where they run.
        threads: How many of its threads share the chunks of one wave.
    """

    def __init__(self, connector: KVConnector[KV], executor: ThreadPoolExecutor, threads: int = 1) -> None:
        self._connector = connector
        self._executor = executor
        self._threads = threads
        self._waiter = EventWaiter()

    async def gather(self, kv: KV, spans: Sequence[Span], out: Sequence[memoryview]) -> None:
        """Copy chunks from the device into host slots; done when the bytes are there.

        Raises:
            TransferError: The connector or the device failed, cause kept.

        Cancellation:
            Waits for the copying thread to end, then raises, but not for the device: run it as an owned task.
        """
        await self._copy(self._connector.gather, kv, spans, out)

    async def scatter(self, kv: KV, spans: Sequence[Span], src: Sequence[memoryview]) -> None:
        """Copy chunks from host slots to the device; otherwise like `gather`."""
        await self._copy(self._connector.scatter, kv, spans, src)

    async def _copy(
        self,
        copy: Callable[[KV, Sequence[Span], Sequence[memoryview]], DeviceEvent | None],
        kv: KV,
        spans: Sequence[Span],
        buffers: Sequence[memoryview],
    ) -> None:
        share = -(-len(spans) // self._threads)
        parts = [slice(start, start + share) for start in range(0, len(spans), share)]
        calls = [partial(copy, kv, spans[part], buffers[part]) for part in parts]
        try:
            copies = await run_blocking_all(self._executor, calls)
            # Every event is waited for, also when a part has failed: the others still use their slots.
            events = [event for done in copies if done.exception() is None and (event := done.result()) is not None]
            await self._passed(events)
            for done in copies:
                done.result()
        except Exception as error:  # the connector is foreign code: whatever it raises is a failed copy
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"{type(error).__name__}: {error}") from error

    async def _passed(self, events: Sequence[DeviceEvent]) -> None:
        """Wait until all events have happened or failed; raise the first failure then."""
        waits = [asyncio.wrap_future(self._waiter.watch(event)) for event in events]
        if not waits:
            return
        try:
            await asyncio.wait(waits)
        except asyncio.CancelledError:
            for wait in waits:
                wait.cancel()
            raise
        failures = [failure for wait in waits if (failure := wait.exception()) is not None]
        if failures:
            raise failures[0]

    def close(self) -> None:
        """Stop the waiter thread; never blocks."""
        self._waiter.close()
