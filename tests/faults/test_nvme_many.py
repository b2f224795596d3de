"""Three hundred thousand chunks: what open, lookup and scan cost, and that the loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from akvcache.keys import ChunkKey
from akvcache.testing import make_namespace_id
from tests.nvme_kit import opened, path_of, prompt

COUNT = 300_000


def _fill(root: Path, keys: list[ChunkKey]) -> None:
    made: set[str] = set()
    for key in keys:
        path = os.fspath(path_of(root, key))
        folder = os.path.dirname(path)
        if folder not in made:
            os.makedirs(folder)
            made.add(folder)
        handle = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        os.write(handle, b"x")
        os.close(handle)


def _largest(root: Path) -> int:
    return max(len(os.listdir(folder)) for folder in root.glob("*/*"))


async def _tick(lags: list[float]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        before = loop.time()
        await asyncio.sleep(0.001)
        lags.append(loop.time() - before - 0.001)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.asyncio
async def test_a_large_directory_opens_without_holding_the_loop(tmp_path: Path) -> None:
    keys = prompt("many", COUNT)
    await asyncio.to_thread(_fill, tmp_path, keys)
    assert await asyncio.to_thread(_largest, tmp_path) < 1500
    lags: list[float] = []
    ticker = asyncio.create_task(_tick(lags))
    async with opened(tmp_path, capacity_bytes=1 << 40) as backend:
        assert backend.statistics().entries == COUNT
        assert all(await backend.contains(keys[:4096]))
        assert len({chunk.key async for chunk in backend.scan(make_namespace_id())}) == COUNT
        ticker.cancel()
    lags.sort()
    print(f"loop lag p99 {lags[int(len(lags) * 0.99)] * 1e3:.1f} ms, max {lags[-1] * 1e3:.1f} ms")
    assert lags[int(len(lags) * 0.99)] < 0.02
