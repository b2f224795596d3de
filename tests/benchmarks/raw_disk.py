"""The disk without a cache around it: O_DIRECT pwrite and preadv of whole chunks from 2 MiB pages, on threads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from .measure import Sample, Stopwatch


def filesystem_of(path: Path) -> str:
    """Return the type of the file system that holds `path`."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ", 1)
        if left.split()[2] == wanted:
            return right.split()[0]
    return "unknown"


class RawDisk:
    """One file per chunk; each chunk is one open, one pwrite or preadv of all its bytes, one close."""

    def __init__(self, directory: Path, buffers: Sequence[np.ndarray], *, depth: int) -> None:
        self._directory = directory
        self._buffers = buffers
        self._threads = ThreadPoolExecutor(depth)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self._all(lambda index: self._write(index, "recycled"))

    async def write_new(self) -> Sample:
        """Write into files that did not exist."""
        sample = self._all(lambda index: self._write(index, "new"))
        for index in range(len(self._buffers)):
            self._path(index, "new").unlink()
        return sample

    async def write_recycled(self) -> Sample:
        """Write into files that hold a chunk of this size already."""
        return self._all(lambda index: self._write(index, "recycled"))

    async def read(self) -> Sample:
        """Read what `write_recycled` wrote."""
        return self._all(self._read)

    def close(self) -> None:
        """Remove everything."""
        self._threads.shutdown()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _all(self, move: Callable[[int], None]) -> Sample:
        with Stopwatch() as watch:
            list(self._threads.map(move, range(len(self._buffers))))
        return watch.sample

    def _path(self, index: int, kind: str) -> Path:
        return self._directory / f"{kind}-{index}"

    def _write(self, index: int, kind: str) -> None:
        descriptor = os.open(self._path(index, kind), os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o644)
        assert os.pwrite(descriptor, self._buffers[index].data, 0) == self._buffers[index].size
        os.close(descriptor)

    def _read(self, index: int) -> None:
        descriptor = os.open(self._path(index, "recycled"), os.O_RDONLY | os.O_DIRECT)
        assert os.preadv(descriptor, [self._buffers[index].data], 0) == self._buffers[index].size
        os.close(descriptor)
