"""Chunk bytes between a file and a memoryview: unbuffered, no copy, O_DIRECT where it works.

Cancellation: callers run these to their end (`akvcache.supervision.shielded`), because aiofiles leaves a running
thread to itself when its caller is cancelled.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from pathlib import Path
from typing import TypeVar

import aiofiles

from .files import ChunkOpener

__all__ = ("ChunkIO",)

T = TypeVar("T")
_log = logging.getLogger("akvcache.nvme")


class ChunkIO:
    """Moves chunks on one executor.

    Attributes:
        direct: Whether to bypass the page cache.
    """

    def __init__(self, root: Path, executor: Executor) -> None:
        self.direct = False
        self._root = root
        self._executor = executor
        self._has_warned = False

    async def read(self, names: tuple[str, ...], into: memoryview) -> tuple[int, os.stat_result]:
        """Read the file ``root/names...``.

        Returns:
            The size of the file, and its status when it was opened. What fits of it is in `into`.
        """
        return await self._direct_first(lambda flags: self._fill(names, into, flags))

    async def write(self, names: tuple[str, ...], frame: memoryview) -> None:
        """Write `frame` over the file ``root/names...``, which has its length."""
        await self._direct_first(lambda flags: self._drain(names, frame, flags))

    async def _fill(self, names: tuple[str, ...], into: memoryview, flags: int) -> tuple[int, os.stat_result]:
        opener = ChunkOpener(self._root, names, flags)
        # not `async with`: aiofiles would close the file on the loop's default executor
        file = await aiofiles.open(self._root, "rb", 0, opener=opener, executor=self._executor)
        try:
            size = opener.status.st_size
            done = 0
            while done < min(size, len(into)):
                count = await file.readinto(into[done:])
                if not count:
                    return done, opener.status  # cut short since it was opened
                done += count
            return size, opener.status
        finally:
            await file.close()

    async def _drain(self, names: tuple[str, ...], frame: memoryview, flags: int) -> None:
        opener = ChunkOpener(self._root, names, flags)
        file = await aiofiles.open(self._root, "r+b", 0, opener=opener, executor=self._executor)
        try:
            done = 0
            while done < len(frame):
                count = await file.write(frame[done:])
                if not count:
                    raise OSError(errno.EIO, "nothing was written", str(self._root))
                done += count
        finally:
            await file.close()

    async def _direct_first(self, move: Callable[[int], Coroutine[object, object, T]]) -> T:
        try:
            return await move(os.O_DIRECT if self.direct else 0)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.direct:
                raise
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "%s refused O_DIRECT for a chunk (errno %s); using the page cache", self._root, error.errno
                )
            return await move(0)
