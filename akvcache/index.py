"""Which chunk lies in which host slot, in what state, held by whom. Pure and synchronous.

::

    (absent) --begin--> WRITING --publish--> RESIDENT --evict--> (absent)
                           |                    |  drop while held
                           +--abandon--> (absent) +----> EVICTING --last hold--> (absent)

Only RESIDENT is visible. A chunk may leave when nobody holds it; `Hold` counts per owner and releases once.

Owned by the host tier, touched from the engine's loop only.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence

from akvcache.buffers import Slot
from akvcache.errors import InvariantError
from akvcache.keys import ChunkKey
from akvcache.policy import EvictionPolicy

__all__ = ("ChunkState", "Entry", "Hold", "HostIndex")


class ChunkState(enum.Enum):
    """Life of a chunk in host memory."""

    WRITING = enum.auto()
    RESIDENT = enum.auto()
    EVICTING = enum.auto()


class Entry:
    """One chunk in host memory.

    Attributes:
        holds: How many owners keep it from leaving.
        sealed: Whether its slot holds a complete frame, header and checksum included.
        source: The tier it was loaded from; empty if it was stored from the device.
    """

    __slots__ = ("holds", "key", "num_tokens", "sealed", "slot", "source", "state")

    def __init__(self, key: ChunkKey, slot: Slot, num_tokens: int) -> None:
        self.key = key
        self.slot = slot
        self.num_tokens = num_tokens
        self.state = ChunkState.WRITING
        self.holds = 0
        self.sealed = False
        self.source = ""

    def __repr__(self) -> str:
        return f"<Entry {self.key.hex()[-8:]} {self.state.name} {self.slot!r} holds={self.holds}>"


class Hold:
    """The entries one owner protects from eviction.

    Invariant: each entry is counted once per owner; `release` gives everything back and is idempotent.
    """

    def __init__(self, index: HostIndex, owner: str) -> None:
        self._index = index
        self._entries: dict[Entry, None] = {}
        self.owner = owner

    def __repr__(self) -> str:
        return f"<Hold {self.owner} {len(self._entries)} entries>"

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Entry) -> None:
        """Protect `entry`; once is enough."""
        if entry not in self._entries:
            self._index.hold(entry)
            self._entries[entry] = None
            self._index.holds.add(self)

    def discard(self, entry: Entry) -> None:
        """Stop protecting `entry`; it must be held."""
        del self._entries[entry]
        self._index.unhold(entry)
        if not self._entries:
            self._index.holds.discard(self)
        self._index.changed()

    def release(self) -> None:
        """Stop protecting everything. Idempotent."""
        entries, self._entries = self._entries, {}
        self._index.holds.discard(self)
        for entry in entries:
            self._index.unhold(entry)
        if entries:
            self._index.changed()


class HostIndex:
    """Residency of chunks in host slots.

    `freed` collects slots whose chunk has left; whoever drives the index moves them to the pool.

    Args:
        policy: Ranks the chunks.
        changed: Called after holds were given up, when chunks may have become free to leave.
    """

    def __init__(self, policy: EvictionPolicy, changed: Callable[[], None]) -> None:
        self._policy = policy
        self.changed = changed
        self._entries: dict[ChunkKey, Entry] = {}
        self._doomed: set[Entry] = set()
        self._reclaimable = 0
        self.holds: set[Hold] = set()
        self.freed: list[Slot] = []

    def __repr__(self) -> str:
        return f"<HostIndex {len(self._entries)} chunks, {self._reclaimable} reclaimable, {len(self._doomed)} leaving>"

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def reclaimable(self) -> int:
        """Chunks that may leave now."""
        return self._reclaimable

    @property
    def num_leaving(self) -> int:
        """Dropped chunks that somebody still holds."""
        return len(self._doomed)

    def resident(self, key: ChunkKey) -> Entry | None:
        """Return the visible entry of `key`, or None."""
        entry = self._entries.get(key)
        return entry if entry is not None and entry.state is ChunkState.RESIDENT else None

    def begin(self, key: ChunkKey, slot: Slot, num_tokens: int) -> Entry:
        """Note that `slot` is being filled for `key`; not visible yet."""
        if key in self._entries:
            raise InvariantError(f"chunk {key.hex()[-8:]} is filled twice")
        entry = self._entries[key] = Entry(key, slot, num_tokens)
        return entry

    def publish(self, entry: Entry, tick: int | None = None) -> bool:
        """Make a filled entry visible; return False if it was dropped meanwhile and is gone."""
        if entry.state is not ChunkState.WRITING:
            self._settle(entry)
            return False
        entry.state = ChunkState.RESIDENT
        self._policy.insert(entry.key, tick)
        if entry.holds == 0:
            self._reclaimable += 1
        return True

    def abandon(self, entry: Entry) -> None:
        """Forget an entry that was never filled; its slot becomes free."""
        if entry.state is ChunkState.WRITING:
            del self._entries[entry.key]
            entry.state = ChunkState.EVICTING
        self._settle(entry)

    def touch(self, keys: Iterable[ChunkKey]) -> int:
        """Record one request that used this path; return its tick."""
        return self._policy.touch(keys)

    def hold(self, entry: Entry) -> None:
        """Count one holder; see `Hold`."""
        entry.holds += 1
        if entry.holds == 1 and entry.state is ChunkState.RESIDENT:
            self._reclaimable -= 1

    def unhold(self, entry: Entry) -> None:
        """Count one holder less."""
        entry.holds -= 1
        if entry.holds < 0:
            raise InvariantError(f"{entry!r} released more often than held")
        if entry.holds == 0:
            if entry.state is ChunkState.RESIDENT:
                self._reclaimable += 1
            elif entry in self._doomed:
                self._settle(entry)

    def evict(self, count: int) -> list[ChunkKey]:
        """Remove up to `count` unheld chunks, least valuable first; their slots go to `freed`."""
        victims: Sequence[ChunkKey] = self._policy.victims(count, self._evictable)
        for key in victims:
            self._remove(self._entries[key])
        return list(victims)

    def drop(self, key: ChunkKey) -> bool:
        """Make a chunk invisible at once; its slot follows when the last holder lets go."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        if entry.state is ChunkState.RESIDENT and entry.holds == 0:
            self._remove(entry)
            return True
        filled = entry.state is ChunkState.RESIDENT
        del self._entries[key]
        self._policy.forget(key)
        entry.state = ChunkState.EVICTING
        if filled:
            self._doomed.add(entry)  # else whoever fills it settles it by publish or abandon
        return True

    def clear(self) -> int:
        """Drop everything; return how many chunks were dropped."""
        keys = list(self._entries)
        for key in keys:
            self.drop(key)
        return len(keys)

    def _evictable(self, key: ChunkKey) -> bool:
        return self._entries[key].holds == 0

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.key]
        self._policy.forget(entry.key)
        entry.state = ChunkState.EVICTING
        self._reclaimable -= 1
        self.freed.append(entry.slot)

    def _settle(self, entry: Entry) -> None:
        """Free the slot of an invisible entry unless somebody still holds it."""
        if entry.holds:
            self._doomed.add(entry)
        else:
            self._doomed.discard(entry)
            self.freed.append(entry.slot)
