"""Which chunk leaves first. Pure, synchronous, no I/O.

All policies rank a chunk by the last request that used it and, inside one request, by depth: the tail of a prefix
leaves before its head. Every request touches its whole path, so a parent is never older than its child and
leaf-first order follows from the rank alone.

Touched from one thread at a time.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol

from typing_extensions import override

from akvcache.errors import ConfigurationError
from akvcache.keys import ChunkKey, depth_of

__all__ = ("POLICIES", "EvictionPolicy", "LruPolicy", "SegmentedLruPolicy", "make_policy")

_PROBATION: Final = 0
_PROTECTED: Final = 1


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


_Bucket = dict[int, dict[ChunkKey, None]]
"""Chunks of one request and segment, by depth."""


class LruPolicy:
    """The request that was used longest ago leaves first.

    Ranks chunks in buckets, one per segment and tick; a subclass may move chunks between segments. A bucket holds what
    one request used last. Buckets stand in a heap by tick, so that a touch costs a few dictionary operations per chunk,
    however many chunks there are.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self._tick = 1
        self._ranks: dict[ChunkKey, tuple[int, int]] = {}
        self._buckets: tuple[dict[int, _Bucket], dict[int, _Bucket]] = ({}, {})
        self._ticks: tuple[list[int], list[int]] = ([], [])

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
        rank = self._ranks.pop(key, None)
        if rank is None:
            return
        segment, tick = rank
        bucket, depth = self._buckets[segment][tick], depth_of(key)
        del bucket[depth][key]
        if not bucket[depth]:
            del bucket[depth]
        if not bucket:
            del self._buckets[segment][tick]

    def victims(
        self, count: int, evictable: Callable[[ChunkKey], bool], *, newcomer: ChunkKey | None = None
    ) -> Sequence[ChunkKey]:
        ceiling = (self._tick, -depth_of(newcomer)) if newcomer is not None else None
        chosen: list[ChunkKey] = []
        for segment in (_PROBATION, _PROTECTED):
            for tick, depth, key in self._ascending(segment):
                if len(chosen) == count or (ceiling is not None and (tick, -depth) >= ceiling):
                    return chosen
                if evictable(key):
                    chosen.append(key)
        return chosen

    def _ascending(self, segment: int) -> Iterator[tuple[int, int, ChunkKey]]:
        """Yield (tick, depth, key) of a segment, lowest rank first; nothing may change meanwhile."""
        heap, buckets = self._ticks[segment], self._buckets[segment]
        seen: list[int] = []
        try:
            while heap:
                tick = heapq.heappop(heap)
                if tick not in buckets or (seen and seen[-1] == tick):
                    continue  # a bucket that is gone, or stands twice because it was gone for a while
                seen.append(tick)
                for depth in sorted(buckets[tick], reverse=True):
                    for key in buckets[tick][depth]:
                        yield tick, depth, key
        finally:
            for tick in seen:
                heapq.heappush(heap, tick)

    def _place(self, key: ChunkKey, segment: int, tick: int) -> None:
        LruPolicy.forget(self, key)
        self._ranks[key] = segment, tick
        buckets, heap = self._buckets[segment], self._ticks[segment]
        if tick not in buckets:
            buckets[tick] = {}
            heapq.heappush(heap, tick)
            if len(heap) > 64 + 4 * len(buckets):
                heap[:] = buckets
                heapq.heapify(heap)
        buckets[tick].setdefault(depth_of(key), {})[key] = None

    def _segment_touched(self, segment: int) -> int:
        """Return the segment of a chunk of `segment` that is used again."""
        return segment


class SegmentedLruPolicy(LruPolicy):
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
        self._num_protected = 0

    @override
    def touch(self, keys: Iterable[ChunkKey]) -> int:
        tick = super().touch(keys)
        excess = self._num_protected - self._protected_limit
        if excess > 0:
            for used, _, key in list(itertools.islice(self._ascending(_PROTECTED), excess)):
                self._place(key, _PROBATION, used)
        return tick

    @override
    def forget(self, key: ChunkKey) -> None:
        self._num_protected -= self._ranks.get(key, (_PROBATION, 0))[0] == _PROTECTED
        super().forget(key)

    @override
    def _place(self, key: ChunkKey, segment: int, tick: int) -> None:
        was = self._ranks.get(key, (_PROBATION, 0))[0]
        self._num_protected += segment - was
        super()._place(key, segment, tick)

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
