"""An event loop on which waiting for a timer takes no time.

A test of deadlines then waits neither ten seconds nor for a sleep that is too short on a busy machine.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import Final

from typing_extensions import override

__all__ = ("JumpingLoop",)

GRACE_S: Final = 0.05
"""Real time that threads get to report before the loop jumps to its next timer."""


class _JumpingSelector(selectors.DefaultSelector):
    jumped_s = 0.0

    @override
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        events = super().select(min(timeout, GRACE_S))
        if not events and timeout > GRACE_S:
            self.jumped_s += timeout - GRACE_S
        return events


class JumpingLoop(asyncio.SelectorEventLoop):
    """Jumps to the next timer when nothing else has happened for `GRACE_S`.

    Driven by a test that owns it: ``loop.run_until_complete(...)``, or `step` by step.
    """

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    @override
    def time(self) -> float:
        """Return real time plus what was jumped over."""
        return super().time() + self._jumping.jumped_s

    def step(self) -> None:
        """Run what is ready now, once; never waits."""
        self.call_soon(self.stop)
        self.run_forever()
