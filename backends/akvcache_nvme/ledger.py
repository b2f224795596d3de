"""How many bytes all processes together have allocated below one root.

The file ``usage`` holds two counters: allocated bytes, and the part of them that lies in spare files. Whoever makes
bytes appear or disappear below the root does it while holding a lock on that file and keeps the counters in step:
`UsageLedger.grow` before bytes can appear, `UsageLedger.shrink` after they have gone. A process killed at any
instant thus leaves the counter too high, never too low, and the cap holds. A census (`recovery.py`), taken under the
same lock, makes the counters exact again.

The lock is `flock`, which the kernel drops when its holder dies; waiting for it is bounded, because a holder may be
stopped. Blocking; touched from executor threads only, except that the counters may be read anywhere.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from .names import USAGE

__all__ = ("LOCK_TIMEOUT_S", "UsageLedger")

LOCK_TIMEOUT_S: Final = 30.0
"""Longest wait for the lock: a census of some hundred thousand files holds it for seconds."""

_POLL_S: Final = 0.0005
_RECORD: Final = struct.Struct("<8sQQ")
_MAGIC: Final = b"AKVUSAGE"


class UsageLedger:
    """The counters of one root.

    Invariant: while the lock is free, `used_bytes` is at least what is allocated below the root.

    Attributes:
        used_bytes: Allocated bytes below the root, as last seen under the lock.
        spare_bytes: The part of them in spare files.
    """

    def __init__(self, root: Path, rebuild: Callable[[], object]) -> None:
        """Describe a ledger.

        Args:
            root: The directory; made when missing.
            rebuild: Called under the lock when there are no counters yet; calls `reset`.
        """
        self.used_bytes = 0
        self.spare_bytes = 0
        self._root = root
        self._rebuild = rebuild
        self._threads = threading.Lock()
        self._fd = -1
        self._valid = False

    @contextmanager
    def locked(self) -> Generator[None, None, None]:
        """Hold the lock; the counters are current inside.

        Raises:
            TimeoutError: Another process or thread held it for `LOCK_TIMEOUT_S`.
        """
        end = time.monotonic() + LOCK_TIMEOUT_S
        if not self._threads.acquire(timeout=LOCK_TIMEOUT_S):
            raise TimeoutError(f"usage of {self._root} is locked by another thread")
        try:
            self._lock_current_file(end)
            try:
                self._valid = self._load()
                if not self._valid:
                    os.pwrite(self._fd, bytes(_RECORD.size), 0)  # its block is there when the census counts
                    self._rebuild()
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def grow(self, nbytes: int) -> None:
        """Count bytes that are about to appear. Needs the lock."""
        self._save(self.used_bytes + nbytes, self.spare_bytes)

    def shrink(self, nbytes: int) -> None:
        """Uncount bytes that have gone. Needs the lock."""
        self._save(max(0, self.used_bytes - nbytes), self.spare_bytes)

    def move_spare(self, nbytes: int) -> None:
        """Note that so many bytes became spare, or stopped being so if negative. Needs the lock."""
        self._save(self.used_bytes, max(0, self.spare_bytes + nbytes))

    def reset(self, *, used_bytes: int, spare_bytes: int) -> None:
        """Set both counters to what a census found. Needs the lock."""
        self._valid = True
        self._save(used_bytes, spare_bytes)

    def close(self) -> None:
        """Release the descriptor. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _lock_current_file(self, end: float) -> None:
        """Lock the file that the path names now: an operator may have removed it, or the whole root."""
        path = self._root / USAGE
        while True:
            if self._fd < 0:
                self._fd = self._open(path)
            _flock(self._fd, end, path)
            mine = os.fstat(self._fd)
            try:
                named = path.lstat()
            except FileNotFoundError:
                named = None
            if named is not None and os.path.samestat(mine, named):
                return
            self.close()

    def _open(self, path: Path) -> int:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def _load(self) -> bool:
        record = os.pread(self._fd, _RECORD.size, 0)
        if len(record) < _RECORD.size:
            return False
        magic, used, spare = _RECORD.unpack(record)
        if magic != _MAGIC:
            return False
        self.used_bytes, self.spare_bytes = used, spare
        return True

    def _save(self, used_bytes: int, spare_bytes: int) -> None:
        if self._valid:  # a rebuild that dies half-way must leave no counters that look right
            os.pwrite(self._fd, _RECORD.pack(_MAGIC, used_bytes, spare_bytes), 0)
        self.used_bytes, self.spare_bytes = used_bytes, spare_bytes


def _flock(fd: int, end: float, path: Path) -> None:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise TimeoutError(f"{path} is locked by another process") from None
            time.sleep(_POLL_S)
        else:
            return
