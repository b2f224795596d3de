"""The example backend keeps the whole contract, says when it is full, and is found by its URL."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from akvcache.backend import Backend, BackendContext
from akvcache.errors import CapacityExhausted, ConfigurationError
from akvcache.keys import ChunkKey, namespace_of
from akvcache.testing import BackendContract, make_frame, make_keys, make_payload
from examples.custom_backend import SqliteBackend


class TestSqliteBackend(BackendContract):
    @pytest.fixture(autouse=True)
    def storage(self, tmp_path: Path) -> None:
        self.path = tmp_path / "akv.db"

    async def open_backend(self, context: BackendContext) -> Backend:
        backend = SqliteBackend(self.path, capacity_bytes=1 << 30)
        await backend.open(context)
        return backend

    def raw_get(self, key: ChunkKey) -> bytes | None:
        rows = self._execute("SELECT frame FROM chunks WHERE key = ?", key)
        return rows[0][0] if rows else None

    def raw_set(self, key: ChunkKey, data: bytes) -> None:
        self._execute("UPDATE chunks SET frame = ? WHERE key = ?", data, key)

    def _execute(self, sql: str, *values: object) -> list[tuple[bytes]]:
        database = sqlite3.connect(self.path, isolation_level=None)
        try:
            return database.execute(sql, values).fetchall()
        finally:
            database.close()

    @pytest.mark.asyncio
    async def test_a_full_database_says_so_and_keeps_what_it_has(self) -> None:
        first, second = make_keys(2)
        frame = make_frame(first, make_payload(100))
        backend = SqliteBackend.from_url(f"sqlite://{self.path}?capacity={len(frame)}")
        await backend.open(BackendContext(frame_bytes=len(frame)))
        await backend.write(first, frame)
        await backend.write(first, frame)  # already stored: needs no room
        with pytest.raises(CapacityExhausted):
            await backend.write(second, make_frame(second, make_payload(100)))
        assert [chunk.key async for chunk in backend.scan(namespace_of(first))] == [first]
        await backend.aclose()


def test_an_unknown_option_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'capacity'"):
        SqliteBackend.from_url("sqlite:///akv.db?capacty=1GiB")
