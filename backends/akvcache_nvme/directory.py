"""One process's hold on a cache directory: every step that changes what is allocated below it.

::

    <root>/usage                                    counters of all processes, and their lock (ledger.py)
    <root>/<namespace>/manifest.json                for operators (manifest.py)
    <root>/<namespace>/<xx>/<digest>-<depth>.akv    a committed chunk, one frame (names.py)
    <root>/spare/<random>                           files to write the next chunks into
    <root>/tmp/<owner>/lock                         held while the owner lives (owners.py)
    <root>/tmp/<owner>/<n>                          a file being written

A write goes: `CacheDirectory.reserve`, or `CacheDirectory.recycle` with a victim, gives a file under ``tmp`` that has
all its blocks and is counted in full; the bytes are written outside the lock; `CacheDirectory.commit` renames. A
victim's file is renamed and overwritten, because writing into allocated blocks is several times faster than into a
new file (docs/adr/0005-recycle-chunk-files.md).

Blocking; runs on executor threads. Each step holds the ledger's lock from its first change to its last.
"""

from __future__ import annotations

import io
import itertools
import os
import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from akvcache.keys import ChunkKey, NamespaceId
from akvcache.layout import PAGE_BYTES

from . import files
from .ledger import UsageLedger
from .manifest import conflict, encode_manifest, read_manifest, write_manifest
from .names import LOCK, MANIFEST, SPARE, TMP, place_of
from .owners import Owner
from .queries import status_of
from .recovery import DIRECTORY_BYTES, Census, sacrifice, take_census, temp_charge

__all__ = ("HEADROOM_BYTES", "CacheDirectory", "Found", "Reservation")

T = TypeVar("T")

HEADROOM_BYTES: Final = 32768
"""Kept free below the cap for what a process makes by opening: its directory, its lock, a probe, a manifest."""

_NEW: Final = os.O_CREAT | os.O_EXCL


@dataclass(frozen=True, slots=True)
class Reservation:
    """A file under the owner's directory with room for one frame.

    Attributes:
        name: The file.
        charge: Bytes it counts until it is committed or abandoned, which also closes it.
        file: It, open for writing.
    """

    name: str
    charge: int
    file: io.FileIO


@dataclass(frozen=True, slots=True)
class Found:
    """The chunk is stored already."""

    allocated_bytes: int


class CacheDirectory:
    """A root, and this process's part in it.

    Attributes:
        root: The files.directory.
        owner: This process's mark.
        ledger: Usage of all processes.
        num_recycled: Files given out that were an older chunk's.
        open_flags: ``os.O_DIRECT`` or 0, for chunk files.
    """

    def __init__(self, root: Path, *, capacity_bytes: int, spare_limit_bytes: int) -> None:
        self.root = root
        self.owner = Owner(root)
        self.ledger = UsageLedger(root, self._enter)
        self.num_recycled = self.open_flags = 0
        self._limit_bytes = capacity_bytes - HEADROOM_BYTES
        self._spare_limit_bytes = spare_limit_bytes
        self._attached: set[str] = set()
        self._emptied: set[tuple[str, str]] = set()  # directories that may have lost their last chunk
        self._names = map("{:x}".format, itertools.count())

    @property
    def excess_bytes(self) -> int:
        """Allocated bytes beyond the cap, as last seen."""
        return max(0, self.ledger.used_bytes - self._limit_bytes)

    def census(self) -> Census:
        """Take hold of the directory, reclaim what dead owners left, count everything. Repeatable."""
        with self.ledger.locked():
            try:
                return self._enter()
            except OSError as error:
                if error.errno not in files.FULL or not sacrifice(self.root):
                    raise
            return self._enter()

    def probe_direct(self) -> OSError | None:
        """Try O_DIRECT in the owner's directory; return the error if the file system refuses it."""
        with self.ledger.locked(), files.directory(self.root, TMP, self.owner.name) as own:
            self.ledger.grow(PAGE_BYTES)
            refusal = files.probe_direct(own)
            self.ledger.shrink(PAGE_BYTES)
            return refusal

    def close(self) -> None:
        """Remove the owner's directory and let go. Idempotent."""
        if self.owner.is_held and self.root.is_dir():
            with suppress(OSError), self.ledger.locked(), files.directory(self.root, TMP) as parent:
                with files.directory(self.root, TMP, self.owner.name) as own:
                    for name, status in files.list_directory(parent, self.owner.name):
                        os.unlink(name, dir_fd=own)
                        self.ledger.shrink(files.allocated(status) if name == LOCK else temp_charge(status.st_size))
                os.rmdir(self.owner.name, dir_fd=parent)
                self.ledger.shrink(DIRECTORY_BYTES)
        self.ledger.close()
        self.owner.let_go()

    def attach(self, namespace_id: NamespaceId, manifest: Mapping[str, object]) -> str | None:
        """Make a namespace's directory and its manifest.

        Returns:
            Why the manifest found in its place was left alone, or None.
        """
        name = namespace_id.hex()
        self._attached.add(name)
        text = encode_manifest(manifest)
        with self.ledger.locked():
            return self._retry_entered(lambda: self._announce(name, text))

    def looks_full(self, size: int) -> bool:
        """Return whether a frame needs an eviction, as far as last seen."""
        return not self.ledger.spare_bytes and self.ledger.used_bytes + temp_charge(size) > self._limit_bytes

    def reserve(self, key: ChunkKey, size: int) -> Reservation | Found | None:
        """Return a file for a frame of `size` bytes, or None if there is no room without an eviction."""
        if (status := status_of(self.root, key)) is not None:
            return Found(files.allocated(status))
        with self.ledger.locked():
            name = self._retry_entered(lambda: self._allocate(size))
        return self._open(name, size)

    def recycle(self, victim: ChunkKey, key: ChunkKey, size: int) -> Reservation | Found | None:
        """Evict a chunk and return its file, or another, for a frame of `size` bytes; None if one is not enough.

        If `key` is there already, the victim stays.

        Raises:
            OSError: With an errno of `ABSENT` if the victim had vanished.
        """
        if (status := status_of(self.root, key)) is not None:
            return Found(files.allocated(status))
        place = place_of(victim)
        with self.ledger.locked():
            self._retry_entered(self._find_own_directory)
            with files.directory(self.root, place.namespace, place.fan_out) as parent:
                name = self._adopt(place.name, parent, size)
            self._emptied.add((place.namespace, place.fan_out))
            name = name or self._allocate(size)
        return self._open(name, size)

    def commit(self, reservation: Reservation, key: ChunkKey) -> int:
        """Make a written file visible under `key`; return its allocated bytes.

        If another writer was first, its file stays and ours becomes spare.

        Raises:
            FileNotFoundError: The written file has vanished.
        """
        reservation.file.close()
        place = place_of(key)
        with self.ledger.locked(), files.directory(self.root, TMP, self.owner.name) as own:
            written = files.allocated(files.regular_stat(reservation.name, own))
            with self._made(place.namespace, place.fan_out) as parent:
                first = files.stat_or_none(place.name, parent)
                if first is None:
                    os.rename(reservation.name, place.name, src_dir_fd=own, dst_dir_fd=parent)
                else:
                    self._retire(reservation.name, own, written)
                self.ledger.shrink(reservation.charge - written)
                return written if first is None else files.allocated(first)

    def abandon(self, reservation: Reservation) -> None:
        """Remove a file whose write failed.

        Raises:
            FileNotFoundError: It has vanished.
        """
        reservation.file.close()
        with self.ledger.locked(), files.directory(self.root, TMP, self.owner.name) as own:
            os.unlink(reservation.name, dir_fd=own)
            self.ledger.shrink(reservation.charge)

    def delete(self, key: ChunkKey) -> bool:
        """Remove a chunk, keeping its file as spare; return whether it was there."""
        return self._remove([key], self._retire) == 1

    def evict(self, keys: Sequence[ChunkKey]) -> int:
        """Remove chunks and give their blocks back to the device; return how many were there."""
        return self._remove(keys, self._unlink)

    def squeeze(self, size: int) -> bool:
        """Return whether a frame fits after removing directories that have lost their chunks."""
        with self.ledger.locked():
            return self._fits(temp_charge(size))

    def drop_spares(self) -> None:
        """Give the blocks of all spare files back to the device."""
        with self.ledger.locked():
            self._trim_spares(0)

    def _open(self, name: str | None, size: int) -> Reservation | None:
        if name is None:
            return None
        names = (TMP, self.owner.name, name)
        try:
            return Reservation(
                name, temp_charge(size), files.open_file(self.root, names, os.O_WRONLY | self.open_flags)
            )
        except OSError:
            with self.ledger.locked(), files.directory(self.root, *names[:-1]) as own:
                self._unlink(name, own, temp_charge(size))
            raise

    # Everything below needs the lock.

    def _enter(self) -> Census:
        with self._made(TMP), self._made(SPARE):
            live = self.owner.reclaim()
        with self._made(TMP, self.owner.name) as own:
            self.owner.hold(own)
        live.add(self.owner.name)
        census = take_census(self.root, live=live, keep=self._attached, sole=len(live) == 1)
        self.ledger.reset(used_bytes=census.used_bytes, spare_bytes=census.spare_bytes)
        self._emptied = census.empty
        self._trim_spares(self._spare_limit_bytes)
        self._fits(0)
        return census

    def _retry_entered(self, step: Callable[[], T]) -> T:
        """Run `step`; if a directory is missing, make them all and run it once more."""
        try:
            return step()
        except FileNotFoundError:
            self._enter()
            return step()

    def _find_own_directory(self) -> None:
        with files.directory(self.root, TMP, self.owner.name):
            pass

    def _announce(self, namespace: str, text: bytes) -> str | None:
        with self._made(namespace) as parent:
            found = read_manifest(parent)
            if found is not None:
                return conflict(found, text)
            charge, name = temp_charge(len(text)), next(self._names)
            with files.directory(self.root, TMP, self.owner.name) as own:
                self.ledger.grow(charge)
                try:
                    charge -= write_manifest(name, own, text)
                    old = files.stat_or_none(MANIFEST, parent)
                    os.rename(name, MANIFEST, src_dir_fd=own, dst_dir_fd=parent)
                    charge += files.allocated(old) if old is not None else 0
                finally:
                    self.ledger.shrink(charge)
        return None

    @contextmanager
    def _made(self, *names: str) -> Generator[int, None, None]:
        """Open a directory below the root, making what is missing of it."""
        for depth, name in enumerate(names):
            with files.directory(self.root, *names[:depth]) as parent:
                try:
                    os.stat(name, dir_fd=parent, follow_symlinks=False)
                except FileNotFoundError:
                    self.ledger.grow(DIRECTORY_BYTES)
                    os.mkdir(name, 0o700, dir_fd=parent)
        with files.directory(self.root, *names) as handle:
            yield handle

    def _fits(self, nbytes: int, size: int = 0) -> bool:
        """Return whether `nbytes` more fit, if need be by removing directories that have lost their chunks.

        Only when those together hold a frame of `size` bytes or more: removing one takes milliseconds, the next
        chunk may want it again, and below that an eviction is cheaper.
        """
        short = self.ledger.used_bytes + nbytes - self._limit_bytes
        while short > 0 and len(self._emptied) * DIRECTORY_BYTES >= max(short, size):
            namespace, fan_out = self._emptied.pop()
            with suppress(OSError), files.directory(self.root, namespace) as parent:
                os.rmdir(fan_out, dir_fd=parent)
                self.ledger.shrink(DIRECTORY_BYTES)
                short -= DIRECTORY_BYTES
        return short <= 0

    def _allocate(self, size: int) -> str | None:
        """Return a spare or a new file, or None if there is no room for one."""
        while (name := self._first_spare()) is not None:
            with files.directory(self.root, SPARE) as spare:
                self.ledger.move_spare(-files.allocated(files.regular_stat(name, spare)))
                taken = self._adopt(name, spare, size)
            if taken is not None:
                return taken
        charge = temp_charge(size)
        if not self._fits(charge, size):
            return None
        with files.directory(self.root, TMP, self.owner.name) as own:
            name = next(self._names)
            self.ledger.grow(charge)
            self._resize(name, own, size, counted=charge, create=_NEW)
        return name

    def _adopt(self, name: str, parent: int, size: int) -> str | None:
        """Take a counted file for a frame of `size` bytes; if that would not fit, remove it and return None."""
        had = files.allocated(files.regular_stat(name, parent))
        charge = temp_charge(size)
        if not self._fits(charge - had, size):
            self._unlink(name, parent, had)
            return None
        temp = next(self._names)
        with files.directory(self.root, TMP, self.owner.name) as own:
            os.rename(name, temp, src_dir_fd=parent, dst_dir_fd=own)
            self.ledger.grow(max(0, charge - had))
            self._resize(temp, own, size, counted=max(charge, had), create=0)
            self.ledger.shrink(max(0, had - charge))
        self.num_recycled += 1
        return temp

    def _resize(self, name: str, own: int, size: int, *, counted: int, create: int) -> None:
        try:
            files.resize(name, own, size, create=create)
        except OSError:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=own)
            self.ledger.shrink(counted)
            raise

    def _first_spare(self) -> str | None:
        if self.ledger.spare_bytes == 0:
            return None
        with files.directory(self.root) as parent:
            name = files.first_file(parent, SPARE)
        if name is not None:
            return name
        self.ledger.shrink(self.ledger.spare_bytes)  # someone removed them by hand
        self.ledger.move_spare(-self.ledger.spare_bytes)
        return None

    def _trim_spares(self, limit_bytes: int) -> None:
        """Remove spare files until they hold no more than `limit_bytes`."""
        while self.ledger.spare_bytes > limit_bytes and (name := self._first_spare()) is not None:
            with files.directory(self.root, SPARE) as spare:
                nbytes = files.allocated(files.regular_stat(name, spare))
                self.ledger.move_spare(-nbytes)
                self._unlink(name, spare, nbytes)

    def _retire(self, name: str, parent: int, nbytes: int) -> None:
        """Make a counted file spare, or remove it if there are enough."""
        if self.ledger.spare_bytes + nbytes > self._spare_limit_bytes:
            self._unlink(name, parent, nbytes)
            return
        with self._made(SPARE) as spare:
            os.rename(name, secrets.token_hex(8), src_dir_fd=parent, dst_dir_fd=spare)
        self.ledger.move_spare(nbytes)

    def _unlink(self, name: str, parent: int, nbytes: int) -> None:
        os.unlink(name, dir_fd=parent)
        self.ledger.shrink(nbytes)

    def _remove(self, keys: Sequence[ChunkKey], how: Callable[[str, int, int], None]) -> int:
        removed = 0
        with self.ledger.locked():
            for place in map(place_of, keys):
                try:
                    with files.directory(self.root, place.namespace, place.fan_out) as parent:
                        how(place.name, parent, files.allocated(files.regular_stat(place.name, parent)))
                except OSError as error:
                    if error.errno not in files.ABSENT:
                        raise
                else:
                    removed += 1
                    self._emptied.add((place.namespace, place.fan_out))
            self._fits(0)
        return removed
