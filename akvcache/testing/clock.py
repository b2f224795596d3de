"""A clock that stands still until the test moves it."""

from __future__ import annotations

__all__ = ("VirtualClock",)


class VirtualClock:
    """Implements `akvcache.clock.Clock`. Moved from one thread, read from any."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now_s = start_s

    def __repr__(self) -> str:
        return f"<VirtualClock {self._now_s} s>"

    def now(self) -> float:
        """See `Clock.now`."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move the clock forward.

        Raises:
            ValueError: `seconds` is negative: a monotonic clock never goes back.
        """
        if seconds < 0:
            raise ValueError(f"a clock cannot go back, got {seconds}")
        self._now_s += seconds
