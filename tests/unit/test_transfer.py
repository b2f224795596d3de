"""Copies on a device that does them later: events end them, failures are told, the waiter thread ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from akvcache.connector import PagedConnector
from akvcache.errors import TransferError
from akvcache.testing import CopyFault, FakeDevice, FakeDeviceConnector, FakeEvent, Stepping
from akvcache.transfer import EventWaiter, Transfer

TOKENS = 16


class Rig:
    """A paged cache of one layer behind a fake device, and a transfer over it."""

    def __init__(self, executor: ThreadPoolExecutor, stepping: Stepping = Stepping.MANUAL) -> None:
        shape = (4, 4, 1, 2)
        self.cache = (torch.arange(32.0).view(shape), torch.arange(32.0, 64.0).view(shape))
        self.device = FakeDevice(stepping)
        inner = PagedConnector([self.cache])
        self.connector = FakeDeviceConnector(inner, self.device)
        self.slots = inner.slots(range(4), TOKENS)
        self.payload = memoryview(bytearray(self.connector.layout.payload_bytes(TOKENS)))
        self.transfer = Transfer(self.connector, executor)

    @property
    def bytes(self) -> bytes:
        return b"".join(plane.numpy().tobytes() for plane in self.cache)

    def gather(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.transfer.gather(self.slots, [(0, TOKENS)], [self.payload]))

    def scatter(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.transfer.scatter(self.slots, [(0, TOKENS)], [self.payload]))

    async def enqueued(self, calls: int = 1) -> None:
        await asyncio.to_thread(self.connector.wait_enqueued, calls)


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(1, thread_name_prefix="akv-copy")
    yield pool
    pool.shutdown(wait=True)


def event_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "akv-events"]


def join_event_threads() -> None:
    """Wait until the threads that were told to end have ended."""
    for thread in event_threads():
        thread.join(5.0)
        assert not thread.is_alive()


class TestTransfer:
    @pytest.mark.asyncio
    async def test_a_copy_ends_with_its_event_not_with_its_call(self, executor: ThreadPoolExecutor) -> None:
        rig = Rig(executor)
        task = rig.gather()
        await rig.enqueued()
        assert not task.done()
        assert not any(rig.payload)
        rig.device.run()
        await task
        assert bytes(rig.payload) == rig.bytes
        rig.transfer.close()

    @pytest.mark.asyncio
    async def test_both_ways(self, executor: ThreadPoolExecutor) -> None:
        rig = Rig(executor, Stepping.AUTO)
        await rig.gather()
        before = rig.bytes
        for plane in rig.cache:
            plane.fill_(-1)
        await rig.scatter()
        assert rig.bytes == before
        rig.transfer.close()

    @pytest.mark.asyncio
    async def test_a_connector_that_is_done_at_once_needs_no_thread(self, executor: ThreadPoolExecutor) -> None:
        rig = Rig(executor)
        transfer = Transfer(PagedConnector([rig.cache]), executor)
        await transfer.gather(rig.slots, [(0, TOKENS)], [rig.payload])
        assert bytes(rig.payload) == rig.bytes
        assert event_threads() == []
        transfer.close()

    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        ("fault", "says"),
        [(CopyFault.RAISE, "the device refused the copy"), (CopyFault.BREAK, "the device failed")],
    )
    async def test_a_copy_that_fails_is_a_transfer_error_with_its_cause(
        self, executor: ThreadPoolExecutor, fault: CopyFault, says: str
    ) -> None:
        rig = Rig(executor, Stepping.AUTO)
        rig.connector.fail_next(fault)
        with pytest.raises(TransferError, match=f"RuntimeError: {says}") as failure:
            await rig.gather()
        assert isinstance(failure.value.__cause__, RuntimeError)
        await rig.gather()
        assert bytes(rig.payload) == rig.bytes
        rig.transfer.close()

    @pytest.mark.asyncio
    async def test_many_events_share_one_thread(self, executor: ThreadPoolExecutor) -> None:
        rig = Rig(executor)
        tasks = [rig.gather() for _ in range(20)]
        await rig.enqueued(20)
        assert len(event_threads()) == 1
        rig.device.run()
        await asyncio.gather(*tasks)
        rig.transfer.close()
        join_event_threads()

    @pytest.mark.asyncio
    async def test_cancelled_it_does_not_wait_for_the_device_and_the_event_may_come_later(
        self, executor: ThreadPoolExecutor
    ) -> None:
        rig = Rig(executor)
        task = rig.gather()
        await rig.enqueued()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        rig.device.run()
        again = rig.gather()
        await rig.enqueued(2)
        rig.device.run()
        await again
        rig.transfer.close()

    @pytest.mark.asyncio
    async def test_after_closing_a_copy_is_refused(self, executor: ThreadPoolExecutor) -> None:
        rig = Rig(executor, Stepping.AUTO)
        rig.transfer.close()
        with pytest.raises(TransferError, match="the engine is closing"):
            await rig.gather()

    @pytest.mark.asyncio
    async def test_without_threads_a_copy_is_refused_as_well(self) -> None:
        executor = ThreadPoolExecutor(1)
        rig = Rig(executor, Stepping.AUTO)
        executor.shutdown(wait=True)
        with pytest.raises(TransferError, match="RuntimeError"):
            await rig.gather()
        rig.transfer.close()


class TestEventWaiter:
    def test_an_event_that_has_happened_and_one_that_fails_later(self) -> None:
        waiter = EventWaiter()
        done, failing = FakeEvent(), FakeEvent()
        done.complete()
        waiter.watch(done).result(5)
        future = waiter.watch(failing)
        failing.complete(ValueError("illegal address"))
        assert isinstance(future.exception(5), RuntimeError)
        waiter.close()
        waiter.close()
        join_event_threads()

    def test_an_event_whose_waiter_has_gone_does_not_kill_the_thread(self) -> None:
        """The loop cancels a future that nobody waits for any more."""
        waiter = EventWaiter()
        gone, failed, later = FakeEvent(), FakeEvent(), FakeEvent()
        for event in (gone, failed):
            waiter.watch(event).cancel()
        gone.complete()
        failed.complete(ValueError("no"))
        future = waiter.watch(later)
        later.complete()
        future.result(5)
        waiter.close()

    def test_it_wakes_for_the_next_event_after_a_pause(self) -> None:
        waiter = EventWaiter()
        for _ in range(3):
            event = FakeEvent()
            event.complete()
            waiter.watch(event).result(5)
        waiter.close()

    def test_closing_fails_what_the_device_has_not_done(self) -> None:
        class Asked(FakeEvent):
            def query(self) -> bool:
                asked.set()
                return super().query()

        asked = threading.Event()
        waiter = EventWaiter()
        futures = [waiter.watch(Asked()) for _ in range(3)]
        assert asked.wait(5)
        waiter.close()
        for future in futures:
            with pytest.raises(TransferError, match="closed before the device finished"):
                future.result(5)

    def test_closing_without_any_event(self) -> None:
        waiter = EventWaiter()
        waiter.close()
        with pytest.raises(TransferError):
            waiter.watch(FakeEvent())
