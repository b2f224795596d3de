"""What the tests of the NVMe backend need: opened backends, prompts of small chunks, and the truth about the disk."""

from __future__ import annotations

import fcntl
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from akvcache_nvme import DirectMode, NvmeBackend

from akvcache.backend import BackendContext
from akvcache.frame import frame_bytes, verify
from akvcache.keys import ChunkKey
from akvcache.testing import aligned_buffer, make_frame, make_keys, make_namespace_id, make_payload

__all__ = (
    "FRAME",
    "PAYLOAD",
    "allocated_below",
    "chunk_files",
    "get",
    "holds",
    "opened",
    "path_of",
    "prompt",
    "put",
    "sample_under_lock",
    "temp_files",
)

PAYLOAD = 60_000
FRAME = frame_bytes(PAYLOAD)
CAPACITY = 64 << 20


@asynccontextmanager
async def opened(
    root: Path,
    *,
    capacity_bytes: int = CAPACITY,
    namespaces: Iterable[str] = ("test",),
    direct: DirectMode = DirectMode.AUTO,
    recycle_share: float = 0.25,
    is_protected: Callable[[ChunkKey], bool] = lambda _key: False,
) -> AsyncGenerator[NvmeBackend, None]:
    """Open a backend, attach namespaces, close it."""
    backend = NvmeBackend(root, capacity_bytes=capacity_bytes, direct=direct, recycle_share=recycle_share)
    await backend.open(BackendContext(frame_bytes=FRAME, is_protected=is_protected))
    try:
        for namespace in namespaces:
            await backend.attach(make_namespace_id(namespace), {"model": "m", "chunker": "fixed:16"})
        yield backend
    finally:
        await backend.aclose()


def prompt(label: object, count: int = 1, *, namespace: str = "test") -> list[ChunkKey]:
    """Return the keys of one prompt."""
    return make_keys(count, label=str(label), namespace=namespace)


def seed_of(key: ChunkKey) -> int:
    """Return what makes the payload of a key differ from all others."""
    return int.from_bytes(key[-4:], "big")


async def put(backend: NvmeBackend, keys: Sequence[ChunkKey], *, payload_bytes: int = PAYLOAD) -> None:
    """Store the chunks of one prompt as the engine does: touch the path, then write in order."""
    backend.touch(keys)
    for key in keys:
        await backend.write(key, make_frame(key, make_payload(payload_bytes, seed_of(key))))


async def get(backend: NvmeBackend, key: ChunkKey, *, payload_bytes: int = PAYLOAD) -> bool:
    """Read a chunk as the engine does; return whether it is there, and fail unless its bytes are right."""
    into = aligned_buffer(frame_bytes(payload_bytes))
    size = await backend.read(key, into)
    if size is None:
        return False
    assert size == len(into)
    verify(into, key=key, num_tokens=1, part_bytes=(payload_bytes,))
    assert bytes(into) == bytes(make_frame(key, make_payload(payload_bytes, seed_of(key))))
    return True


async def holds(backend: NvmeBackend, keys: Sequence[ChunkKey]) -> list[bool]:
    """Return for each key whether it can be read."""
    return [await get(backend, key) for key in keys]


def path_of(root: Path, key: ChunkKey) -> Path:
    """Return the file of a chunk, spelled out here once more on purpose: docs/reference/on-disk-format.md."""
    digest = key[20:].hex()
    return root / key[:16].hex() / digest[:2] / f"{digest}-{int.from_bytes(key[16:20], 'big'):x}.akv"


def allocated_below(root: Path) -> int:
    """Return the allocated bytes of everything below `root`; a directory counts 4,096 on any file system."""
    total = 0
    for directory, folders, files in os.walk(root):
        total += 4096 * len(folders)
        total += sum(os.lstat(os.path.join(directory, name)).st_blocks * 512 for name in files)
    return total


def sample_under_lock(root: Path) -> int:
    """Return the same while no process may change it, except by writing into files it has reserved."""
    with open(root / "usage", "rb") as usage:
        fcntl.flock(usage, fcntl.LOCK_EX)
        return allocated_below(root)


def chunk_files(root: Path) -> list[Path]:
    """Return every committed chunk file."""
    return sorted(root.glob("*/??/*.akv"))


def temp_files(root: Path) -> list[Path]:
    """Return every file that is being written or was left unfinished."""
    return [path for path in root.glob("tmp/*/*") if path.name != "lock"]
