"""The main promise: what was stored comes back bit for bit, through pools far smaller than the prompt."""

from __future__ import annotations

import pytest
import torch

from akvcache import StopReason
from akvcache.testing import MemoryBackend
from tests.support import CHUNK, PagedKV, open_engine


@pytest.mark.asyncio
@pytest.mark.parametrize("num_slots", [2, 3, 8, 200])
async def test_a_prompt_of_100_chunks_comes_back_through_a_small_pool(num_slots: int) -> None:
    kv = PagedKV(100 * CHUNK + 5)
    before = kv.rows(0, 100 * CHUNK)
    async with open_engine(kv, num_slots, [MemoryBackend()]) as engine:
        kept = await engine.store(kv.tokens, kv.slots)
        assert (kept.stored_tokens, kept.new_tokens, kept.stopped) == (100 * CHUNK, 100 * CHUNK, None)
        kv.wipe()
        loaded = await engine.retrieve(kv.tokens, kv.slots)
    assert loaded.loaded_tokens == loaded.hit_tokens == sum(loaded.by_tier.values()) == 100 * CHUNK
    assert loaded.mask.tolist() == [True] * (100 * CHUNK) + [False] * 5
    assert loaded.stopped is None
    assert torch.equal(kv.rows(0, 100 * CHUNK), before)
    assert torch.equal(kv.rows(100 * CHUNK), torch.full_like(kv.rows(100 * CHUNK), 0).copy_(_wiped(kv)))


def _wiped(kv: PagedKV) -> torch.Tensor:
    blank = PagedKV(len(kv.tokens))
    blank.wipe()
    return blank.rows(100 * CHUNK)


@pytest.mark.asyncio
async def test_without_a_lower_tier_a_full_pool_keeps_an_honest_prefix() -> None:
    kv = PagedKV(12 * CHUNK)
    before = kv.rows()
    async with open_engine(kv, 8) as engine:
        kept = await engine.store(kv.tokens, kv.slots)
        assert (kept.stored_tokens, kept.stopped) == (8 * CHUNK, StopReason.MEMORY_PRESSURE)
        kv.wipe()
        loaded = await engine.retrieve(kv.tokens, kv.slots)
    assert loaded.loaded_tokens == 8 * CHUNK
    assert loaded.stopped is StopReason.MISSING
    assert torch.equal(kv.rows(0, 8 * CHUNK), before[:, : 8 * CHUNK])
