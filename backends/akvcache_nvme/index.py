"""What this process knows to be stored: pure and synchronous.

An index is knowledge, not truth: other processes add and evict files, so an entry may be missing or stale, and the
path is what counts.

Owned by one backend and touched from its loop only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from akvcache.keys import ChunkKey, NamespaceId, namespace_of
from akvcache.policy import LruPolicy

__all__ = ("ChunkIndex", "Victim")

_RECOVERED_TICK: Final = 0
"""Recovered chunks rank below everything used since, and among themselves by depth: tails leave first."""

_FOREIGN_TICK: Final = -1
"""Chunks of namespaces that nobody here has attached leave before all others."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A chunk to evict."""

    key: ChunkKey
    allocated_bytes: int


class ChunkIndex:
    """Allocated bytes by key, the eviction order, and who is reading.

    Invariant: `used_bytes` is the sum over all entries, and the policy ranks exactly the entries.
    """

    def __init__(self) -> None:
        self.used_bytes = 0
        self._chunks: dict[NamespaceId, dict[ChunkKey, int]] = {}
        self._policy = LruPolicy(1)
        self._readers: Counter[ChunkKey] = Counter()
        self._attached: set[NamespaceId] = set()

    def __len__(self) -> int:
        return len(self._policy)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._chunks.get(namespace_of(key), {})

    def __repr__(self) -> str:
        return f"<ChunkIndex {len(self)} chunks, {self.used_bytes} bytes>"

    def add(self, key: ChunkKey, allocated_bytes: int) -> None:
        """Note a chunk as used by the latest request."""
        self._add(key, allocated_bytes, None)

    def learn(self, key: ChunkKey, allocated_bytes: int) -> None:
        """Note a chunk found on disk, unless it is known."""
        if key not in self:
            self._add(key, allocated_bytes, _RECOVERED_TICK if namespace_of(key) in self._attached else _FOREIGN_TICK)

    def drop(self, key: ChunkKey) -> int:
        """Forget a chunk; return its bytes, 0 if it was not known."""
        known = self._chunks.get(namespace_of(key), {})
        nbytes = known.pop(key, 0)
        if not known:
            self._chunks.pop(namespace_of(key), None)
        self._policy.forget(key)
        self.used_bytes -= nbytes
        return nbytes

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Note that one request used these chunks of one prefix."""
        self._policy.touch(keys)

    def attach(self, namespace_id: NamespaceId) -> Sequence[ChunkKey]:
        """Note that a namespace is in use; return the chunks that `promote` should be called with."""
        if namespace_id in self._attached:
            return ()
        self._attached.add(namespace_id)
        return list(self._chunks.get(namespace_id, ()))

    def promote(self, key: ChunkKey) -> None:
        """Rank a chunk as recovered, no longer as foreign."""
        if key in self:
            self._policy.forget(key)
            self._policy.insert(key, _RECOVERED_TICK)

    def holds_any(self, namespace_id: NamespaceId) -> bool:
        """Return whether a chunk of the namespace is known."""
        return namespace_id in self._chunks

    @contextmanager
    def reading(self, key: ChunkKey) -> Generator[None, None, None]:
        """Keep a chunk from being chosen as victim."""
        self._readers[key] += 1
        try:
            yield
        finally:
            self._readers[key] -= 1
            if not self._readers[key]:
                del self._readers[key]

    def claim(self, is_protected: Callable[[ChunkKey], bool], newcomer: ChunkKey | None) -> Victim | None:
        """Choose the chunk to evict and forget it, so that nobody else chooses it.

        Args:
            is_protected: Whether a lease covers a key.
            newcomer: The chunk that room is made for; what ranks above it stays.
        """
        chosen = self._policy.victims(
            1, lambda key: key not in self._readers and not is_protected(key), newcomer=newcomer
        )
        return Victim(chosen[0], self.drop(chosen[0])) if chosen else None

    def _add(self, key: ChunkKey, allocated_bytes: int, tick: int | None) -> None:
        known = self._chunks.setdefault(namespace_of(key), {})
        self.used_bytes += allocated_bytes - known.get(key, 0)
        known[key] = allocated_bytes
        self._policy.insert(key, tick)
