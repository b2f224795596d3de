"""The local NVMe tier: one file per chunk, moved with O_DIRECT between the device and the host slot.

Owned by one engine and touched from its loop only. Chunk bytes move through aiofiles on ``threads`` threads, straight
from and to the memoryview given. The steps around a transfer run on others, so that the device stays busy while the
next chunk finds its file: those that change the directory (`directory.py`) and may wait for its lock on two, those that
only look (`queries.py`) on two more, so that neither reads nor lookups ever wait for a lock.

Nothing is synced: the frame's checksum, verified by the engine, decides what survived a power cut. What a killed
process leaves is complete, because a chunk appears by a rename after its last byte was written.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Final, TypeVar

from akvcache.backend import BackendContext, Capabilities, StoredChunk, map_errors
from akvcache.errors import BackendUnavailable, CommitFailed, ConfigurationError, UsageError
from akvcache.keys import ChunkKey, NamespaceId
from akvcache.supervision import run_blocking, shielded

from . import queries
from .chunkio import ChunkIO
from .directory import HEADROOM_BYTES, CacheDirectory, Found, Reservation
from .files import ABSENT, FULL, allocated
from .index import ChunkIndex
from .manifest import difference, other_manifests
from .names import place_of
from .options import DirectMode, NvmeOptions
from .recovery import temp_charge
from .room import BATCH, RoomKeeper
from .stats import NvmeStatistics

__all__ = ("NvmeBackend",)

T = TypeVar("T")
_log = logging.getLogger("akvcache.nvme")

_NAME: Final = "nvme"

STEP_THREADS: Final = 2
"""Threads for the steps around transfers, and chunks in flight beyond those that move."""

_FIXED_BYTES: Final = 24576
"""What an empty cache of one namespace counts: usage, manifest and four directories, a block each."""


class _State(Enum):
    NEW = "new"
    OPEN = "open"
    CLOSED = "closed"


class NvmeBackend:
    """Chunk files in a directory that several processes may share; see `akvcache.backend.Backend`.

    All of them keep one byte cap together. A process evicts what it knows, its own chunks and those it found, and
    looks around for others when it knows of nothing it may evict.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        capacity_bytes: int,
        direct: DirectMode = DirectMode.AUTO,
        threads: int = 4,
        recycle_share: float = 0.25,
    ) -> None:
        """Describe a tier; nothing is touched before `open`.

        Args:
            root: Directory on a local file system; made when missing.
            capacity_bytes: Cap on the allocated bytes of everything below `root`.
            direct: Whether to bypass the page cache; AUTO does where the file system can.
            threads: Chunks moved at once.
            recycle_share: Share of the capacity that files waiting to be written again may hold.

        Raises:
            ConfigurationError: A number is out of range.
        """
        if capacity_bytes < 1 or threads < 1:
            raise ConfigurationError(f"nvme: capacity ({capacity_bytes}) and threads ({threads}) must be positive")
        if not 0 <= recycle_share <= 1:
            raise ConfigurationError(f"nvme: recycle_share must lie between 0 and 1, got {recycle_share}")
        self._root = Path(root)
        self._capacity_bytes = capacity_bytes
        self._direct = direct
        self._threads = threads
        self._state = _State.NEW
        self._index = ChunkIndex()
        self._files = CacheDirectory(
            self._root, capacity_bytes=capacity_bytes, spare_limit_bytes=int(capacity_bytes * recycle_share)
        )
        self._io = ThreadPoolExecutor(threads, thread_name_prefix="akv-nvme-io")
        self._steps = ThreadPoolExecutor(STEP_THREADS, thread_name_prefix="akv-nvme-step")
        self._lookups = ThreadPoolExecutor(STEP_THREADS, thread_name_prefix="akv-nvme-lookup")
        self._chunks = ChunkIO(self._io)
        self._room = RoomKeeper(self._files, self._index, self._steps, capacity_bytes)
        self._was_full = False
        self._running = 0
        self._idle = asyncio.Event()

    @classmethod
    def from_url(cls, url: str) -> NvmeBackend:
        """Return the backend of ``nvme:///var/cache/akv?capacity=200GiB&direct=auto&threads=4&recycle=0.25``.

        Raises:
            ConfigurationError: An option is unknown, missing or malformed, or the path is not absolute.
        """
        options = NvmeOptions.parse(url)
        return cls(
            options.root,
            capacity_bytes=options.capacity_bytes,
            direct=options.direct,
            threads=options.threads,
            recycle_share=options.recycle_share,
        )

    def __repr__(self) -> str:
        return f"<NvmeBackend {self._root} {self._state.value} {self._index!r}>"

    @property
    def name(self) -> str:
        """See `Backend.name`."""
        return _NAME

    @property
    def capabilities(self) -> Capabilities:
        """See `Backend.capabilities`."""
        return Capabilities(
            persistent=True, max_reads=self._threads + STEP_THREADS, max_writes=self._threads + STEP_THREADS
        )

    def statistics(self) -> NvmeStatistics:
        """Return what this backend sees and did."""
        return NvmeStatistics(
            entries=len(self._index),
            used_bytes=self._files.ledger.used_bytes,
            spare_bytes=self._files.ledger.spare_bytes,
            capacity_bytes=self._capacity_bytes,
            direct=self._files.open_flags != 0,
            evictions=self._room.evictions,
            recycled=self._files.num_recycled,
            leftovers_reclaimed=self._files.owner.num_reclaimed,
        )

    async def open(self, context: BackendContext) -> None:
        """See `Backend.open`. Names and sizes are read, payloads are not."""
        if self._state is not _State.NEW:
            raise UsageError(f"{self!r} cannot be opened again")
        least = temp_charge(context.frame_bytes) + HEADROOM_BYTES + _FIXED_BYTES
        if self._capacity_bytes < least:
            raise ConfigurationError(
                f"nvme: capacity of {self._capacity_bytes} bytes holds no chunk; {least} bytes is the least"
            )
        self._room.is_protected = context.is_protected
        self._state = _State.OPEN
        try:
            with self._call("open"):
                await shielded(self._recover())
        except BaseException:
            await self.aclose()
            raise

    async def attach(self, namespace_id: NamespaceId, manifest: Mapping[str, object]) -> None:
        """See `Backend.attach`."""
        with self._call("attach"):
            await shielded(self._attach(namespace_id, manifest))

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """See `Backend.contains`. The disk answers, all in one hop: others put chunks there and take them away."""
        with self._call("contains"):
            found = await run_blocking(self._lookups, queries.locate, self._root, keys)
            for key, nbytes in zip(keys, found, strict=True):
                if nbytes is None:
                    await self._missed(key)
                elif key not in self._index:
                    self._discovered(key, nbytes)
            return [nbytes is not None for nbytes in found]

    async def read(self, key: ChunkKey, into: memoryview) -> int | None:
        """See `Backend.read`."""
        with self._call("read", key), self._index.reading(key):
            return await shielded(self._read(key, into))

    async def write(self, key: ChunkKey, frame: memoryview) -> None:
        """See `Backend.write`."""
        with self._call("write", key):
            await shielded(self._write(key, frame))

    async def delete(self, key: ChunkKey) -> bool:
        """See `Backend.delete`."""
        with self._call("delete", key):
            existed = await run_blocking(self._steps, self._files.delete, key)
            self._index.drop(key)
            return existed

    async def scan(self, namespace_id: NamespaceId) -> AsyncIterator[StoredChunk]:
        """See `Backend.scan`. Reads the directory, so chunks of other processes are among them."""
        with self._call("scan"):
            names = await run_blocking(self._lookups, queries.fan_outs, self._root, namespace_id)
        for name in names:
            with self._call("scan"):
                batch = await run_blocking(self._lookups, queries.chunks_in, self._root, namespace_id, name)
            for chunk in batch:
                yield chunk

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """See `Backend.touch`."""
        self._index.touch(keys)

    async def aclose(self) -> None:
        """See `Backend.aclose`. Waits for running calls."""
        if self._state is _State.OPEN:
            self._state = _State.CLOSED
            await shielded(self._close())
        self._state = _State.CLOSED

    @contextmanager
    def _call(self, op: str, key: ChunkKey | None = None) -> Generator[None, None, None]:
        if self._state is not _State.OPEN:
            raise BackendUnavailable(f"the cache at {self._root} is not open", backend=_NAME, op=op, key=key)
        self._running += 1
        self._idle.clear()
        try:
            with map_errors(_NAME, op, key):
                yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    # -- opening and closing ------------------------------------------------------------------------------------------

    async def _recover(self) -> None:
        census = await self._room.census()
        await self._choose_direct()
        await self._room.shrink()
        statistics = self.statistics()
        _log.info("opened %s: %s", self._root, statistics)
        if census.num_ignored or census.num_unreadable:
            _log.warning(
                "%s holds %d names that are not ours and %d directories that cannot be read; "
                "they count against the capacity as far as they can be seen",
                self._root,
                census.num_ignored,
                census.num_unreadable,
            )
        if statistics.leftovers_reclaimed:
            _log.info("%s: reclaimed %d unfinished files", self._root, statistics.leftovers_reclaimed)

    async def _choose_direct(self) -> None:
        if self._direct is DirectMode.OFF:
            return
        refusal = await run_blocking(self._steps, self._files.probe_direct)
        if refusal is None:
            self._files.open_flags = os.O_DIRECT
        elif self._direct is DirectMode.ON:
            raise ConfigurationError(f"nvme: direct=on, but {self._root} refuses O_DIRECT: {refusal}")
        else:
            _log.warning("%s refuses O_DIRECT (errno %s: %s); using the page cache", self._root, refusal.errno, refusal)

    async def _attach(self, namespace_id: NamespaceId, manifest: Mapping[str, object]) -> None:
        conflict = await self._despite_full_device(
            lambda: run_blocking(self._steps, self._files.attach, namespace_id, manifest), None
        )
        if conflict is not None:
            _log.warning("manifest of namespace %s in %s is left alone: %s", namespace_id.hex(), self._root, conflict)
        for position, key in enumerate(self._index.attach(namespace_id)):
            self._index.promote(key)
            if position % BATCH == 0:
                await asyncio.sleep(0)
        others = await run_blocking(self._lookups, other_manifests, self._root, namespace_id)
        surprises = [
            (other, change)
            for other, theirs in others.items()
            if self._index.holds_any(other) and (change := difference(manifest, theirs))
        ]
        if surprises:
            other, change = surprises[0]
            _log.warning(
                "entries of namespace %s%s were written with %s and will not be hit; they count against the capacity "
                "and are evicted first",
                other.hex(),
                f" and {len(surprises) - 1} more" if len(surprises) > 1 else "",
                change,
            )
        await self._room.shrink()

    async def _close(self) -> None:
        if self._running:
            await self._idle.wait()
        await run_blocking(self._steps, self._files.close)
        await run_blocking(self._lookups, self._io.shutdown)
        await run_blocking(self._lookups, self._steps.shutdown)
        self._lookups.shutdown(wait=False)

    # -- moving chunks ------------------------------------------------------------------------------------------------

    async def _read(self, key: ChunkKey, into: memoryview) -> int | None:
        try:
            chunk = await run_blocking(self._lookups, queries.open_chunk, self._root, key, self._files.open_flags)
        except OSError as error:
            if error.errno not in ABSENT:
                raise
            if error.errno != errno.ENOENT:
                _log.warning("%s is not a file of ours and is ignored: %s", Path(*place_of(key)), error)
            await self._missed(key)
            return None
        size = chunk.status.st_size
        try:
            done = await self._chunks.read(chunk.file, into[:size])
        finally:
            is_same = await run_blocking(self._lookups, queries.close_chunk, self._root, key, chunk)
        if not is_same:
            await self._missed(key)  # evicted, and perhaps overwritten while it was read
            return None
        if key not in self._index:
            self._discovered(key, allocated(chunk.status))
        return size if done == min(size, len(into)) else done

    async def _write(self, key: ChunkKey, frame: memoryview) -> None:
        await self._despite_full_device(lambda: self._write_once(key, frame), key)

    async def _despite_full_device(self, step: Callable[[], Coroutine[object, object, T]], key: ChunkKey | None) -> T:
        """Run `step`; if the device is full before the cap is reached, give some of it back and run it once more."""
        try:
            return await step()
        except OSError as error:
            if error.errno not in FULL:
                raise
            if not self._was_full:
                self._was_full = True
                _log.warning("%s is full before its capacity is reached: %s", self._root, error)
        await self._room.give_way(key)
        return await step()

    async def _write_once(self, key: ChunkKey, frame: memoryview) -> None:
        room = await self._room.reserve(key, len(frame))
        if isinstance(room, Found):
            self._index.add(key, room.allocated_bytes)
            return
        try:
            await self._chunks.write(room.file, frame)
            nbytes = await run_blocking(self._steps, self._files.commit, room, key)
        except BaseException as error:
            await self._abandon(room)
            if isinstance(error, FileNotFoundError):
                raise CommitFailed(str(error), backend=_NAME, op="write", key=key, retryable=True) from error
            raise
        self._index.add(key, nbytes)

    async def _abandon(self, reservation: Reservation) -> None:
        try:
            await run_blocking(self._steps, self._files.abandon, reservation)
        except FileNotFoundError:
            self._room.doubt(reservation.charge)
        except OSError as error:
            _log.warning("an unfinished file stays in %s until this process ends: %s", self._root, error)

    async def _missed(self, key: ChunkKey) -> None:
        """Forget a chunk that is not there."""
        if key in self._index:
            self._room.doubt(self._index.drop(key))
            await self._room.resolve_doubt()

    def _discovered(self, key: ChunkKey, nbytes: int) -> None:
        """Remember a chunk that someone else has put there."""
        self._index.add(key, nbytes)
        self._room.doubt(nbytes)
