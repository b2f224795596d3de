"""Who is writing: one directory under ``tmp`` per open backend, held with `flock` by its live process.

The kernel drops the lock when the process dies, however it dies. A file under ``tmp`` therefore belongs to a live
owner or to nobody, and its age means nothing: what a dead owner left becomes spare, what a live one has is its own.

Blocking; called under the ledger's lock, so that nobody sees an owner's directory before it is locked.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from .files import ABSENT, directory, list_directory
from .names import LOCK, SPARE, TMP

__all__ = ("Owner",)


class Owner:
    """This process's mark on a root.

    Attributes:
        name: Its directory under ``tmp``.
        num_reclaimed: Files taken over from dead owners.
    """

    def __init__(self, root: Path) -> None:
        self.name = f"{os.getpid()}-{secrets.token_hex(8)}"
        self.num_reclaimed = 0
        self._root = root
        self._lock_fd = -1

    @property
    def is_held(self) -> bool:
        """Whether `hold` was called and `let_go` was not."""
        return self._lock_fd >= 0

    def hold(self, own: int) -> None:
        """Hold the lock file in the owner's directory, making it again if someone removed it."""
        handle = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=own)
        if self.is_held and os.path.sameopenfile(handle, self._lock_fd):
            os.close(handle)
            return
        self.let_go()
        self._lock_fd = handle
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def let_go(self) -> None:
        """Drop the lock. Idempotent."""
        if self.is_held:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def reclaim(self) -> set[str]:
        """Turn what dead owners left into spare files; return the other owners that live."""
        live: set[str] = set()
        with directory(self._root) as parent:
            found = list_directory(parent, TMP)
        for name, status in found:
            if name == self.name or not stat.S_ISDIR(status.st_mode):
                continue
            with directory(self._root, TMP, name) as handle, _lock_of_dead(handle) as is_dead:
                if is_dead:
                    self._reclaim_from(name, handle)
                else:
                    live.add(name)
        return live

    def _reclaim_from(self, name: str, handle: int) -> None:
        with directory(self._root, SPARE) as spare, directory(self._root, TMP) as parent:
            for file, status in list_directory(parent, name):
                if file == LOCK:
                    os.unlink(file, dir_fd=handle)
                elif stat.S_ISREG(status.st_mode):
                    os.rename(file, secrets.token_hex(8), src_dir_fd=handle, dst_dir_fd=spare)
                    self.num_reclaimed += 1
            with suppress(OSError):  # something in it is not ours; the census counts it
                os.rmdir(name, dir_fd=parent)


@contextmanager
def _lock_of_dead(own: int) -> Generator[bool, None, None]:
    """Take the lock in an owner's directory; yield whether that was possible, so the owner is dead."""
    try:
        handle = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=own)
    except FileNotFoundError:
        yield True  # killed before it had one
        return
    except OSError as error:
        if error.errno not in ABSENT:
            raise
        yield False  # not a lock file: nothing we may decide about
        return
    try:
        yield _try_lock(handle)
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
