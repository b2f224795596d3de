"""Two engines on one cache directory: neither promises what the other took away."""

from __future__ import annotations

from pathlib import Path

import pytest
from akvcache_nvme import NvmeBackend

from tests.support import CHUNK, PagedKV, open_engine


@pytest.mark.asyncio
async def test_what_another_engine_took_away_is_not_promised(tmp_path: Path) -> None:
    """`contains` answers from the disk, so a lookup, the next store and `durable()` see what is really there."""
    kv = PagedKV(4 * CHUNK)
    tiers = [NvmeBackend(tmp_path, capacity_bytes=4 << 20) for _ in range(2)]
    async with open_engine(kv, 8, tiers[:1]) as one, open_engine(kv, 8, tiers[1:]) as two:
        await (await one.store(kv.tokens, kv.slots)).durable()
        assert (await two.lookup(kv.tokens)).by_tier == {"nvme": 4 * CHUNK}
        await one.clear()
        assert (await two.lookup(kv.tokens)).hit_tokens == 0
        kept = await two.store(kv.tokens, kv.slots)
        assert kept.new_tokens == 4 * CHUNK
        assert (await kept.durable()).durable_tokens == 4 * CHUNK
    assert len(list(tmp_path.rglob("*.akv"))) == 4  # noqa: ASYNC240


@pytest.mark.asyncio
async def test_files_removed_by_an_operator_are_written_again(tmp_path: Path) -> None:
    kv = PagedKV(4 * CHUNK)
    async with open_engine(kv, 4, [NvmeBackend(tmp_path, capacity_bytes=4 << 20)]) as engine:
        await (await engine.store(kv.tokens, kv.slots)).durable()
        for path in list(tmp_path.rglob("*.akv")):  # noqa: ASYNC240
            path.unlink()
        assert (await (await engine.store(kv.tokens, kv.slots)).durable()).durable_tokens == 4 * CHUNK
    assert len(list(tmp_path.rglob("*.akv"))) == 4  # noqa: ASYNC240
