"""Connectors that watch or stop the copies of another connector."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

from akvcache.connector import Span
from akvcache.layout import KVLayout

__all__ = ("GatedConnector", "WatchedConnector")


class WatchedConnector:
    """Passes every copy on and notes it.

    Attributes:
        gathered: Token ranges copied from the device, in order.
        scattered: Token ranges copied to the device, in order.
        on_copy: Called on the copy thread before each copy with "gather" or "scatter".
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.gathered: list[Span] = []
        self.scattered: list[Span] = []
        self.on_copy: Callable[[str], None] = lambda _name: None

    @property
    def layout(self) -> KVLayout:
        """See `KVConnector.layout`."""
        return self._inner.layout

    def check(self, kv: Any, num_tokens: int) -> None:
        """See `KVConnector.check`."""
        self._inner.check(kv, num_tokens)

    def gather(self, kv: Any, spans: Sequence[Span], out: Sequence[memoryview]) -> None:
        """See `KVConnector.gather`."""
        self.on_copy("gather")
        self.gathered.extend(spans)
        self._inner.gather(kv, spans, out)

    def scatter(self, kv: Any, spans: Sequence[Span], src: Sequence[memoryview]) -> None:
        """See `KVConnector.scatter`."""
        self.on_copy("scatter")
        self.scattered.extend(spans)
        self._inner.scatter(kv, spans, src)


class GatedConnector(WatchedConnector):
    """Stops copies where the test tells it to: ``hold()``, start the work, ``await reached()``, act, ``release()``.

    Made on the test's loop.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._loop = asyncio.get_running_loop()
        self._open = threading.Event()
        self._open.set()
        self._stopped = 0
        self._arrived = asyncio.Condition()
        self.on_copy = self._pass

    def hold(self) -> None:
        """Stop every further copy until `release`."""
        self._open.clear()

    async def reached(self, count: int = 1) -> None:
        """Wait until `count` copies were stopped in all."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: self._stopped >= count)

    def release(self) -> None:
        """Let everything go on."""
        self._open.set()

    def _pass(self, _name: str) -> None:
        if not self._open.is_set():
            asyncio.run_coroutine_threadsafe(self._note(), self._loop)
            assert self._open.wait(10.0), "the test never let the copy go on"

    async def _note(self) -> None:
        async with self._arrived:
            self._stopped += 1
            self._arrived.notify_all()
