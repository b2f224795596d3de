"""Questions to a cache directory. Blocking, without locks: the answer may be old when it arrives."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from akvcache.backend import StoredChunk
from akvcache.keys import ChunkKey, NamespaceId

from .files import ABSENT, allocated, directory, list_directory, open_file, regular_stat
from .names import ChunkPlace, key_of, place_of

__all__ = ("OpenChunk", "chunks_in", "close_chunk", "fan_outs", "locate", "open_chunk", "status_of")


def status_of(root: Path, key: ChunkKey) -> os.stat_result | None:
    """Return the status of a chunk's file, or None if there is none."""
    place = place_of(key)
    try:
        with directory(root, place.namespace, place.fan_out) as parent:
            return regular_stat(place.name, parent)
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise


def locate(root: Path, keys: Sequence[ChunkKey]) -> list[int | None]:
    """Return the allocated bytes of each chunk, None where there is none."""
    found = (status_of(root, key) for key in keys)
    return [None if status is None else allocated(status) for status in found]


@dataclass(frozen=True, slots=True)
class OpenChunk:
    """A chunk's file, and its status when it was opened."""

    file: io.FileIO
    status: os.stat_result


def open_chunk(root: Path, key: ChunkKey, flags: int) -> OpenChunk:
    """Open a chunk for reading.

    Raises:
        OSError: With an errno of `ABSENT` if there is no regular file.
    """
    file = open_file(root, place_of(key), os.O_RDONLY | flags)
    return OpenChunk(file, os.fstat(file.fileno()))


def close_chunk(root: Path, key: ChunkKey, chunk: OpenChunk) -> bool:
    """Close it; return whether the path of `key` still is that file, not written to since it was opened."""
    chunk.file.close()
    now = status_of(root, key)
    return now is not None and os.path.samestat(now, chunk.status) and now.st_mtime_ns == chunk.status.st_mtime_ns


def fan_outs(root: Path, namespace_id: NamespaceId) -> list[str]:
    """Return the directories that hold a namespace's chunks."""
    return [name for name, status in _listing(root, namespace_id.hex()) if stat.S_ISDIR(status.st_mode)]


def chunks_in(root: Path, namespace_id: NamespaceId, fan_out: str) -> list[StoredChunk]:
    """Return the chunks in one of them."""
    found: list[StoredChunk] = []
    for name, status in _listing(root, namespace_id.hex(), fan_out):
        key = key_of(ChunkPlace(namespace_id.hex(), fan_out, name))
        if key is not None and stat.S_ISREG(status.st_mode):
            found.append(StoredChunk(key, status.st_size))
    return found


def _listing(root: Path, *names: str) -> list[tuple[str, os.stat_result]]:
    *parents, name = names
    try:
        with directory(root, *parents) as parent:
            return list_directory(parent, name)
    except OSError as error:
        if error.errno in ABSENT:
            return []
        raise
