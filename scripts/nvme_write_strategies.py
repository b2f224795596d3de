"""How fast chunks reach the disk: new files, recycled files, preallocated slab, and the NVMe backend itself.

Usage: python scripts/nvme_write_strategies.py DIRECTORY [ROUNDS]

All strategies take turns within each round, in rotated order, with the same buffers on 2 MiB pages, O_DIRECT, 16 MiB
frames, 4 threads moving bytes. Prints the median over the rounds, the range, and the median ratio to the bare system
calls (slab write, file read) of the same round. docs/adr/0005-recycle-chunk-files.md cites a run.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from akvcache_nvme import NvmeBackend

from akvcache.backend import BackendContext
from akvcache.keys import ChunkKey
from akvcache.testing import make_keys, make_namespace_id

FRAME = 16 << 20
COUNT = 24
DEPTH = 4
MIB = 1 << 20
SLAB = "slab, pwrite"
READ = "file, read with preadv"


def huge_buffer() -> memoryview:
    """Return a frame of random bytes on 2 MiB pages."""
    memory = mmap.mmap(-1, FRAME, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory.write(os.urandom(FRAME))
    return memoryview(memory)


class Strategies:
    """The ways to write `COUNT` frames with plain system calls."""

    def __init__(self, directory: Path, buffers: Sequence[memoryview]) -> None:
        self._directory = directory
        self._buffers = buffers
        self._pool = ThreadPoolExecutor(DEPTH)
        self._slab = os.open(directory / "slab", os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._slab, 0, FRAME * COUNT)
        self._all(self._write_slab)
        self._all(lambda index: self._write_file("old", index, os.O_CREAT, allocate=False))

    def slab(self) -> float:
        """Overwrite places in one preallocated file."""
        return self._all(self._write_slab)

    def recycled(self) -> float:
        """Rename an old chunk file, overwrite it, rename it to its new name."""

        def one(index: int) -> None:
            path = self._directory / f"old{index}"
            path.rename(path.with_suffix(".tmp"))
            self._write_file("old", index, 0, allocate=False, suffix=".tmp")
            path.with_suffix(".tmp").rename(path)

        return self._all(one)

    def new(self) -> float:
        """Write a file that did not exist."""
        return self._new(allocate=False)

    def new_allocated(self) -> float:
        """The same, its blocks allocated first."""
        return self._new(allocate=True)

    def read(self) -> float:
        """Read the old chunk files."""

        def one(index: int) -> None:
            handle = os.open(self._directory / f"old{index}", os.O_RDONLY | os.O_DIRECT)
            assert os.preadv(handle, [self._buffers[index % len(self._buffers)]], 0) == FRAME
            os.close(handle)

        return self._all(one)

    def close(self) -> None:
        """Let go of the descriptor and the threads."""
        os.close(self._slab)
        self._pool.shutdown()

    def _new(self, *, allocate: bool) -> float:
        seconds = self._all(lambda index: self._write_file("new", index, os.O_CREAT | os.O_EXCL, allocate=allocate))
        for index in range(COUNT):
            (self._directory / f"new{index}").unlink()
        return seconds

    def _all(self, one: Callable[[int], None]) -> float:
        start = time.perf_counter()
        list(self._pool.map(one, range(COUNT)))
        return time.perf_counter() - start

    def _write_slab(self, index: int) -> None:
        assert os.pwrite(self._slab, self._buffers[index % len(self._buffers)], index * FRAME) == FRAME

    def _write_file(self, kind: str, index: int, flags: int, *, allocate: bool, suffix: str = "") -> None:
        handle = os.open(self._directory / f"{kind}{index}{suffix}", os.O_WRONLY | os.O_DIRECT | flags, 0o600)
        if allocate:
            os.posix_fallocate(handle, 0, FRAME)
        assert os.pwrite(handle, self._buffers[index % len(self._buffers)], 0) == FRAME
        os.close(handle)


async def through_backend(backend: NvmeBackend, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> float:
    """Write one prompt through the backend, as many chunks in flight as it asks for."""
    queue = list(enumerate(keys))

    async def worker() -> None:
        while queue:
            index, key = queue.pop(0)
            await backend.write(key, buffers[index % len(buffers)])

    backend.touch(keys)
    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(backend.capabilities.max_writes):
            group.create_task(worker())
    return time.perf_counter() - start


async def read_back(backend: NvmeBackend, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> float:
    """Read one prompt through the backend, as many chunks in flight as it asks for."""
    queue = list(keys)

    async def worker(into: memoryview) -> None:
        while queue:
            assert await backend.read(queue.pop(0), into) == FRAME

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for into in buffers[: backend.capabilities.max_reads]:
            group.create_task(worker(into))
    return time.perf_counter() - start


async def measure(directory: Path, rounds: int) -> dict[str, list[float]]:
    """Return seconds by strategy, one value a round."""
    buffers = [huge_buffer() for _ in range(2 * DEPTH)]
    plain = Strategies(directory, buffers)
    seconds: dict[str, list[float]] = {}
    full = NvmeBackend(directory / "full", capacity_bytes=(COUNT + DEPTH) * FRAME, threads=DEPTH)
    await full.open(BackendContext(frame_bytes=FRAME))
    await full.attach(make_namespace_id(), {})
    await through_backend(full, make_keys(COUNT, label="first"), buffers)

    async def backend_recycled(turn: int) -> float:
        return await through_backend(full, make_keys(COUNT, label=f"turn {turn}"), buffers)

    async def backend_read(turn: int) -> float:
        return await read_back(full, make_keys(COUNT, label=f"turn {turn}"), buffers)

    async def backend_new(_turn: int) -> float:
        empty = NvmeBackend(directory / "empty", capacity_bytes=2 * COUNT * FRAME, threads=DEPTH)
        await empty.open(BackendContext(frame_bytes=FRAME))
        await empty.attach(make_namespace_id(), {})
        took = await through_backend(empty, make_keys(COUNT), buffers)
        await empty.aclose()
        shutil.rmtree(directory / "empty")
        return took

    async def of(step: Callable[[], float]) -> float:
        return await asyncio.to_thread(step)

    steps = {
        SLAB: lambda _turn: of(plain.slab),
        READ: lambda _turn: of(plain.read),
        "recycled file": lambda _turn: of(plain.recycled),
        "new file": lambda _turn: of(plain.new),
        "new file, allocated first": lambda _turn: of(plain.new_allocated),
        "backend, recycling": backend_recycled,
        "backend, new files": backend_new,
    }
    for turn in range(rounds):
        names = list(steps)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            seconds.setdefault(name, []).append(await steps[name](turn))
        seconds.setdefault("backend, read", []).append(await backend_read(turn))
    await full.aclose()
    plain.close()
    return seconds


def main() -> None:
    directory = Path(sys.argv[1]) / "nvme_write_strategies"
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 7
    directory.mkdir(parents=True)
    try:
        seconds = asyncio.run(measure(directory, rounds))
    finally:
        shutil.rmtree(directory)
    for name, values in seconds.items():
        rates = sorted(COUNT * FRAME / MIB / value for value in values)
        bare = seconds[READ if "read" in name else SLAB]
        ratio = statistics.median(base / value for base, value in zip(bare, values, strict=True))
        print(f"{name:26s} {statistics.median(rates):6.0f} MiB/s ({rates[0]:.0f}..{rates[-1]:.0f}), {ratio:.2f} x bare")


if __name__ == "__main__":
    main()
