"""The fake device orders copies as a real one does, and fails on demand."""

from __future__ import annotations

import threading

import pytest
import torch

from akvcache.connector import PagedConnector
from akvcache.testing import CopyFault, FakeDevice, FakeDeviceConnector, Stepping, VirtualClock

BLOCKS, BLOCK_TOKENS = 4, 4
TOKENS = BLOCKS * BLOCK_TOKENS


class Rig:
    """A paged cache of one layer behind a fake device."""

    def __init__(self, stepping: Stepping = Stepping.MANUAL) -> None:
        shape = (BLOCKS, BLOCK_TOKENS, 1, 2)
        self.cache = (torch.zeros(shape), torch.zeros(shape))
        self.device = FakeDevice(stepping)
        inner = PagedConnector([self.cache])
        self.connector = FakeDeviceConnector(inner, self.device)
        self.slots = inner.slots(range(BLOCKS), TOKENS)
        self.payload = memoryview(bytearray(self.connector.layout.payload_bytes(TOKENS)))

    def produce(self) -> None:
        """Be the model: write KV."""
        for plane in self.cache:
            plane.fill_(1.0)

    def expected(self) -> bytes:
        return torch.ones(2, TOKENS, 2).numpy().tobytes()


def test_a_copy_starts_only_after_what_produces_its_source() -> None:
    rig = Rig()
    rig.device.compute.enqueue(rig.produce)
    event = rig.connector.gather(rig.slots, [(0, TOKENS)], [rig.payload])
    while rig.device.copy.step():
        pass
    assert not any(rig.payload), "the copy stream waits for the compute stream"
    assert not event.query()
    assert rig.device.compute.step()  # the producer
    assert rig.device.compute.step()  # the point the copy waits for
    assert rig.device.copy.step()  # the wait
    assert not any(rig.payload)
    assert rig.device.copy.step()  # the copy
    assert bytes(rig.payload) == rig.expected()
    assert not event.query(), "the event stands behind the copy"
    assert rig.device.copy.step()
    assert event.query()
    assert not rig.device.copy.step()


def test_compute_goes_on_only_after_a_scatter() -> None:
    rig = Rig()
    rig.payload[:] = rig.expected()
    seen: list[float] = []
    event = rig.connector.scatter(rig.slots, [(0, TOKENS)], [rig.payload])
    rig.device.compute.enqueue(lambda: seen.append(float(rig.cache[0].sum())))
    while rig.device.compute.step():
        pass
    assert seen == []
    assert rig.device.run() > 0
    assert event.query()
    assert seen == [float(2 * TOKENS)]


def test_automatic_stepping_runs_at_once() -> None:
    rig = Rig(Stepping.AUTO)
    rig.device.compute.enqueue(rig.produce)
    assert rig.connector.gather(rig.slots, [(0, TOKENS)], [rig.payload]).query()
    assert bytes(rig.payload) == rig.expected()
    assert len(rig.device.compute) == len(rig.device.copy) == 0


def test_only_the_chunks_of_the_call_are_copied() -> None:
    rig = Rig(Stepping.AUTO)
    rig.produce()
    half = len(rig.payload) // 2
    rig.connector.gather(rig.slots, [(0, 8)], [rig.payload[:half]])
    assert any(rig.payload[:half])
    assert not any(rig.payload[half:])


def test_the_next_copy_can_be_refused() -> None:
    rig = Rig(Stepping.AUTO)
    rig.connector.fail_next(CopyFault.RAISE)
    with pytest.raises(RuntimeError, match="refused"):
        rig.connector.gather(rig.slots, [(0, TOKENS)], [rig.payload])
    assert rig.connector.gather(rig.slots, [(0, TOKENS)], [rig.payload]).query()


def test_the_next_copy_can_break_on_the_device() -> None:
    rig = Rig(Stepping.AUTO)
    rig.produce()
    rig.connector.fail_next(CopyFault.BREAK)
    broken = rig.connector.gather(rig.slots, [(0, TOKENS)], [rig.payload])
    with pytest.raises(RuntimeError, match="the device failed"):
        broken.query()
    assert not any(rig.payload)
    assert rig.connector.gather(rig.slots, [(0, TOKENS)], [rig.payload]).query()
    assert bytes(rig.payload) == rig.expected()


def test_a_broken_scatter_does_not_stop_compute() -> None:
    rig = Rig(Stepping.AUTO)
    rig.connector.fail_next(CopyFault.BREAK)
    rig.connector.scatter(rig.slots, [(0, TOKENS)], [rig.payload])
    rig.device.compute.enqueue(rig.produce)
    assert bool((rig.cache[0] == 1).all())


def test_the_next_copy_can_hang_until_the_test_completes_it() -> None:
    rig = Rig(Stepping.AUTO)
    rig.produce()
    rig.connector.fail_next(CopyFault.HANG)
    hung = rig.connector.gather(rig.slots, [(0, TOKENS)], [rig.payload])
    behind = rig.connector.gather(rig.slots, [(0, TOKENS)], [rig.payload])
    assert not hung.query()
    assert not behind.query()
    rig.connector.hung[0].complete()
    rig.device.run()
    assert hung.query()
    assert behind.query()
    assert bytes(rig.payload) == rig.expected()


def test_copies_of_many_threads_all_arrive() -> None:
    rig = Rig(Stepping.AUTO)
    rig.produce()
    payloads = [memoryview(bytearray(len(rig.payload))) for _ in range(16)]

    def copy(payload: memoryview) -> None:
        for _ in range(20):
            rig.connector.gather(rig.slots, [(0, TOKENS)], [payload])

    threads = [threading.Thread(target=copy, args=(payload,)) for payload in payloads]
    for thread in threads:
        thread.start()
    rig.connector.wait_enqueued(16 * 20)
    for thread in threads:
        thread.join()
    assert all(bytes(payload) == rig.expected() for payload in payloads)


def test_waiting_for_copies_that_never_come_ends() -> None:
    rig = Rig()
    with pytest.raises(TimeoutError, match="0 of 1 copies"):
        rig.connector.wait_enqueued(1, timeout_s=0.01)


def test_the_inner_connector_checks_the_request() -> None:
    rig = Rig()
    with pytest.raises(Exception, match="slot mapping has 16 slots, the request has 17 tokens"):
        rig.connector.check(rig.slots, TOKENS + 1)


def test_the_virtual_clock_moves_when_told_to() -> None:
    clock = VirtualClock(start_s=5)
    assert clock.now() == clock.now() == 5
    clock.advance(2.5)
    assert clock.now() == 7.5
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-1)
