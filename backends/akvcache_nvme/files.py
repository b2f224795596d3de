"""Blocking primitives that follow no link below the root.

Every directory below the root is opened relative to its parent with O_NOFOLLOW, and files relative to their
directory, so a planted symbolic link leads nowhere. The root itself may be a link that the operator made.
"""

from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
import stat
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from akvcache.layout import PAGE_BYTES

__all__ = (
    "ABSENT",
    "FULL",
    "allocated",
    "directory",
    "first_file",
    "leave_direct",
    "list_directory",
    "open_file",
    "probe_direct",
    "regular_stat",
    "resize",
    "stat_or_none",
)

ABSENT: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO)
"""What opening or examining a chunk's path gives when no regular file is there."""

FULL: Final = (errno.ENOSPC, errno.EDQUOT)

_STEP: Final = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOCK: Final = 512
_PROBE: Final = "probe"


@contextmanager
def directory(root: Path, *names: str) -> Generator[int, None, None]:
    """Open ``root/names[0]/names[1]/...`` as a handle for calls with ``dir_fd``."""
    handle = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names:
            inner = os.open(name, os.O_PATH | _STEP, dir_fd=handle)
            os.close(handle)
            handle = inner
        yield handle
    finally:
        os.close(handle)


def list_directory(parent: int, name: str) -> list[tuple[str, os.stat_result]]:
    """Return name and status of everything in a directory, links not followed."""
    handle = os.open(name, os.O_RDONLY | _STEP, dir_fd=parent)
    found: list[tuple[str, os.stat_result]] = []
    try:
        with os.scandir(handle) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    found.append((entry.name, entry.stat(follow_symlinks=False)))
    finally:
        os.close(handle)
    return found


def first_file(parent: int, name: str) -> str | None:
    """Return the name of some regular file in a directory."""
    handle = os.open(name, os.O_RDONLY | _STEP, dir_fd=parent)
    try:
        with os.scandir(handle) as entries:
            return next((entry.name for entry in entries if entry.is_file(follow_symlinks=False)), None)
    finally:
        os.close(handle)


def allocated(status: os.stat_result) -> int:
    """Return the bytes a file occupies on the device."""
    return status.st_blocks * _BLOCK


def regular_stat(name: str, parent: int) -> os.stat_result:
    """Return the status of a regular file.

    Raises:
        OSError: With an errno of `ABSENT` if there is no regular file.
    """
    status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.ELOOP, "not a regular file", name)
    return status


def stat_or_none(name: str, parent: int) -> os.stat_result | None:
    """Return the status of a regular file, or None if there is none."""
    try:
        return regular_stat(name, parent)
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise


def resize(name: str, parent: int, size: int, *, create: int = 0) -> None:
    """Give a file exactly `size` bytes, all of them allocated.

    Args:
        name: The file.
        parent: Handle of its directory.
        size: Wanted bytes.
        create: ``os.O_CREAT | os.O_EXCL`` for a new file.
    """
    handle = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | create, 0o600, dir_fd=parent)
    try:
        status = os.fstat(handle)
        if status.st_size > size:
            os.ftruncate(handle, size)
        if status.st_size < size or allocated(status) < size:
            os.posix_fallocate(handle, 0, size)
    finally:
        os.close(handle)


def probe_direct(parent: int) -> OSError | None:
    """Write and read a page with O_DIRECT; return the error if the file system cannot do that."""
    page = mmap.mmap(-1, PAGE_BYTES)
    try:
        handle = os.open(_PROBE, os.O_RDWR | os.O_DIRECT | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=parent)
        try:
            os.pwrite(handle, page, 0)
            os.preadv(handle, [page], 0)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return error
        if error.errno not in FULL:  # a full device still reads
            raise
    finally:
        page.close()
        with suppress(FileNotFoundError):
            os.unlink(_PROBE, dir_fd=parent)
    return None


def open_file(root: Path, names: Sequence[str], flags: int) -> io.FileIO:
    """Open the regular file ``root/names...``, unbuffered.

    Args:
        root: The root.
        names: Directories below it, then the file.
        flags: ``os.O_RDONLY`` or ``os.O_WRONLY``, perhaps with ``os.O_DIRECT``.

    Raises:
        OSError: With an errno of `ABSENT` if there is no regular file.
    """
    *parents, name = names
    with directory(root, *parents) as parent:
        regular_stat(name, parent)  # a pipe or a directory would fail in ways that look like a failing disk
        handle = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    return io.FileIO(handle, "wb" if flags & os.O_WRONLY else "rb")


def leave_direct(file: io.FileIO) -> None:
    """Let an open file go through the page cache from here on."""
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)
