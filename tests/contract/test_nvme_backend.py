"""The NVMe backend keeps the contract; files are read and damaged here past the backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from akvcache.backend import Backend, BackendContext
from akvcache.keys import ChunkKey, depth_of, digest_of, namespace_of
from akvcache.testing import CapacityContract

akvcache_nvme = pytest.importorskip("akvcache_nvme")


class TestNvmeBackend(CapacityContract):
    @pytest.fixture(autouse=True)
    def storage(self, tmp_path: Path) -> None:
        self.root = tmp_path / "cache"

    async def open_backend(self, context: BackendContext) -> Backend:
        backend: Backend = akvcache_nvme.NvmeBackend(self.root, capacity_bytes=1 << 30)
        await backend.open(context)
        return backend

    async def open_bounded_backend(self, context: BackendContext, capacity_bytes: int) -> Backend:
        backend: Backend = akvcache_nvme.NvmeBackend(self.root, capacity_bytes=capacity_bytes)
        await backend.open(context)
        return backend

    def path(self, key: ChunkKey) -> Path:
        digest = digest_of(key).hex()
        return self.root / namespace_of(key).hex() / digest[:2] / f"{digest}-{depth_of(key):x}.akv"

    def raw_get(self, key: ChunkKey) -> bytes | None:
        try:
            return self.path(key).read_bytes()
        except FileNotFoundError:
            return None

    def raw_set(self, key: ChunkKey, data: bytes) -> None:
        assert self.path(key).exists()
        self.path(key).write_bytes(data)
