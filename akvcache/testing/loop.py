"""An event loop on which waiting for a timer takes no time.

A test of deadlines then waits neither ten seconds nor for a sleep that is too short on a busy machine.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Final

from typing_extensions import override

__all__ = ("JumpingLoop",)

GRACE_S: Final = 0.02
"""Real time that threads unknown to `JumpingLoop.settle` get to report before the loop jumps to its next timer."""


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.jumped_s = 0.0
        self.settle: Callable[[], None] | None = None

    @override
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.settle is None or timeout is None or timeout <= 0:
            return super().select(timeout)
        self.settle()
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
