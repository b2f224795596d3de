"""The census: what lies below a root, from names and sizes alone.

No payload is read: the frame header inside a file is checked when the file is. A restart therefore costs one
directory walk, and every committed chunk hits again.

Blocking; runs on an executor thread under the ledger's lock. Keys and sizes are kept in plain dicts of bytes and
ints, which the garbage collector does not walk.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from akvcache.keys import ChunkKey, NamespaceId

from .files import allocated, directory
from .names import LOCK, MANIFEST, SPARE, TMP, USAGE, ChunkPlace, key_of, namespace_in, place_of
from .queries import chunks_in, fan_outs

__all__ = ("DIRECTORY_BYTES", "SLACK_BYTES", "Census", "sacrifice", "take_census", "temp_charge")

DIRECTORY_BYTES: Final = 4096
"""What a directory counts: one block. One that holds many names takes more, about 100 bytes a name."""

SLACK_BYTES: Final = 16384
"""What a file being written counts beyond its size: a block of extents and the directories its commit may make."""


def temp_charge(size: int) -> int:
    """Return what a file of `size` bytes counts while it is being written."""
    return size + SLACK_BYTES


@dataclass(slots=True)
class Census:
    """What was found.

    Attributes:
        chunks: Allocated bytes by key, by namespace.
        used_bytes: Everything below the root; files that live writers are writing count `temp_charge`.
        spare_bytes: The part of it in spare files.
        empty: Chunk directories without a chunk, as (namespace, fan-out).
        num_ignored: Things that are not ours: other names, links, pipes. They count, and are left alone.
        num_unreadable: Directories that could not be read.
    """

    chunks: dict[NamespaceId, dict[ChunkKey, int]] = field(default_factory=dict[NamespaceId, dict[ChunkKey, int]])
    used_bytes: int = 0
    spare_bytes: int = 0
    empty: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    num_ignored: int = 0
    num_unreadable: int = 0


def take_census(root: Path, *, live: Collection[str], keep: Collection[str], sole: bool) -> Census:
    """Count everything below `root` and remove namespaces without chunks.

    Args:
        root: The root.
        live: Owner directories whose process is alive.
        keep: Namespace directories that stay even if empty.
        sole: No other process uses the root, so that an empty namespace may go.
    """
    census = Census()
    for entry in _entries(census, root):
        namespace_id = namespace_in(entry.name)
        if not entry.is_dir(follow_symlinks=False):
            _count_file(census, entry)
            census.num_ignored += entry.name != USAGE
        elif entry.name == TMP:
            _count_temps(census, entry.path, live)
        elif entry.name == SPARE:
            before = census.used_bytes
            _count_tree(census, entry.path)
            census.spare_bytes = census.used_bytes - before - DIRECTORY_BYTES
        elif namespace_id is None:
            census.num_ignored += 1
            _count_tree(census, entry.path)
        else:
            chunks = _count_namespace(census, entry)
            if chunks:
                census.chunks[namespace_id] = chunks
            elif sole and entry.name not in keep:
                _remove_namespace(census, entry)
    return census


def sacrifice(root: Path) -> bool:
    """Remove some chunk from a device too full to make a directory on; return whether there was one."""
    for namespace_id in filter(None, (namespace_in(path.name) for path in root.iterdir())):
        for fan_out in fan_outs(root, namespace_id):
            for chunk in chunks_in(root, namespace_id, fan_out):
                place = place_of(chunk.key)
                with directory(root, place.namespace, place.fan_out) as parent:
                    os.unlink(place.name, dir_fd=parent)
                return True
    return False


def _count_namespace(census: Census, namespace: os.DirEntry[str]) -> dict[ChunkKey, int]:
    census.used_bytes += DIRECTORY_BYTES
    chunks: dict[ChunkKey, int] = {}
    for entry in _entries(census, namespace.path):
        if entry.is_dir(follow_symlinks=False):
            _count_fan_out(census, ChunkPlace(namespace.name, entry.name, ""), entry.path, chunks)
        else:
            _count_file(census, entry)
            census.num_ignored += entry.name != MANIFEST
    return chunks


def _count_fan_out(census: Census, place: ChunkPlace, path: str, chunks: dict[ChunkKey, int]) -> None:
    census.used_bytes += DIRECTORY_BYTES
    empty = True
    for entry in _entries(census, path):
        empty = False
        if entry.is_dir(follow_symlinks=False):
            census.num_ignored += 1
            _count_tree(census, entry.path)
            continue
        status = _count_file(census, entry)
        key = key_of(place._replace(name=entry.name)) if status and stat.S_ISREG(status.st_mode) else None
        if key is None:
            census.num_ignored += 1
        elif status is not None:
            chunks[key] = allocated(status)
    if empty:
        census.empty.add((place.namespace, place.fan_out))


def _count_temps(census: Census, path: str, live: Collection[str]) -> None:
    census.used_bytes += DIRECTORY_BYTES
    for owner in _entries(census, path):
        if not owner.is_dir(follow_symlinks=False):
            _count_file(census, owner)
            census.num_ignored += 1
        elif owner.name not in live:
            _count_tree(census, owner.path)
        else:
            census.used_bytes += DIRECTORY_BYTES
            for entry in _entries(census, owner.path):
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    census.used_bytes += allocated(status) if entry.name == LOCK else temp_charge(status.st_size)


def _count_tree(census: Census, path: str) -> None:
    census.used_bytes += DIRECTORY_BYTES
    for entry in _entries(census, path):
        if entry.is_dir(follow_symlinks=False):
            _count_tree(census, entry.path)
        else:
            _count_file(census, entry)


def _count_file(census: Census, entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    census.used_bytes += allocated(status)
    return status


def _entries(census: Census, path: str | Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            yield from entries
    except FileNotFoundError:
        return
    except PermissionError:
        census.num_unreadable += 1


def _remove_namespace(census: Census, namespace: os.DirEntry[str]) -> None:
    """Remove a namespace that holds nothing but its manifest and empty directories."""
    for name, fan_out in [place for place in census.empty if place[0] == namespace.name]:
        with suppress(OSError):
            os.rmdir(os.path.join(namespace.path, fan_out))  # noqa: PTH106, PTH118
            census.used_bytes -= DIRECTORY_BYTES
            census.empty.discard((name, fan_out))
    manifest = os.path.join(namespace.path, MANIFEST)  # noqa: PTH118
    with suppress(OSError):
        status = os.stat(manifest, follow_symlinks=False)  # noqa: PTH116
        os.unlink(manifest)  # noqa: PTH108
        census.used_bytes -= allocated(status)
    with suppress(OSError):
        os.rmdir(namespace.path)  # noqa: PTH106
        census.used_bytes -= DIRECTORY_BYTES
