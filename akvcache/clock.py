"""Time as an injected object: leases, breakers and rates read this clock, tests move it by hand.

I/O deadlines use `asyncio.timeout` and the loop's own time; only durations that a test wants to pass at will come
from here.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ("Clock", "SystemClock")


class Clock(Protocol):
    """Monotonic time in seconds."""

    def now(self) -> float:
        """Return seconds since an arbitrary start; never goes back."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """See `Clock.now`."""
        return time.monotonic()
