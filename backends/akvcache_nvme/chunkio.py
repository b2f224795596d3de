"""Chunk bytes between an open file and a memoryview: unbuffered, no copy, O_DIRECT where it works.

The step that finds or makes a file opens it, and the step that has the last word on it closes it, so a chunk costs
three hops to a thread, not six; each hop costs up to 2 % of a 16 MiB transfer (docs/adr/0005-recycle-chunk-files.md).

Cancellation: callers run these to their end (`akvcache.supervision.shielded`), because aiofiles leaves a running
thread to itself when its caller is cancelled.
"""

from __future__ import annotations

import asyncio
import errno
import io
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import TYPE_CHECKING, cast

import aiofiles.threadpool

from akvcache.supervision import run_blocking

from .files import leave_direct

if TYPE_CHECKING:
    from aiofiles.threadpool.binary import AsyncFileIO

__all__ = ("ChunkIO",)

_log = logging.getLogger("akvcache.nvme")


class ChunkIO:
    """Moves chunks on one executor."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._has_warned = False

    async def read(self, file: io.FileIO, into: memoryview) -> int:
        """Read from the start of `file` until `into` is full or the file ends; return how much was read."""
        wrapped, done = self._wrap(file), 0
        while done < len(into):
            count = await self._move(file, wrapped.readinto, into[done:])
            if not count:
                break
            done += count
        return done

    async def write(self, file: io.FileIO, frame: memoryview) -> None:
        """Write `frame` from the start of `file`."""
        wrapped, done = self._wrap(file), 0
        while done < len(frame):
            count = await self._move(file, wrapped.write, frame[done:])
            if not count:
                raise OSError(errno.EIO, "nothing was written")
            done += count

    async def _move(
        self, file: io.FileIO, move: Callable[[memoryview], Awaitable[int | None]], view: memoryview
    ) -> int | None:
        try:
            return await move(view)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        if not self._has_warned:
            self._has_warned = True
            _log.warning("O_DIRECT was refused for a chunk (errno %s); using the page cache for it", errno.EINVAL)
        await run_blocking(self._executor, leave_direct, file)
        return await move(view)

    def _wrap(self, file: io.FileIO) -> AsyncFileIO:
        wrapped = aiofiles.threadpool.wrap(file, loop=asyncio.get_running_loop(), executor=self._executor)
        return cast("AsyncFileIO", wrapped)
