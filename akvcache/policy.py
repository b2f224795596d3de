"""Which chunk leaves first. Pure, synchronous, no I/O.

All policies rank a chunk by the last request that used it and, inside one request, by depth: the tail of a prefix
leaves before its head. Every request touches its whole path, so a parent is never older than its child and
leaf-first order follows from the rank alone.

Touched from one thread at a time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from typing_extensions import override

from akvcache.errors import ConfigurationError
from akvcache.keys import ChunkKey, depth_of

__all__ = ("POLICIES", "EvictionPolicy", "LruPolicy", "SegmentedLruPolicy", "make_policy")

_PROBATION: Final = 0
_PROTECTED: Final = 1

Rank = tuple[int, int, int]
"""(segment, tick of last use, minus depth): the smallest leaves first."""


class EvictionPolicy(Protocol):
    """Ranks chunks.

    Call order: 1. `touch` once per request with its whole path; 2. `insert` for each chunk the request adds, with
    the tick that `touch` gave; 3. `forget` when a chunk has left.
    """

    def touch(self, keys: Iterable[ChunkKey]) -> int:
        """Record one request that used these chunks of one prefix; unknown keys are ignored.

        Returns:
            The tick of this request, for `insert`.
        """
        ...

    def insert(self, key: ChunkKey, tick: int | None = None) -> None:
        """Add a chunk as used by the request of `tick`, or by the latest request."""
        ...

    def forget(self, key: ChunkKey) -> None:
        """Remove a chunk; unknown keys are ignored."""
        ...

    def victims(
        self, count: int, evictable: Callable[[ChunkKey], bool], *, newcomer: ChunkKey | None = None
    ) -> Sequence[ChunkKey]:
        """Return up to `count` chunks that should leave, first to leave first. Changes nothing.

        Args:
            count: How many are wanted.
            evictable: Whether a chunk may leave now.
            newcomer: A chunk that room is made for; chunks that rank above it are not given, so a prefix never
                eats its own head.
        """
        ...

    def __len__(self) -> int:
        """Return the number of chunks."""
        ...


class _HeapPolicy:
    """Ranks in a heap whose stale items are skipped; subclasses choose the segment of a chunk."""

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self._tick = 1
        self._ranks: dict[ChunkKey, Rank] = {}
        self._heap: list[tuple[Rank, ChunkKey]] = []

    def __len__(self) -> int:
        return len(self._ranks)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self._ranks)} chunks>"

    def touch(self, keys: Iterable[ChunkKey]) -> int:
        self._tick += 1
        for key in keys:
            rank = self._ranks.get(key)
            if rank is not None:
                self._place(key, self._segment_touched(rank[0]), self._tick)
        return self._tick

    def insert(self, key: ChunkKey, tick: int | None = None) -> None:
        if key not in self._ranks:
            self._place(key, _PROBATION, self._tick if tick is None else tick)

    def forget(self, key: ChunkKey) -> None:
        self._ranks.pop(key, None)

    def victims(
        self, count: int, evictable: Callable[[ChunkKey], bool], *, newcomer: ChunkKey | None = None
    ) -> Sequence[ChunkKey]:
        ceiling = (self._tick, -depth_of(newcomer)) if newcomer is not None else None
        chosen: dict[ChunkKey, None] = {}  # an ordered set: equal items may stand twice in the heap
        kept: list[tuple[Rank, ChunkKey]] = []
        while self._heap and len(chosen) < count:
            item = heapq.heappop(self._heap)
            rank, key = item
            if self._ranks.get(key) != rank:
                continue  # stale
            kept.append(item)
            if ceiling is not None and rank[1:] >= ceiling:
                break
            if evictable(key):
                chosen[key] = None
        for item in kept:
            heapq.heappush(self._heap, item)
        return list(chosen)

    def _place(self, key: ChunkKey, segment: int, tick: int) -> None:
        rank = (segment, tick, -depth_of(key))
        self._ranks[key] = rank
        heapq.heappush(self._heap, (rank, key))
        if len(self._heap) > 64 + 4 * len(self._ranks):
            self._heap = [(rank, key) for key, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def _segment_touched(self, segment: int) -> int:
        raise NotImplementedError


class LruPolicy(_HeapPolicy):
    """The request that was used longest ago leaves first."""

    @override
    def _segment_touched(self, segment: int) -> int:
        return segment


class SegmentedLruPolicy(_HeapPolicy):
    """Scan-resistant: chunks used by two requests leave after chunks used by one.

    A first use enters the probation segment; the next moves to the protected one, which holds at most
    `PROTECTED_SHARE` of the capacity and gives its oldest back to probation beyond that, so nothing is protected
    for ever.

    Source: Karedla, Love and Wherry, "Caching strategies to improve disk system performance" (1994).
    """

    PROTECTED_SHARE: Final = 0.8

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._protected_limit = max(1, int(self._capacity * self.PROTECTED_SHARE))
        self._protected: set[ChunkKey] = set()

    @override
    def touch(self, keys: Iterable[ChunkKey]) -> int:
        keys = list(keys)
        tick = super().touch(keys)
        self._protected.update(key for key in keys if key in self._ranks)
        excess = len(self._protected) - self._protected_limit
        if excess > 0:
            for key in heapq.nsmallest(excess, self._protected, key=self._ranks.__getitem__):
                self._protected.discard(key)
                self._place(key, _PROBATION, self._ranks[key][1])
        return tick

    @override
    def forget(self, key: ChunkKey) -> None:
        super().forget(key)
        self._protected.discard(key)

    @override
    def _segment_touched(self, segment: int) -> int:
        return _PROTECTED


POLICIES: Final = {"lru": LruPolicy, "slru": SegmentedLruPolicy}


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """Return a policy by name.

    Args:
        name: "lru" or "slru" (scan-resistant).
        capacity: Chunks that fit, or an estimate.

    Raises:
        ConfigurationError: No policy has this name.
    """
    if name not in POLICIES:
        raise ConfigurationError(f"eviction policy {name!r} is not known; use one of {', '.join(POLICIES)}")
    return POLICIES[name](capacity)
