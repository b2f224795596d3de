"""Room for a chunk: the index and the directory brought together.

A process evicts what it knows: its own chunks and those it found. What it learns of late, because another process
or an operator changed the directory, it calls doubt; once enough has piled up, or when it knows of nothing to evict,
it takes a census, which makes usage exact again and shows what there is to evict.

Touched from the loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final

from akvcache.errors import CapacityExhausted
from akvcache.keys import ChunkKey
from akvcache.supervision import run_blocking

from .directory import CacheDirectory, Found, Reservation
from .files import ABSENT
from .index import ChunkIndex, Victim
from .recovery import Census

__all__ = ("BATCH", "RoomKeeper")

BATCH: Final = 512
"""Index entries handled between two turns of the loop."""

_REST: Final = 20
"""A tier with nothing to evict looks around again after this many times as long as the last census took."""

_EVICT_BATCH: Final = 64
"""Files removed while holding the lock: each can take milliseconds."""

_DOUBT_SHARE: Final = 64
"""A census is due when files worth capacity / this came or went unseen: it examines that many files for each."""

_log = logging.getLogger("akvcache.nvme")


class RoomKeeper:
    """Finds room under the cap.

    Attributes:
        is_protected: Whether a live lease covers a key.
        evictions: Chunks evicted.
    """

    def __init__(self, files: CacheDirectory, index: ChunkIndex, executor: Executor, capacity_bytes: int) -> None:
        self.is_protected: Callable[[ChunkKey], bool] = lambda _key: False
        self.evictions = 0
        self._files = files
        self._index = index
        self._executor = executor
        self._capacity_bytes = capacity_bytes
        self._doubtful_bytes = 0
        self._rest_until_s = 0.0

    async def census(self) -> Census:
        """Count what lies in the directory and learn of every chunk in it."""
        self._doubtful_bytes = 0
        census = await run_blocking(self._executor, self._files.census)
        for chunks in census.chunks.values():
            for position, (key, nbytes) in enumerate(chunks.items()):
                self._index.learn(key, nbytes)
                if position % BATCH == 0:
                    await asyncio.sleep(0)
        return census

    def doubt(self, nbytes: int) -> None:
        """Note that files of `nbytes` turned out to have come or gone unseen."""
        self._doubtful_bytes += nbytes

    async def resolve_doubt(self) -> None:
        """Take a census if there is reason enough."""
        if self._doubtful_bytes * _DOUBT_SHARE >= self._capacity_bytes:
            await self.census()

    async def shrink(self) -> None:
        """Evict until usage is below the cap."""
        if self._files.excess_bytes:
            await run_blocking(self._executor, self._files.drop_spares)
        while (excess := self._files.excess_bytes) > 0:
            victims: list[ChunkKey] = []
            while excess > 0 and len(victims) < _EVICT_BATCH and (chosen := self._index.claim(self.is_protected, None)):
                victims.append(chosen.key)
                excess -= chosen.allocated_bytes
            if not victims:
                _log.warning("%s is %d bytes over its capacity, and nothing can be evicted", self._files.root, excess)
                return
            self.evictions += await run_blocking(self._executor, self._files.evict, victims)

    async def reserve(self, key: ChunkKey, size: int) -> Reservation | Found:
        """Return a file for a frame, evicting as needed.

        Raises:
            CapacityExhausted: Nothing may be evicted.
        """
        await self.resolve_doubt()
        room = None
        if not self._files.looks_full(size):
            room = await run_blocking(self._executor, self._files.reserve, key, size)
        while room is None:
            victim = self._index.claim(self.is_protected, key)
            if victim is not None:
                room = await self._recycle(victim, key, size)
            elif await self._look_around() or await run_blocking(self._executor, self._files.squeeze, size):
                room = await run_blocking(self._executor, self._files.reserve, key, size)
            else:
                raise CapacityExhausted(
                    "the tier is full of chunks that may not leave", backend="nvme", op="write", key=key
                )
        return room

    async def give_way(self, key: ChunkKey | None) -> None:
        """Give blocks back to a device that is full before the cap is reached."""
        await run_blocking(self._executor, self._files.drop_spares)
        victim = self._index.claim(self.is_protected, key)
        if victim is not None:
            self.evictions += await run_blocking(self._executor, self._files.evict, [victim.key])

    async def _look_around(self) -> bool:
        """Take a census in search of victims, unless one was taken for that of late; return whether it was."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        if start_s < self._rest_until_s:
            return False
        self._rest_until_s = float("inf")  # one at a time
        try:
            await self.census()
        finally:
            self._rest_until_s = loop.time() + _REST * (loop.time() - start_s)
        return True

    async def _recycle(self, victim: Victim, key: ChunkKey, size: int) -> Reservation | Found | None:
        try:
            room = await run_blocking(self._executor, self._files.recycle, victim.key, key, size)
        except OSError as error:
            if error.errno not in ABSENT:
                raise
            self.doubt(victim.allocated_bytes)
            await self.resolve_doubt()
            return await run_blocking(self._executor, self._files.reserve, key, size)
        if isinstance(room, Found):
            self._index.learn(victim.key, victim.allocated_bytes)
        else:
            self.evictions += 1
        return room
