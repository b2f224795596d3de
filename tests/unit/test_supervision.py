"""Threads outlive cancellation, commits finish, tasks have an owner, circuits break and heal."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import anyio
import pytest

from akvcache.supervision import (
    BreakerState,
    CircuitBreaker,
    Supervisor,
    join_executor,
    run_blocking,
    run_blocking_all,
    settle,
    shielded,
)
from akvcache.testing import VirtualClock


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(1, thread_name_prefix="akv-test")
    yield pool
    pool.shutdown(wait=True)


class Job:
    """A blocking call that the test lets go, and that says when it runs and when it has ended."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._go = threading.Event()
        self.started = asyncio.Event()
        self.ended = False

    def __call__(self, result: object = "done") -> object:
        self._loop.call_soon_threadsafe(self.started.set)
        assert self._go.wait(10.0)
        self.ended = True
        if isinstance(result, Exception):
            raise result
        return result

    def release(self) -> None:
        self._go.set()


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class TestRunBlocking:
    @pytest.mark.asyncio
    async def test_result_and_exception_come_back(self, executor: ThreadPoolExecutor) -> None:
        assert await run_blocking(executor, max, 3, 5) == 5
        with pytest.raises(ValueError, match="invalid literal"):
            await run_blocking(executor, int, "x")

    @pytest.mark.asyncio
    @pytest.mark.parametrize("cancels", [1, 2, 5])
    async def test_a_running_call_is_waited_for_however_often_it_is_cancelled(
        self, executor: ThreadPoolExecutor, cancels: int
    ) -> None:
        job = Job()
        task = asyncio.create_task(run_blocking(executor, job))
        await job.started.wait()
        for _ in range(cancels):
            task.cancel()
            await turns()
            assert not task.done(), "the thread still runs"
        job.release()
        await asyncio.wait([task])
        assert task.cancelled()
        assert job.ended

    @pytest.mark.asyncio
    async def test_a_call_that_has_not_started_is_dropped(self, executor: ThreadPoolExecutor) -> None:
        blocker, queued = Job(), Job()
        first = asyncio.create_task(run_blocking(executor, blocker))
        await blocker.started.wait()
        second = asyncio.create_task(run_blocking(executor, queued))
        await turns()
        second.cancel()
        await asyncio.wait([second])
        assert second.cancelled()
        blocker.release()
        assert await first == "done"
        assert await run_blocking(executor, max, 1, 2) == 2
        assert not queued.ended

    @pytest.mark.asyncio
    async def test_an_error_of_a_cancelled_call_is_nobodys(self, executor: ThreadPoolExecutor) -> None:
        job = Job()
        task = asyncio.create_task(run_blocking(executor, job, ValueError("too late")))
        await job.started.wait()
        task.cancel()
        await turns()
        job.release()
        await asyncio.wait([task])
        assert task.cancelled()

    @pytest.mark.asyncio
    async def test_a_cancelled_anyio_scope_waits_too(self, executor: ThreadPoolExecutor) -> None:
        job = Job()
        with anyio.CancelScope() as scope:
            asyncio.get_running_loop().call_later(0.05, job.release)
            async with anyio.create_task_group() as group:
                group.start_soon(_cancel_when, job.started.wait, scope)
                try:
                    await run_blocking(executor, job)
                finally:
                    assert job.ended
        assert scope.cancelled_caught

    @pytest.mark.asyncio
    async def test_asyncio_timeout_ends_when_the_thread_has(self, executor: ThreadPoolExecutor) -> None:
        job = Job()
        asyncio.get_running_loop().call_later(0.05, job.release)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await run_blocking(executor, job)
        assert job.ended

    @pytest.mark.asyncio
    async def test_the_callers_context_is_seen_in_the_thread(self, executor: ThreadPoolExecutor) -> None:
        variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")
        variable.set("mine")
        assert await run_blocking(executor, variable.get) == "mine"


class TestRunBlockingAll:
    @pytest.mark.asyncio
    async def test_results_come_in_order_and_failures_where_they_happened(self) -> None:
        executor = ThreadPoolExecutor(3)
        good, bad = Job(), Job()
        good.release()
        bad.release()
        done = await run_blocking_all(executor, [lambda: good(1), lambda: bad(ValueError("no")), lambda: 3])
        assert [future.exception() is None for future in done] == [True, False, True]
        assert (done[0].result(), done[2].result()) == (1, 3)
        executor.shutdown(wait=True)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("cancels", [1, 3])
    async def test_cancelled_it_waits_for_what_runs_and_drops_the_rest(self, cancels: int) -> None:
        executor = ThreadPoolExecutor(2)
        running, failing, queued = Job(), Job(), Job()
        task = asyncio.create_task(
            run_blocking_all(executor, [running, lambda: failing(ValueError("too late")), queued])
        )
        await running.started.wait()
        await failing.started.wait()
        for _ in range(cancels):
            task.cancel()
            await turns()
            assert not task.done()
        running.release()
        failing.release()
        await asyncio.wait([task])
        assert task.cancelled()
        assert running.ended
        assert not queued.started.is_set(), "what had not started is dropped first"
        executor.shutdown(wait=True)

    @pytest.mark.asyncio
    async def test_each_call_sees_the_callers_context(self, executor: ThreadPoolExecutor) -> None:
        variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")
        variable.set("mine")
        assert [done.result() for done in await run_blocking_all(executor, [variable.get] * 3)] == ["mine"] * 3


async def _cancel_when(event: Callable[[], Awaitable[object]], scope: anyio.CancelScope) -> None:
    await event()
    scope.cancel()


class TestShielded:
    @pytest.mark.asyncio
    async def test_result_and_exception_come_back(self) -> None:
        async def work(error: bool) -> int:
            await asyncio.sleep(0)
            if error:
                raise ValueError("no")
            return 7

        assert await shielded(work(False)) == 7
        with pytest.raises(ValueError, match="no"):
            await shielded(work(True))

    @pytest.mark.asyncio
    @pytest.mark.parametrize("cancels", [1, 2])
    @pytest.mark.parametrize("fails", [False, True])
    async def test_it_ends_before_the_cancellation_is_heard(self, cancels: int, fails: bool) -> None:
        gate = asyncio.Event()
        ended = False

        async def work() -> None:
            nonlocal ended
            await gate.wait()
            ended = True
            if fails:
                raise ValueError("nobody hears this")

        task = asyncio.create_task(shielded(work()))
        await turns()
        for _ in range(cancels):
            task.cancel()
            await turns()
            assert not task.done()
        gate.set()
        await asyncio.wait([task])
        assert task.cancelled()
        assert ended

    @pytest.mark.asyncio
    async def test_it_ends_inside_a_cancelled_anyio_scope(self) -> None:
        gate = asyncio.Event()
        ended = False

        async def work() -> None:
            nonlocal ended
            await gate.wait()
            ended = True

        with anyio.CancelScope() as scope:
            scope.cancel()
            asyncio.get_running_loop().call_later(0.02, gate.set)
            await shielded(work())
        assert scope.cancelled_caught
        assert ended

    @pytest.mark.asyncio
    async def test_work_that_cancels_itself_is_a_cancellation(self) -> None:
        async def work() -> None:
            raise asyncio.CancelledError

        with pytest.raises(asyncio.CancelledError):
            await shielded(work())


class TestSettle:
    @pytest.mark.asyncio
    async def test_it_swallows_cancellations_until_the_future_is_done(self) -> None:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(settle(future))
        await turns()
        for _ in range(3):
            task.cancel()
            await turns()
            assert not task.done()
        future.set_result(1)
        await task
        assert not task.cancelled()

    @pytest.mark.asyncio
    async def test_it_gives_up_after_its_time_and_leaves_the_future_alone(self) -> None:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        await settle(future, 0.01)
        await settle(future, 0)
        assert not future.done()

    @pytest.mark.asyncio
    async def test_a_failed_future_does_not_raise(self) -> None:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        future.set_exception(ValueError("no"))
        await settle(future, 1)
        assert isinstance(future.exception(), ValueError)

    @pytest.mark.asyncio
    async def test_a_cancelled_anyio_scope_does_not_spin(self) -> None:
        """Rule 3.7.4: without the shielded scope the wait woke thousands of times."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waits = 0
        real_wait = asyncio.wait

        async def counted(*args: object, **kwargs: object) -> object:
            nonlocal waits
            waits += 1
            return await real_wait(*args, **kwargs)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch, anyio.CancelScope() as scope:
            patch.setattr(asyncio, "wait", counted)
            scope.cancel()
            asyncio.get_running_loop().call_later(0.05, future.set_result, None)
            await settle(future)
        assert future.done()
        assert waits <= 3


class TestJoinExecutor:
    @pytest.mark.asyncio
    async def test_threads_end(self) -> None:
        executor = ThreadPoolExecutor(2, thread_name_prefix="akv-test")
        await run_blocking(executor, max, 1, 2)
        assert await join_executor(executor, 5)

    @pytest.mark.asyncio
    async def test_a_thread_that_does_not_end_is_reported_and_queued_calls_are_dropped(self) -> None:
        executor = ThreadPoolExecutor(1, thread_name_prefix="akv-test")
        job, queued = Job(), Job()
        running = asyncio.create_task(run_blocking(executor, job))
        await job.started.wait()
        waiting = asyncio.create_task(run_blocking(executor, queued))
        await turns()
        assert not await join_executor(executor, 0.01)
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        job.release()
        assert await running == "done"

    def test_a_join_that_outlives_the_loop_is_quiet(self) -> None:
        executor = ThreadPoolExecutor(1, thread_name_prefix="akv-test")
        go = threading.Event()

        async def main() -> bool:
            executor.submit(go.wait, 10)
            return await join_executor(executor, 0.01)

        assert not asyncio.run(main())
        go.set()


class TestSupervisor:
    @pytest.mark.asyncio
    async def test_it_owns_a_task_until_it_is_done(self) -> None:
        supervisor = Supervisor("engine")
        gate = asyncio.Event()
        task = supervisor.spawn(gate.wait(), name="wait")
        assert (supervisor.num_tasks, task.get_name()) == (1, "akv-wait")
        gate.set()
        assert await task is True
        await turns(1)
        assert supervisor.num_tasks == 0
        assert repr(supervisor) == "<Supervisor engine 0 tasks>"

    @pytest.mark.asyncio
    async def test_a_child_that_fails_is_logged_and_harms_nobody(self, caplog: pytest.LogCaptureFixture) -> None:
        async def fail() -> None:
            raise ValueError("child")

        supervisor = Supervisor("engine")
        task = supervisor.spawn(fail(), name="bad")
        await asyncio.wait([task])
        await turns(1)
        [record] = caplog.records
        assert (record.levelno, record.getMessage()) == (logging.ERROR, "task akv-bad of engine failed")
        assert record.exc_info is not None
        assert supervisor.num_tasks == 0

    @pytest.mark.asyncio
    async def test_drain_waits_for_tasks_and_for_those_they_start(self) -> None:
        supervisor = Supervisor("engine")
        done: list[str] = []

        async def child() -> None:
            await turns()
            done.append("child")

        async def parent() -> None:
            await turns()
            supervisor.spawn(child(), name="child")
            done.append("parent")

        supervisor.spawn(parent(), name="parent")
        assert await supervisor.drain(5) == 0
        assert done == ["parent", "child"]

    @pytest.mark.asyncio
    async def test_drain_cancels_what_does_not_end_and_says_how_many(self) -> None:
        supervisor = Supervisor("engine")
        tasks = [supervisor.spawn(asyncio.Event().wait(), name="stuck") for _ in range(3)]
        assert await supervisor.drain(0.01) == 3
        assert all(task.cancelled() for task in tasks)
        assert supervisor.num_tasks == 0
        assert await supervisor.drain(0.01) == 0


class TestBreaker:
    def breaker(self) -> tuple[VirtualClock, CircuitBreaker]:
        clock = VirtualClock()
        return clock, CircuitBreaker(clock=clock, failures=3, reset_s=5)

    def test_failures_in_a_row_open_it_and_a_success_between_does_not(self) -> None:
        _, breaker = self.breaker()
        for _ in range(2):
            breaker.failed()
        breaker.succeeded()
        for _ in range(2):
            breaker.failed()
        assert breaker.state is BreakerState.CLOSED
        assert breaker.allow()
        breaker.failed()
        assert breaker.state is BreakerState.OPEN
        assert not breaker.allow()

    def test_one_probe_after_the_pause_decides(self) -> None:
        clock, breaker = self.breaker()
        for _ in range(3):
            breaker.failed()
        clock.advance(4.9)
        assert not breaker.allow()
        clock.advance(0.2)
        assert breaker.state is BreakerState.HALF_OPEN
        assert breaker.allow()
        assert not breaker.allow(), "one probe at a time"
        breaker.succeeded()
        assert breaker.state is BreakerState.CLOSED
        assert breaker.allow()
        assert breaker.allow()

    def test_a_failed_probe_opens_it_for_another_pause(self) -> None:
        clock, breaker = self.breaker()
        for _ in range(3):
            breaker.failed()
        clock.advance(5)
        assert breaker.allow()
        breaker.failed()
        assert breaker.state is BreakerState.OPEN
        clock.advance(4.9)
        assert not breaker.allow()
        clock.advance(0.1)
        assert breaker.allow()

    def test_a_probe_that_proved_nothing_is_given_back(self) -> None:
        clock, breaker = self.breaker()
        for _ in range(3):
            breaker.failed()
        clock.advance(5)
        assert breaker.allow()
        breaker.undecided()
        assert breaker.state is BreakerState.HALF_OPEN
        assert breaker.allow()

    def test_after_healing_it_takes_all_failures_again(self) -> None:
        clock, breaker = self.breaker()
        for _ in range(3):
            breaker.failed()
        clock.advance(5)
        assert breaker.allow()
        breaker.succeeded()
        for _ in range(2):
            breaker.failed()
        assert breaker.allow()
