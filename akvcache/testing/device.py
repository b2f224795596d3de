"""A device whose copies happen when the test says so.

As with CUDA, a copy is only *enqueued* by the connector; it runs later, in stream order, and an event tells when.
`FakeDeviceConnector` puts any CPU connector behind such a device, so that a test can prove that a copy starts after
what computes its source, and that nobody trusts or reuses a slot before the copy has ended.

Every method may be called from any thread.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

from akvcache.connector import KVConnector, Span
from akvcache.layout import KVLayout

__all__ = ("CopyFault", "FakeDevice", "FakeDeviceConnector", "FakeEvent", "FakeStream", "Stepping")

KV = TypeVar("KV")


class Stepping(enum.Enum):
    """Who runs what is enqueued."""

    AUTO = "whoever enqueues, at once"
    MANUAL = "the test, by `FakeStream.step` or `FakeDevice.run`"


class CopyFault(enum.Enum):
    """How the next copy goes wrong."""

    RAISE = "the call that enqueues it raises"
    BREAK = "it is enqueued, then fails: `query` of its event raises; later copies are fine"
    HANG = "it is enqueued and waits for the event added to `FakeDeviceConnector.hung`; so does all after it"


class FakeEvent:
    """A point in a stream; implements `akvcache.connector.DeviceEvent`."""

    def __init__(self) -> None:
        self._done = False
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"<FakeEvent {'done' if self._done else 'pending'}>"

    def query(self) -> bool:
        """Return whether everything before this point is done.

        Raises:
            RuntimeError: Something before this point failed, as CUDA reports it.
        """
        if self._error is not None:
            raise RuntimeError("the device failed") from self._error
        return self._done

    def complete(self, error: BaseException | None = None) -> None:
        """Mark the point as passed, or as failed."""
        self._error = error
        self._done = True


class FakeStream:
    """Work of one device in order. Made by `FakeDevice`."""

    def __init__(self, device: FakeDevice, name: str) -> None:
        self.name = name
        self._device = device
        self._items: deque[tuple[Callable[[], object], FakeEvent | None]] = deque()
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"<FakeStream {self.name!r} {len(self._items)} items>"

    def __len__(self) -> int:
        """Return how many items have not run."""
        return len(self._items)

    def enqueue(self, work: Callable[[], object]) -> None:
        """Append work."""
        self._append(work, None)

    def record(self) -> FakeEvent:
        """Append a point and return its event."""
        event = FakeEvent()
        self._append(lambda: event.complete(self._take_error()), None)
        return event

    def wait(self, event: FakeEvent) -> None:
        """Let nothing that is appended from now on run before `event`."""
        self._append(lambda: None, event)

    def step(self) -> bool:
        """Run the next item; return False if there is none or it waits for an event of another stream."""
        with self._device.lock:
            if not self._items:
                return False
            work, awaited = self._items[0]
            if awaited is not None and not _passed(awaited):
                return False
            self._items.popleft()
            try:
                work()
            except Exception as error:  # noqa: BLE001 - a device reports through its events, as CUDA does
                self._error = error
            return True

    def _take_error(self) -> BaseException | None:
        error, self._error = self._error, None
        return error

    def _append(self, work: Callable[[], object], awaited: FakeEvent | None) -> None:
        with self._device.lock:
            self._items.append((work, awaited))
        if self._device.stepping is Stepping.AUTO:
            self._device.run()


class FakeDevice:
    """A compute stream and a copy stream.

    Attributes:
        lock: Held while an item runs or the streams change.
        stepping: Who runs the streams; may be changed at any time.
        compute: Where the model runs: tests enqueue what produces KV.
        copy: The connector's side stream.
    """

    def __init__(self, stepping: Stepping = Stepping.AUTO) -> None:
        self.lock = threading.RLock()
        self.stepping = stepping
        self.compute = FakeStream(self, "compute")
        self.copy = FakeStream(self, "copy")

    def __repr__(self) -> str:
        return f"<FakeDevice {self.stepping.name} {self.compute!r} {self.copy!r}>"

    def run(self) -> int:
        """Run whatever can run in both streams; return how many items that was."""
        ran = 0
        with self.lock:
            while self.compute.step() or self.copy.step():
                ran += 1
        return ran


class FakeDeviceConnector(Generic[KV]):
    """Runs the copies of a CPU connector on a fake device; implements `akvcache.connector.KVConnector`.

    ::

        compute: ... producer | event P ............... | wait for C (scatter only)
        copy:                   wait for P | copies | event C

    Attributes:
        device: Where the copies run.
        hung: What copies with `CopyFault.HANG` wait for; complete one, then run the device, to let it go on.
    """

    def __init__(self, inner: KVConnector[KV], device: FakeDevice) -> None:
        self.device = device
        self.hung: list[FakeEvent] = []
        self._inner = inner
        self._faults: deque[CopyFault] = deque()
        self._calls = 0
        self._called = threading.Condition()

    def __repr__(self) -> str:
        return f"<FakeDeviceConnector over {self._inner!r} on {self.device!r}>"

    @property
    def layout(self) -> KVLayout:
        """See `KVConnector.layout`."""
        return self._inner.layout

    def check(self, kv: KV, num_tokens: int) -> None:
        """See `KVConnector.check`."""
        self._inner.check(kv, num_tokens)

    def gather(self, kv: KV, spans: Sequence[Span], out: Sequence[memoryview]) -> FakeEvent:
        """See `KVConnector.gather`."""
        return self._enqueue(
            [partial(self._inner.gather, kv, [span], [view]) for span, view in zip(spans, out, strict=True)]
        )

    def scatter(self, kv: KV, spans: Sequence[Span], src: Sequence[memoryview]) -> FakeEvent:
        """See `KVConnector.scatter`."""
        copied = self._enqueue(
            [partial(self._inner.scatter, kv, [span], [view]) for span, view in zip(spans, src, strict=True)]
        )
        self.device.compute.wait(copied)
        return copied

    def fail_next(self, fault: CopyFault) -> None:
        """Let the next call of `gather` or `scatter` go wrong; calls add up."""
        self._faults.append(fault)

    def wait_enqueued(self, calls: int, timeout_s: float = 5.0) -> None:
        """Wait in a thread until `gather` and `scatter` were called that often in all.

        Raises:
            TimeoutError: They were not.
        """
        with self._called:
            if not self._called.wait_for(lambda: self._calls >= calls, timeout_s):
                raise TimeoutError(f"{self._calls} of {calls} copies were enqueued in {timeout_s} s")

    def _enqueue(self, copies: Sequence[Callable[[], object]]) -> FakeEvent:
        fault = self._faults.popleft() if self._faults else None
        try:
            if fault is CopyFault.RAISE:
                raise RuntimeError("the device refused the copy")
            self.device.copy.wait(self.device.compute.record())
            if fault is CopyFault.HANG:
                self.hung.append(FakeEvent())
                self.device.copy.wait(self.hung[-1])
            for copy in copies if fault is not CopyFault.BREAK else (_broken_copy,):
                self.device.copy.enqueue(copy)
            return self.device.copy.record()
        finally:
            with self._called:
                self._calls += 1
                self._called.notify_all()


def _broken_copy() -> None:
    raise RuntimeError("the copy failed on the device")


def _passed(event: FakeEvent) -> bool:
    try:
        return event.query()
    except RuntimeError:
        return True
