"""The host tier: pool, index and leases as one.

Owned by the engine, touched from its loop only. Every slot is free, leased, or in the index; every filling entry has
an arrival that ends exactly once, so that whoever wants the same chunk waits for it instead of moving it twice.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Self

from akvcache.buffers import HostPool, Slot, SlotLease
from akvcache.clock import Clock
from akvcache.index import Entry, Hold, HostIndex
from akvcache.keys import ChunkKey
from akvcache.planner import HOST
from akvcache.policy import EvictionPolicy
from akvcache.results import StopReason
from akvcache.telemetry import Telemetry

__all__ = ("Arrival", "HostLease", "HostTier")

Arrival = asyncio.Future[StopReason | None]
"""Ends with None when the chunk is visible, else with the reason why it never will be."""


class HostLease:
    """Protects the chunks of a lookup from eviction, in every tier of this process.

    An async context manager. Ends by `release` (idempotent) or when its time is over, whichever is first.

    Attributes:
        entries: Those of its chunks that it holds in host memory.
        owner: Unique name, for logs.
        deadline: When it expires, on the engine's clock.
        tokens: Tokens of the prefix it protects; less than the hit when too much of the pool is leased already.
    """

    def __init__(
        self,
        host: HostTier,
        hold: Hold,
        entries: Sequence[Entry],
        keys: Sequence[ChunkKey],
        tokens: int,
        deadline: float,
    ) -> None:
        self._host = host
        self._hold = hold
        self._keys = keys
        self.entries = entries
        self.deadline = deadline
        self._live = True
        self.owner = hold.owner
        self.tokens = tokens

    def __repr__(self) -> str:
        return f"<HostLease {self.owner} {self.tokens} tokens{'' if self.live else ' ended'}>"

    @property
    def live(self) -> bool:
        """Whether it still protects."""
        return self._live and self._host.now() < self.deadline

    @property
    def released(self) -> bool:
        """Whether it was given back or has expired and been collected."""
        return not self._live

    @property
    def keys(self) -> Sequence[ChunkKey]:
        """What it protects."""
        return self._keys

    def belongs_to(self, host: HostTier) -> bool:
        """Return whether `host` granted it."""
        return self._host is host

    def release(self) -> None:
        """Stop protecting. Idempotent."""
        if self._live:
            self._live = False
            self._host.forget(self)
            self._hold.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.release()


class HostTier:
    """Chunks in host memory.

    Args:
        pool: Where the bytes lie.
        policy: Which chunk leaves first.
        clock: Time of leases.
        telemetry: Where evictions are counted.
        reserve: Slots only loads may use.
    """

    def __init__(
        self, *, pool: HostPool, policy: EvictionPolicy, clock: Clock, telemetry: Telemetry, reserve: int
    ) -> None:
        self.pool = pool
        self.index = HostIndex(policy, self._changed)
        self.reserve = reserve
        self._clock = clock
        self._telemetry = telemetry
        self._filling: dict[ChunkKey, tuple[Entry, Arrival]] = {}
        self._leases: set[HostLease] = set()
        self._next_expiry = math.inf
        self._protected: Counter[ChunkKey] = Counter()
        self._leased: Counter[Entry] = Counter()
        self._serial = itertools.count(1)
        self._timers: dict[HostLease, asyncio.TimerHandle] = {}
        pool.bind(self)

    def __repr__(self) -> str:
        return f"<HostTier {self.index!r} {self.pool!r} {len(self._leases)} leases>"

    def now(self) -> float:
        """Return the time leases are measured by."""
        return self._clock.now()

    @property
    def num_leases(self) -> int:
        """Lookup leases that have not ended."""
        return len(self._leases)

    # -- slots ---------------------------------------------------------------------------------------------------

    def reclaimable(self) -> int:
        """See `Reclaimer.reclaimable`."""
        self.expire()
        return self.index.reclaimable

    def reclaim(self, count: int) -> Sequence[Slot]:
        """See `Reclaimer.reclaim`."""
        self._telemetry.evicted(HOST, len(self.index.evict(count)))
        slots, self.index.freed = self.index.freed, []
        return slots

    async def acquire(self, count: int, *, timeout_s: float) -> SlotLease | None:
        """Lease slots for a store; leaves the staging reserve."""
        return await self.pool.lease(count, timeout_s=timeout_s, keep=self.reserve)

    def _changed(self) -> None:
        if self.index.freed:
            slots, self.index.freed = self.index.freed, []
            self.pool.give(slots)
        elif self.pool.num_waiters:
            self.pool.serve()

    # -- arrivals ------------------------------------------------------------------------------------------------

    def resident(self, key: ChunkKey) -> Entry | None:
        """Return the visible entry of `key`, or None."""
        return self.index.resident(key)

    def expected(self, key: ChunkKey) -> Entry | None:
        """Return the entry of `key`, visible or being filled, or None."""
        filling = self._filling.get(key)
        return self.index.resident(key) if filling is None else filling[0]

    def filling(self, key: ChunkKey) -> tuple[Entry, Arrival] | None:
        """Return the entry being filled for `key` and its arrival; hold the entry, never cancel the arrival."""
        return self._filling.get(key)

    def begin(self, key: ChunkKey, slot: Slot, num_tokens: int) -> tuple[Entry, Arrival]:
        """Start filling `slot` for `key`; `publish` or `abandon` must follow."""
        entry = self.index.begin(key, slot, num_tokens)
        arrival: Arrival = asyncio.get_running_loop().create_future()
        self._filling[key] = entry, arrival
        return entry, arrival

    def publish(self, entry: Entry, tick: int | None = None) -> bool:
        """Make a filled chunk visible; return False if it was cleared meanwhile."""
        visible = self.index.publish(entry, tick)
        self._arrived(entry, None if visible else StopReason.CLEARED)
        return visible

    def abandon(self, entry: Entry, reason: StopReason) -> None:
        """Give up filling a chunk; its slot becomes free when the last holder lets go."""
        self.index.abandon(entry)
        self._arrived(entry, reason)

    def _arrived(self, entry: Entry, reason: StopReason | None) -> None:
        filling = self._filling.get(entry.key)
        if filling is not None and filling[0] is entry:
            del self._filling[entry.key]
            filling[1].set_result(reason)
        self._changed()

    # -- leases --------------------------------------------------------------------------------------------------

    def hold(self, owner: str) -> Hold:
        """Return an empty hold for one operation."""
        return Hold(self.index, f"{owner}-{next(self._serial)}")

    def lease(
        self, keys: Sequence[ChunkKey], stops: Sequence[int], sources: Sequence[Sequence[str]], seconds: float
    ) -> HostLease:
        """Protect a prefix for `seconds`.

        Slots of the staging reserve stay obtainable: a chunk that would take one of them is protected in a lower
        tier, or, if none is known to hold it, ends what the lease covers.
        """
        hold = self.hold("lease")
        self.expire()
        room = self.pool.num_slots - self.reserve
        entries: list[Entry] = []
        covered = 0
        for key, holders in zip(keys, sources, strict=True):
            entry = self.index.resident(key)
            if entry is not None and (entry in self._leased or len(self._leased) < room):
                self._leased[entry] += 1
                entries.append(entry)
                hold.add(entry)
            elif not any(name != HOST for name in holders):
                break
            self._protected[key] += 1
            covered += 1
        tokens = stops[covered - 1] if covered else 0
        lease = HostLease(self, hold, entries, keys[:covered], tokens, self.now() + seconds)
        self._leases.add(lease)
        self._next_expiry = min(self._next_expiry, self.now() + seconds)
        self._timers[lease] = asyncio.get_running_loop().call_later(seconds, self.expire)
        return lease

    def is_protected(self, key: ChunkKey) -> bool:
        """Return whether a live lease covers `key`; what `BackendContext.is_protected` asks."""
        return key in self._protected

    def expire(self) -> None:
        """End leases whose time is over."""
        if self.now() < self._next_expiry:
            return
        for lease in [lease for lease in self._leases if not lease.live]:
            lease.release()
        self._next_expiry = min((lease.deadline for lease in self._leases), default=math.inf)

    def forget(self, lease: HostLease) -> None:
        """Note that a lease has ended; called by the lease."""
        self._leases.discard(lease)
        if (timer := self._timers.pop(lease, None)) is not None:
            timer.cancel()
        for key in lease.keys:
            self._protected[key] -= 1
            if not self._protected[key]:
                del self._protected[key]
        for entry in lease.entries:
            self._leased[entry] -= 1
            if not self._leased[entry]:
                del self._leased[entry]

    # -- all -----------------------------------------------------------------------------------------------------

    def clear(self) -> int:
        """Make everything invisible at once; return how many chunks that was."""
        for lease in list(self._leases):
            lease.release()
        count = self.index.clear()
        for _, arrival in self._filling.values():
            arrival.set_result(StopReason.CLEARED)
        self._filling.clear()
        self._changed()
        return count
