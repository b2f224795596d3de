"""The only place that spawns tasks, shields them, waits for threads and breaks circuits.

Owned by one engine and touched from its loop only.

Why not a TaskGroup around the caller's body: a child that raises would cancel the body of
``async with CacheEngine.open(...)``, which is inference. Here a child's failure is logged and kept to itself, and
closing waits for every child with a deadline (docs/adr/0004-supervision-without-a-task-group.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import enum
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, TypeVar

import anyio

if TYPE_CHECKING:
    from akvcache.clock import Clock

__all__ = (
    "BreakerState",
    "CircuitBreaker",
    "Supervisor",
    "join_executor",
    "run_blocking",
    "run_blocking_all",
    "settle",
    "shielded",
)

T = TypeVar("T")
_log = logging.getLogger("akvcache.supervision")


async def settle(future: asyncio.Future[T], timeout_s: float | None = None) -> None:
    """Wait until `future` is done, through any number of cancellations, for at most `timeout_s`.

    The shielded scope keeps a cancelled anyio scope around the caller from waking this wait at every turn of the
    loop. Never raises and never cancels `future`.
    """
    loop = asyncio.get_running_loop()
    end = None if timeout_s is None else loop.time() + timeout_s
    with anyio.CancelScope(shield=True):
        while not future.done():
            left = None if end is None else end - loop.time()
            if left is not None and left <= 0:
                return
            try:
                await asyncio.wait([future], timeout=left)
            except asyncio.CancelledError:
                continue


async def run_blocking(executor: Executor, function: Callable[..., T], *args: object) -> T:
    """Run a blocking call on `executor`, in the caller's context: its spans keep their parent there.

    Cancellation:
        A call that has not started is dropped. A running one cannot be stopped: this waits for it to end, then
        raises, so that no buffer is reused under a live thread.
    """
    pending = executor.submit(contextvars.copy_context().run, function, *args)
    future = asyncio.wrap_future(pending)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if not pending.cancel():
            await settle(future)
            if not future.cancelled():
                future.exception()
        raise


async def run_blocking_all(executor: Executor, calls: Sequence[Callable[[], T]]) -> list[asyncio.Future[T]]:
    """Run several blocking calls at once; return when all have ended, each with its result or failure.

    Cancellation:
        Like `run_blocking`: waits for those that have started.
    """
    pending = [executor.submit(contextvars.copy_context().run, call) for call in calls]
    futures = [asyncio.wrap_future(call) for call in pending]
    try:
        await asyncio.wait(futures)
    except asyncio.CancelledError:
        running = [future for call, future in zip(pending, futures, strict=True) if not call.cancel()]
        for future in running:
            await settle(future)
            if not future.cancelled():
                future.exception()
        raise
    return futures


async def shielded(coroutine: Coroutine[object, object, T]) -> T:
    """Run `coroutine` to its end whatever happens to the caller.

    Cancellation:
        Waits for the end of `coroutine`, then raises.
    """
    task = asyncio.create_task(coroutine)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await settle(task)
        if not task.cancelled():
            task.exception()  # seen: the cancellation is what the caller hears
        raise


async def join_executor(executor: Executor, timeout_s: float) -> bool:
    """Shut an executor down and wait for its threads, at most `timeout_s`; return whether they ended."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def join() -> None:
        executor.shutdown(wait=True, cancel_futures=True)
        with contextlib.suppress(RuntimeError):  # the loop is gone: nobody waits any more
            loop.call_soon_threadsafe(ended.set_result, None)

    threading.Thread(target=join, name="akv-join", daemon=True).start()
    await settle(ended, timeout_s)
    return ended.done()


class Supervisor:
    """Owns every background task of one engine.

    Invariant: a task is in the set from spawn until it is done.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: set[asyncio.Task[object]] = set()

    def __repr__(self) -> str:
        return f"<Supervisor {self._name} {len(self._tasks)} tasks>"

    @property
    def num_tasks(self) -> int:
        """Tasks that have not ended."""
        return len(self._tasks)

    def spawn(self, coroutine: Coroutine[object, object, T], *, name: str) -> asyncio.Task[T]:
        """Start a task that this supervisor owns; a failure is logged, never propagated."""
        task = asyncio.create_task(coroutine, name=f"akv-{name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("task %s of %s failed", task.get_name(), self._name, exc_info=task.exception())

    async def drain(self, timeout_s: float) -> int:
        """Wait for every task, then cancel what is left; return how many had to be cancelled."""
        end = asyncio.get_running_loop().time() + timeout_s
        while self._tasks and (left := end - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait(list(self._tasks), timeout=left)
        stuck = list(self._tasks)
        for task in stuck:
            task.cancel()
        if stuck:
            await asyncio.wait(stuck, timeout=1.0)
        return len(stuck)


class BreakerState(enum.Enum):
    """State of a circuit breaker."""

    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


class CircuitBreaker:
    """Keeps a failing tier out of the way.

    `failures` in a row open the circuit; after `reset_s` one probe is let through (half-open), and its outcome
    closes or reopens it. Pure state; touched from the engine's loop only.
    """

    def __init__(self, *, clock: Clock, failures: int, reset_s: float) -> None:
        self._clock = clock
        self._limit = failures
        self._reset_s = reset_s
        self._failed = 0
        self._opened_at: float | None = None
        self._probing = False

    @property
    def state(self) -> BreakerState:
        """The state now."""
        if self._opened_at is None:
            return BreakerState.CLOSED
        due = self._clock.now() - self._opened_at >= self._reset_s
        return BreakerState.HALF_OPEN if due else BreakerState.OPEN

    def allow(self) -> bool:
        """Return whether a call may go ahead; in half-open state only one may at a time."""
        state = self.state
        if state is BreakerState.HALF_OPEN and not self._probing:
            self._probing = True
            return True
        return state is BreakerState.CLOSED

    def succeeded(self) -> None:
        """Record a call that worked."""
        self._failed, self._opened_at, self._probing = 0, None, False

    def undecided(self) -> None:
        """Record a call that proved nothing; a probe it may have been is given back."""
        self._probing = False

    def failed(self) -> None:
        """Record a call that did not."""
        self._failed += 1
        if self._probing or self._failed >= self._limit:
            self._opened_at, self._probing = self._clock.now(), False
