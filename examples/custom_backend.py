"""A complete third-party backend: frames in one SQLite file, one call at a time, copied once."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from akvcache import CacheEngine, CacheNamespace, EngineConfig, TensorConnector
from akvcache.backend import BackendContext, Capabilities, StoredChunk, map_errors
from akvcache.config import TierUrl, parse_bytes
from akvcache.errors import BackendUnavailable, CapacityExhausted
from akvcache.keys import ChunkKey, NamespaceId, namespace_of
from akvcache.supervision import run_blocking

T = TypeVar("T")


class SqliteBackend:
    """Frames in a table, each visible whole or not at all. Full is full: it does not evict."""

    name = "sqlite"
    capabilities = Capabilities(persistent=True, max_reads=1, max_writes=1)

    def __init__(self, path: Path, *, capacity_bytes: int) -> None:
        self._path, self._capacity_bytes = path, capacity_bytes
        self._database: sqlite3.Connection | None = None  # lives on the one thread below
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="akv-sqlite")

    @classmethod
    def from_url(cls, url: str) -> SqliteBackend:
        parts = TierUrl.parse(url, known=("capacity",))  # sqlite:///path/to/file.db?capacity=1GiB
        return cls(Path(parts.path), capacity_bytes=parse_bytes(parts.options.get("capacity", "1GiB")))

    async def open(self, _context: BackendContext) -> None:
        await self._run("open", None, self._connect)

    async def attach(self, _namespace_id: NamespaceId, _manifest: Mapping[str, object]) -> None:
        """A manifest for operators would be kept here."""

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        sql = "SELECT 1 FROM chunks WHERE key = ?"
        return [bool(await self._run("contains", key, self._execute, sql, key)) for key in keys]

    async def read(self, key: ChunkKey, into: memoryview) -> int | None:
        if not (rows := await self._run("read", key, self._execute, "SELECT frame FROM chunks WHERE key = ?", key)):
            return None
        frame = rows[0][0]
        into[: len(frame)] = frame[: len(into)]
        return len(frame)  # the true size, even where it is not the expected one

    async def write(self, key: ChunkKey, frame: memoryview) -> None:
        await self._run("write", key, self._insert, key, frame)

    async def delete(self, key: ChunkKey) -> bool:
        return bool(await self._run("delete", key, self._execute, "DELETE FROM chunks WHERE key = ? RETURNING 1", key))

    async def scan(self, namespace_id: NamespaceId) -> AsyncIterator[StoredChunk]:
        sql = "SELECT key, length(frame) FROM chunks WHERE namespace = ?"
        for key, size in await self._run("scan", None, self._execute, sql, namespace_id):
            yield StoredChunk(ChunkKey(key), size)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Nothing is evicted, so nothing is ranked."""

    async def aclose(self) -> None:
        if self._database is not None:
            database, self._database = self._database, None
            await run_blocking(self._thread, database.close)
            self._thread.shutdown(wait=False)

    async def _run(self, op: str, key: ChunkKey | None, function: Callable[..., T], *args: object) -> T:
        """Run a call on the thread. What SQLite raises leaves as `BackendError`: the plug-in edge."""
        with map_errors(self.name, op, key):
            try:
                return await run_blocking(self._thread, function, *args)
            except sqlite3.Error as error:
                raise BackendUnavailable(str(error), backend=self.name, op=op, key=key) from error

    def _connect(self) -> None:
        self._database = sqlite3.connect(self._path, isolation_level=None)
        self._execute("PRAGMA synchronous = OFF")  # the engine's checksum decides what survived a power cut
        self._execute("CREATE TABLE IF NOT EXISTS chunks (key BLOB PRIMARY KEY, namespace BLOB, frame BLOB)")

    def _execute(self, sql: str, *values: object) -> list[tuple[bytes, int]]:
        if self._database is None:
            raise BackendUnavailable("the database is not open", backend=self.name)
        return self._database.execute(sql, values).fetchall()

    def _insert(self, key: ChunkKey, frame: memoryview) -> None:
        sizes = dict(self._execute("SELECT key, length(frame) FROM chunks"))
        if key not in sizes and sum(sizes.values()) + len(frame) > self._capacity_bytes:
            raise CapacityExhausted(backend=self.name, op="write", key=key)
        self._execute("INSERT OR IGNORE INTO chunks VALUES (?, ?, ?)", key, namespace_of(key), frame)


async def main() -> None:
    connector = TensorConnector(num_layers=2, num_kv_heads=2, head_dim=64, dtype=torch.float32)
    kv = [(torch.randn(1, 2, 512, 64), torch.randn(1, 2, 512, 64)) for _ in range(2)]
    tokens, room = list(range(512)), connector.empty(512)
    config, namespace = EngineConfig(chunk_tokens=64, host_bytes="300KiB"), CacheNamespace(model="toy")
    with tempfile.TemporaryDirectory() as folder:
        tier = SqliteBackend.from_url(f"sqlite://{folder}/akv.db?capacity=64MiB")
        async with CacheEngine.open(config, connector=connector, namespace=namespace, tiers=[tier]) as engine:
            await engine.store(tokens, kv)
            loaded = await engine.retrieve(tokens, room)
    print("loaded", loaded.loaded_tokens, dict(loaded.by_tier), torch.equal(room[1][0], kv[1][0]))


if __name__ == "__main__":
    asyncio.run(main())
