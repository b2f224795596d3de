"""Equal keys mean equal bytes: scopes, chunkers, hashes and layouts end to end."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from akvcache import CacheEngine, EngineConfig, RequestScope, StopReason, TensorConnector, UsageError
from akvcache.testing import MemoryBackend, MemoryStore
from tests.support import CHUNK, MODEL, PagedKV, depths, head_mask, open_engine

T = CHUNK

SCOPES = {
    "none": RequestScope(),
    "adapter": RequestScope(adapter="x"),
    "adapter version": RequestScope(adapter="x", adapter_version="2"),
    "version only": RequestScope(adapter_version="x"),
    "salt": RequestScope(salt="x"),
    "salt of bytes": RequestScope(salt=b"x"),
    "long salt": RequestScope(salt="tenant-" + "y" * 200 + "1"),
    "long salt, other end": RequestScope(salt="tenant-" + "y" * 200 + "2"),
    "both": RequestScope(adapter="x", salt="x"),
    "separator in a field": RequestScope(adapter="x\x00salt\x00x"),
    "empty adapter": RequestScope(adapter=""),
    "empty salt": RequestScope(salt=""),
    "picture": RequestScope(media=[(0, b"p" * 16)]),
    "other picture": RequestScope(media=[(0, b"q" * 16)]),
    "moved picture": RequestScope(media=[(1, b"p" * 16)]),
}


class TestScopes:
    @pytest.mark.asyncio
    @pytest.mark.parametrize("num_slots", [80, 4])
    async def test_no_scope_ever_sees_the_bytes_of_another(self, num_slots: int) -> None:
        """KC-01, KC-02, SE-04: same tokens, one difference, every tier."""
        kv = PagedKV(3 * T)
        planes = [plane for pair in kv.layers for plane in pair]
        async with open_engine(kv, num_slots, [MemoryBackend(MemoryStore())]) as engine:
            for index, scope in enumerate(SCOPES.values()):
                assert (await engine.lookup(kv.tokens, scope=scope)).hit_tokens == 0
                for plane in planes:
                    plane.fill_(index)
                kept = await engine.store(kv.tokens, kv.slots, scope=scope)
                assert (await kept.durable()).durable_tokens == 3 * T
            for index, (name, scope) in enumerate(SCOPES.items()):
                kv.wipe()
                assert (await engine.prefetch(kv.tokens, scope=scope)).hit_tokens == 3 * T
                assert (await engine.retrieve(kv.tokens, kv.slots, scope=scope)).loaded_tokens == 3 * T
                loaded = kv.rows()
                for plane in planes:
                    plane.fill_(index)
                assert torch.equal(loaded, kv.rows()), name

    @pytest.mark.asyncio
    async def test_a_picture_counts_from_the_chunk_that_holds_it(self) -> None:
        """KC-03."""
        kv = PagedKV(5 * T)
        with_picture = RequestScope(media=[(3 * T + 2, b"p" * 32)])
        async with open_engine(kv, 16) as engine:
            await engine.store(kv.tokens, kv.slots, scope=with_picture)
            assert (await engine.lookup(kv.tokens, scope=with_picture)).hit_tokens == 5 * T
            assert (await engine.lookup(kv.tokens)).hit_tokens == 3 * T
            other = RequestScope(media=[(3 * T + 2, b"q" * 32)])
            assert (await engine.lookup(kv.tokens, scope=other)).hit_tokens == 3 * T

    @pytest.mark.asyncio
    async def test_no_salt_in_what_a_tier_sees(self) -> None:
        kv = PagedKV(2 * T)
        store = MemoryStore()
        async with open_engine(kv, 16, [MemoryBackend(store)]) as engine:
            await engine.store(kv.tokens, kv.slots, scope=RequestScope(salt="very-secret", adapter="my-adapter"))
        seen = repr(store.manifests).encode() + b"".join(store.frames) + b"".join(store.frames.values())
        assert b"very-secret" not in seen
        assert b"my-adapter" not in seen


class TestSegments:
    SEP = (7, 7)

    def prompt(self, *documents: int) -> list[int]:
        """Return documents of the given lengths, each closed by the separator."""
        tokens: list[int] = []
        for number, length in enumerate(documents):
            tokens += [1000 * (number + 1) + i for i in range(length)] + list(self.SEP)
        return tokens

    @pytest.mark.asyncio
    async def test_documents_are_shared_up_to_their_end(self) -> None:
        kv = PagedKV(200)
        tokens = self.prompt(20, 3, 40, 10)
        shared = self.prompt(20, 3, 40)
        other = [*shared, *range(9000, 9030), *self.SEP]
        store = MemoryStore()
        options: dict[str, Any] = {"chunker": "segments", "separator": self.SEP}
        before = kv.rows(0, len(tokens))
        async with open_engine(kv, 32, [MemoryBackend(store)], **options) as engine:
            kept = await engine.store(tokens, kv.slots)
            assert (kept.stored_tokens, kept.stopped) == (len(tokens), None)
            found = await engine.lookup(other)
            assert (found.hit_tokens, found.stopped) == (len(shared), StopReason.MISSING)
        kv.wipe()
        wiped = kv.rows()
        async with open_engine(kv, 32, [MemoryBackend(store)], **options) as engine:
            loaded = await engine.retrieve(other, kv.slots)
            assert loaded.loaded_tokens == int(loaded.mask.sum()) == len(shared)
            assert loaded.by_tier == {"memory": len(shared)}
            assert torch.equal(kv.rows(0, len(shared)), before[:, : len(shared)])
            assert torch.equal(kv.rows(len(shared)), wiped[:, len(shared) :])

    @pytest.mark.asyncio
    async def test_a_mask_ends_at_a_documents_end(self) -> None:
        kv = PagedKV(60)
        tokens = self.prompt(8, 8)
        async with open_engine(kv, 16, chunker="segments", separator=self.SEP) as engine:
            await engine.store(tokens, kv.slots)
            mask = head_mask(10, len(tokens))
            assert (await engine.retrieve(tokens, kv.slots, mask=mask)).loaded_tokens == 10
            with pytest.raises(UsageError, match="the nearest below is 10"):
                await engine.retrieve(tokens, kv.slots, mask=head_mask(11, len(tokens)))

    @pytest.mark.asyncio
    async def test_random_documents_come_back_bit_for_bit(self) -> None:
        kv = PagedKV(400)
        rng = random.Random(5)
        async with open_engine(kv, 8, [MemoryBackend()], chunker="segments", separator=self.SEP) as engine:
            for _ in range(10):
                tokens = self.prompt(*(rng.randint(0, 50) for _ in range(rng.randint(1, 6))))[:400]
                before = kv.rows(0, len(tokens))
                scope = RequestScope(salt=str(rng.random()))
                kept = await engine.store(tokens, kv.slots, scope=scope)
                loaded = await engine.retrieve(tokens, kv.slots, scope=scope)
                assert loaded.loaded_tokens == kept.stored_tokens
                assert torch.equal(kv.rows(0, len(tokens)), before)


class TestChoices:
    @pytest.mark.asyncio
    async def test_xxh3_works_and_does_not_share_with_sha256(self) -> None:
        kv = PagedKV(4 * T)
        before = kv.rows()
        store = MemoryStore()
        async with open_engine(kv, 16, [MemoryBackend(store)], key_hash="xxh3_128") as engine:
            await engine.store(kv.tokens, kv.slots)
        assert {len(key) for key in store.frames} == {36}
        kv.wipe()
        async with open_engine(kv, 16, [MemoryBackend(store)]) as engine:
            assert (await engine.lookup(kv.tokens)).hit_tokens == 0
        async with open_engine(kv, 16, [MemoryBackend(store)], key_hash="xxh3_128") as engine:
            assert (await engine.retrieve(kv.tokens, kv.slots)).loaded_tokens == 4 * T
        assert torch.equal(kv.rows(), before)

    @pytest.mark.asyncio
    async def test_another_chunk_size_does_not_share(self) -> None:
        """KD-03."""
        kv = PagedKV(4 * T)
        store = MemoryStore()
        for size, count in ((16, 4), (32, 2), (64, 1)):
            async with open_engine(kv, 16, [MemoryBackend(store)], chunk_tokens=size) as engine:
                assert (await engine.lookup(kv.tokens)).hit_tokens == 0
                kept = await engine.store(kv.tokens, kv.slots)
                assert (await kept.durable()).durable_tokens == 4 * T
            assert len(store.frames) == {16: 4, 32: 6, 64: 7}[size], count
        assert {manifest["chunker"] for manifest in store.manifests.values()} == {"fixed:16", "fixed:32", "fixed:64"}

    @pytest.mark.asyncio
    async def test_another_dtype_of_the_same_size_does_not_share(self) -> None:
        """KC-04."""
        store = MemoryStore()
        for dtype in (torch.bfloat16, torch.float16):
            kv = PagedKV(4 * T, dtype=dtype)
            async with open_engine(kv, 16, [MemoryBackend(store)]) as engine:
                assert (await engine.lookup(kv.tokens)).hit_tokens == 0
                await engine.store(kv.tokens, kv.slots)
        assert len(store.frames) == 8

    @pytest.mark.asyncio
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    async def test_contiguous_tensors_as_transformers_keeps_them(self, dtype: torch.dtype) -> None:
        connector = TensorConnector(num_layers=3, num_kv_heads=2, head_dim=8, dtype=dtype)
        tokens = list(range(5 * T + 3))
        store = MemoryStore()
        config = EngineConfig(chunk_tokens=T, host_bytes="1MiB", strict=True, prefault=False)

        def filled() -> list[tuple[torch.Tensor, torch.Tensor]]:
            shape = (1, 2, len(tokens), 8)
            return [(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(3)]

        source = filled()
        async with CacheEngine.open(
            config, connector=connector, namespace=MODEL, tiers=[MemoryBackend(store)]
        ) as engine:
            kept = await engine.store(tokens, source)
            assert (kept.stored_tokens, kept.stopped) == (5 * T, None)
            with pytest.raises(UsageError, match="2 layers, the layout has 3"):
                await engine.store(tokens, source[:2])
            with pytest.raises(UsageError):
                await engine.retrieve(tokens, 5)  # type: ignore[arg-type]
        assert depths(store) == list(range(5))
        target = connector.empty(len(tokens))
        for pair in target:
            for plane in pair:
                plane.zero_()
        async with CacheEngine.open(
            config, connector=connector, namespace=MODEL, tiers=[MemoryBackend(store)]
        ) as engine:
            loaded = await engine.retrieve(tokens, target)
            assert loaded.loaded_tokens == 5 * T
        for got, want in zip(target, source, strict=True):
            for g, w in zip(got, want, strict=True):
                assert torch.equal(g[:, :, : 5 * T], w[:, :, : 5 * T])
                assert not g[:, :, 5 * T :].any()
