"""A device that can be stalled under a running engine, and run on with nothing left to chance."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import torch

from akvcache.connector import PagedConnector, Span
from akvcache.layout import KVLayout
from akvcache.testing.device import CopyFault, FakeDevice, FakeDeviceConnector, FakeEvent, Stepping

__all__ = ("StallingDevice",)

SEEN_S: Final = 0.02
"""Longest wait for the engine to look at the events of copies that have run."""


class _SeenEvent:
    """Knows whether the engine has seen that it is over."""

    def __init__(self, event: FakeEvent) -> None:
        self._event = event
        self.seen = False

    def query(self) -> bool:
        done = False
        try:
            done = self._event.query()
        except RuntimeError:
            done = True
            raise
        finally:
            self.seen = self.seen or done
        return done


class StallingDevice:
    """A fake device behind `KVConnector`: copies are done when they are enqueued, unless it is stalled."""

    def __init__(self, inner: PagedConnector) -> None:
        self._device = FakeDevice()
        self._copies = FakeDeviceConnector(inner, self._device)
        self._stalled: list[_SeenEvent] = []

    def __repr__(self) -> str:
        return f"<StallingDevice {len(self._stalled)} stalled>"

    @property
    def layout(self) -> KVLayout:
        """See `KVConnector.layout`."""
        return self._copies.layout

    def check(self, kv: torch.Tensor, num_tokens: int) -> None:
        """See `KVConnector.check`."""
        self._copies.check(kv, num_tokens)

    def gather(self, kv: torch.Tensor, spans: Sequence[Span], out: Sequence[memoryview]) -> _SeenEvent | None:
        """See `KVConnector.gather`."""
        return self._enqueued(self._copies.gather(kv, spans, out))

    def scatter(self, kv: torch.Tensor, spans: Sequence[Span], src: Sequence[memoryview]) -> _SeenEvent | None:
        """See `KVConnector.scatter`."""
        return self._enqueued(self._copies.scatter(kv, spans, src))

    def fail_next(self, fault: CopyFault) -> None:
        """Let the next copy go wrong."""
        self._copies.fail_next(fault)

    def stall(self) -> None:
        """Let no copy run from now on."""
        self._device.stepping = Stepping.MANUAL

    def run(self) -> None:
        """Run what was stalled, and whatever comes, at once; the engine has seen it when this returns."""
        self._device.stepping = Stepping.AUTO
        self._device.run()
        end = time.monotonic() + SEEN_S
        while not all(event.seen for event in self._stalled) and time.monotonic() < end:
            time.sleep(0.0001)
        self._stalled = [event for event in self._stalled if not event.seen]

    def _enqueued(self, event: FakeEvent) -> _SeenEvent | None:
        if event.query():
            return None
        self._stalled.append(_SeenEvent(event))
        return self._stalled[-1]
