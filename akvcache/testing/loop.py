"""An event loop on which waiting for a timer takes no time.

A test of deadlines then waits neither ten seconds nor for a sleep that is too short on a busy machine.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from asyncio.events import _set_running_loop
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from typing_extensions import override

__all__ = ("JumpingLoop", "threads_settle")

GRACE_S: Final = 0.02
"""Real time that threads unknown to `JumpingLoop.settle` get to report before the loop jumps to its next timer."""
THREADS_S: Final = 30.0
"""Longest a copy thread may be busy."""


def threads_settle(executor: ThreadPoolExecutor, num_threads: int) -> None:
    """Wait until an executor of `num_threads` threads has done all that was given to it: for `JumpingLoop.jump`."""
    together = threading.Barrier(num_threads + 1, timeout=THREADS_S)
    for _ in range(num_threads):
        executor.submit(together.wait)
    together.wait()


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.jumped_s = 0.0
        self.settle: Callable[[], None] | None = None

    @override
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.settle is None or timeout is None or timeout <= 0:
            return super().select(timeout)
        loop = asyncio.get_running_loop()
        _set_running_loop(None)  # where an event loop waits, nothing is blocked: tools that watch it must not object
        try:
            self.settle()
        finally:
            _set_running_loop(loop)
        events = super().select(min(timeout, GRACE_S))
        if not events and timeout > GRACE_S:
            self.jumped_s += timeout - GRACE_S
        return events


class JumpingLoop(asyncio.SelectorEventLoop):
    """Jumps to its next timer when nothing else can happen.

    Driven by a test that owns it: ``loop.run_until_complete(...)``, or `step` by step.
    """

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    @override
    def time(self) -> float:
        """Return real time plus what was jumped over."""
        return super().time() + self._jumping.jumped_s

    def jump(self, settle: Callable[[], None]) -> None:
        """Jump from now on; `settle` returns when no thread is about to report to the loop."""
        self._jumping.settle = settle

    def stay(self) -> None:
        """Live in real time from now on; a new loop does."""
        self._jumping.settle = None

    def step(self) -> None:
        """Run what is ready now, once; never waits for a timer."""
        if self._jumping.settle is not None:
            self._jumping.settle()
        self.call_soon(self.stop)
        self.run_forever()
