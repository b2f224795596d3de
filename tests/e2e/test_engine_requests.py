"""What a call accepts and answers: masks, tails, gates, wrong arguments."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from akvcache import CacheEngine, RequestScope, StopReason, UsageError
from akvcache.errors import InvariantError
from akvcache.keys import ChunkKey, depth_of
from akvcache.testing import FaultyBackend, MemoryBackend, MemoryStore
from tests.doubles import WatchedConnector
from tests.support import CHUNK, PagedKV, depths, head_mask, open_engine

T = CHUNK


async def fill(kv: PagedKV, keep: Sequence[int]) -> MemoryStore:
    """Return a store that holds these chunks of the prompt, and no others."""
    store = MemoryStore()
    async with open_engine(kv, 32, [MemoryBackend(store)]) as engine:
        await engine.store(kv.tokens, kv.slots)
        await engine.flush()
    store.frames = {key: frame for key, frame in store.frames.items() if depth_of(key) in keep}
    assert depths(store) == list(keep)
    return store


class TestMasks:
    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        ("cached", "found", "behind_head"),
        [([], 0, 0), ([0, 1], 2, 0), ([0, 1, 2, 3], 4, 0), ([0, 1, 2, 3, 4, 5], 6, 2), ([4, 5], 0, 2)],
    )
    async def test_lookup_and_retrieve_of_a_caller_that_holds_four_chunks(
        self, cached: list[int], found: int, behind_head: int
    ) -> None:
        """LR-09: lookup always counts from token 0; a suffix counts only for a caller that supplies its head."""
        kv = PagedKV(8 * T)
        before = kv.rows()
        store = await fill(kv, cached)
        kv.wipe()
        wiped = kv.rows()
        async with open_engine(kv, 32, [MemoryBackend(store)]) as engine:
            assert (await engine.lookup(kv.tokens)).hit_tokens == found * T
            loaded = await engine.retrieve(kv.tokens, kv.slots, mask=head_mask(4 * T, 8 * T))
        assert loaded.hit_tokens == loaded.loaded_tokens == behind_head * T
        expected = [4 * T <= i < (4 + behind_head) * T for i in range(8 * T)]
        assert loaded.mask.dtype is torch.bool
        assert loaded.mask.tolist() == expected
        assert loaded.stopped is StopReason.MISSING
        where = torch.tensor(expected)
        assert torch.equal(kv.rows()[:, where], before[:, where])
        assert torch.equal(kv.rows()[:, ~where], wiped[:, ~where])

    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        ("mask", "says"),
        [
            (head_mask(T // 2, 4 * T), rf"begins with {T // 2} False, .* the nearest below is 0"),
            (head_mask(T + 1, 4 * T), rf"begins with {T + 1} False, .* the nearest below is {T}"),
            ([True] * T + [False] + [True] * (3 * T - 1), "must read F"),
            ([True] * T + [False] * 3 * T, "must read F"),
            ([True] * (4 * T - 1), rf"mask has length {4 * T - 1}, tokens have length {4 * T}"),
            ([True] * (4 * T + 1), "mask has length"),
            ([1] * (4 * T), "booleans"),
        ],
    )
    @pytest.mark.parametrize("op", ["retrieve", "store"])
    async def test_a_malformed_mask_is_refused_before_any_io(self, op: str, mask: list[bool], says: str) -> None:
        """AL-01."""
        kv = PagedKV(4 * T)
        kv.connector = watched = WatchedConnector(kv.connector)  # type: ignore[assignment]
        backend = FaultyBackend(MemoryBackend())
        async with open_engine(kv, 8, [backend]) as engine:
            await engine.store(kv.tokens, kv.slots)
            await engine.flush()
            before, calls = kv.rows(), dict(backend.calls)
            with pytest.raises(UsageError, match=says):
                await getattr(engine, op)(kv.tokens, kv.slots, mask=mask)
            assert dict(backend.calls) == calls
        assert torch.equal(kv.rows(), before)
        assert watched.scattered == []

    @pytest.mark.asyncio
    @pytest.mark.parametrize("num_tokens", [4 * T, 4 * T + 5])
    async def test_a_mask_that_excludes_everything_is_a_no_op(self, num_tokens: int) -> None:
        kv = PagedKV(num_tokens)
        async with open_engine(kv, 8) as engine:
            await engine.store(kv.tokens, kv.slots)
            kv.wipe()
            wiped = kv.rows()
            mask = [False] * num_tokens
            loaded = await engine.retrieve(kv.tokens, kv.slots, mask=mask)
            assert (loaded.hit_tokens, loaded.loaded_tokens, loaded.stopped) == (0, 0, None)
            kept = await engine.store(kv.tokens, kv.slots, mask=mask)
            assert (kept.stored_tokens, kept.new_tokens, kept.existing_tokens, kept.stopped) == (4 * T, 0, 0, None)
        assert torch.equal(kv.rows(), wiped)

    @pytest.mark.asyncio
    async def test_tokens_before_the_masks_end_are_never_written(self) -> None:
        """AL-02: the engine shares those blocks with other requests."""
        kv = PagedKV(6 * T)
        async with open_engine(kv, 8) as engine:
            await engine.store(kv.tokens, kv.slots)
            before = kv.rows()
            kv.wipe()
            wiped = kv.rows()
            with pytest.raises(UsageError):
                await engine.retrieve(kv.tokens, kv.slots, mask=head_mask(T + 4, 6 * T))
            assert torch.equal(kv.rows(), wiped)
            for form in (np.array, torch.tensor, tuple):
                kv.wipe()
                loaded = await engine.retrieve(kv.tokens, kv.slots, mask=form(head_mask(2 * T, 6 * T)))
                assert (loaded.loaded_tokens, loaded.stopped) == (4 * T, None)
                assert torch.equal(kv.rows(0, 2 * T), wiped[:, : 2 * T])
                assert torch.equal(kv.rows(2 * T), before[:, 2 * T :])

    @pytest.mark.asyncio
    async def test_a_store_behind_a_mask_keeps_only_what_follows(self) -> None:
        """AL-06: 3 of 8 chunks were loaded, the rest is stored in two steps."""
        kv = PagedKV(8 * T)
        kv.connector = watched = WatchedConnector(kv.connector)  # type: ignore[assignment]
        async with open_engine(kv, 16) as engine:
            await engine.store(*kv.part(0, 3))
            loaded = await engine.retrieve(kv.tokens, kv.slots)
            assert loaded.loaded_tokens == 3 * T
            watched.gathered.clear()
            first = await engine.store(*kv.part(0, 5), mask=head_mask(3 * T, 5 * T))
            assert (first.stored_tokens, first.new_tokens, first.existing_tokens) == (5 * T, 2 * T, 0)
            second = await engine.store(kv.tokens, kv.slots, mask=head_mask(5 * T, 8 * T))
            assert (second.stored_tokens, second.new_tokens, second.stopped) == (8 * T, 3 * T, None)
            assert watched.gathered == [(i * T, (i + 1) * T) for i in range(3, 8)]
            assert (await engine.lookup(kv.tokens)).hit_tokens == 8 * T

    @pytest.mark.asyncio
    async def test_a_store_behind_a_head_that_is_not_cached_says_so(self) -> None:
        """What lies behind a gap cannot be hit from token 0."""
        kv = PagedKV(6 * T)
        async with open_engine(kv, 16) as engine:
            await engine.store(*kv.part(0, 1))
            kept = await engine.store(kv.tokens, kv.slots, mask=head_mask(3 * T, 6 * T))
            assert (kept.stored_tokens, kept.new_tokens, kept.total_tokens) == (T, 3 * T, 6 * T)
            assert (await engine.lookup(kv.tokens)).hit_tokens == T


class TestTails:
    @pytest.mark.asyncio
    @pytest.mark.parametrize(("num_tokens", "whole"), [(8 * T + 8, 8), (T, 1), (T + 1, 1), (2 * T - 1, 1)])
    async def test_the_unfinished_chunk_is_left_out(self, num_tokens: int, whole: int) -> None:
        """AL-03."""
        kv = PagedKV(num_tokens)
        async with open_engine(kv, 16) as engine:
            kept = await engine.store(kv.tokens, kv.slots)
            assert (kept.total_tokens, kept.stored_tokens, kept.stopped) == (num_tokens, whole * T, None)
            kv.wipe()
            loaded = await engine.retrieve(kv.tokens, kv.slots)
            assert loaded.mask.tolist() == [True] * (whole * T) + [False] * (num_tokens - whole * T)
            assert loaded.stopped is None

    @pytest.mark.asyncio
    async def test_a_prompt_of_whole_chunks_is_hit_whole(self) -> None:
        """AL-04: the last token to compute is the connector's business."""
        kv = PagedKV(4 * T)
        async with open_engine(kv, 16) as engine:
            await engine.store(kv.tokens, kv.slots)
            found = await engine.lookup(kv.tokens)
        assert (found.hit_tokens, found.stopped) == (4 * T, None)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("missing", [[1], [0, 2], [0], [2], [0, 1, 2]])
    async def test_a_chunk_that_is_there_already_does_not_shift_the_others(self, missing: list[int]) -> None:
        """AL-05."""
        kv = PagedKV(3 * T)
        before = kv.rows()
        store = await fill(kv, [i for i in range(3) if i not in missing])
        async with open_engine(kv, 16, [MemoryBackend(store)]) as engine:
            kept = await engine.store(kv.tokens, kv.slots)
            assert (kept.stored_tokens, kept.new_tokens) == (3 * T, len(missing) * T)
            await engine.flush()
        kv.wipe()
        async with open_engine(kv, 16, [MemoryBackend(store)]) as engine:
            assert (await engine.retrieve(kv.tokens, kv.slots)).loaded_tokens == 3 * T
        assert torch.equal(kv.rows(), before)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("shared", [0, 1, T - 1, T, T + 7, 2 * T])
    async def test_never_more_is_valid_than_the_key_covers(self, shared: int) -> None:
        """AL-08: a prompt that shares some tokens gets the whole chunks among them, and nothing else is written."""
        kv = PagedKV(3 * T)
        async with open_engine(kv, 16) as engine:
            await engine.store(kv.tokens, kv.slots)
            before = kv.rows()
            other = kv.tokens[:shared] + [token + 1 for token in kv.tokens[shared:]]
            kv.wipe()
            wiped = kv.rows()
            loaded = await engine.retrieve(other, kv.slots)
        covered = shared // T * T
        assert loaded.loaded_tokens == covered == int(loaded.mask.sum())
        assert torch.equal(kv.rows(0, covered), before[:, :covered])
        assert torch.equal(kv.rows(covered), wiped[:, covered:])

    @pytest.mark.asyncio
    async def test_only_what_was_stored_is_hit(self) -> None:
        """LR-06."""
        kv = PagedKV(6 * T + 3)
        async with open_engine(kv, 16) as engine:
            kept = await engine.store(kv.tokens[: 2 * T + 5], kv.slots[: 2 * T + 5])
            assert kept.stored_tokens == 2 * T
            found = await engine.lookup(kv.tokens)
            assert (found.hit_tokens, found.stopped) == (2 * T, StopReason.MISSING)

    @pytest.mark.asyncio
    async def test_lookups_change_nothing_that_a_store_will_write(self) -> None:
        """LR-05."""
        kv = PagedKV(5 * T)
        async with open_engine(kv, 16) as engine:
            for _ in range(3):
                assert (await engine.lookup(kv.tokens)).hit_tokens == 0
            assert (await engine.store(kv.tokens, kv.slots)).new_tokens == 5 * T
            assert (await engine.lookup(kv.tokens)).hit_tokens == 5 * T

    @pytest.mark.asyncio
    async def test_a_long_prompt_is_keyed_in_a_thread_to_the_same_keys(self) -> None:
        kv = PagedKV(4 * T)
        long = kv.tokens + list(range(20_000))
        async with open_engine(kv, 8) as engine:
            await engine.store(kv.tokens, kv.slots)
            for form in (list, np.array, torch.tensor):
                assert (await engine.lookup(form(long))).hit_tokens == 4 * T
            with pytest.raises(UsageError, match="token -1"):
                await engine.lookup([*long, -1])

    @pytest.mark.asyncio
    async def test_the_stored_bytes_do_not_alias_the_callers(self) -> None:
        """CB-09, CB-10: overwritten after the hand-over, and reused five times."""
        kv = PagedKV(4 * T)
        async with open_engine(kv, 8) as engine:
            before = kv.rows()
            await engine.store(kv.tokens, kv.slots)
            for _ in range(5):
                kv.wipe()
                await engine.retrieve(kv.tokens, kv.slots)
                assert torch.equal(kv.rows(), before)


async def answers(engine: CacheEngine[Any], kv: PagedKV) -> dict[str, Any]:
    """Return what each call answers."""
    return {
        "lookup": await engine.lookup(kv.tokens, lease_s=5),
        "retrieve": await engine.retrieve(kv.tokens, kv.slots),
        "store": await engine.store(kv.tokens, kv.slots),
        "prefetch": await engine.prefetch(kv.tokens),
    }


def assert_empty(found: dict[str, Any], kv: PagedKV, reason: StopReason) -> None:
    """Assert that every call answered as an empty cache, and why."""
    assert {name: answer.stopped for name, answer in found.items()} == dict.fromkeys(found, reason)
    assert found["lookup"].hit_tokens == 0
    assert (found["retrieve"].hit_tokens, found["retrieve"].loaded_tokens) == (0, 0)
    assert found["retrieve"].mask.tolist() == [False] * len(kv.tokens)
    assert (found["store"].stored_tokens, found["store"].new_tokens) == (0, 0)
    assert found["store"].total_tokens == len(kv.tokens)
    assert (found["prefetch"].hit_tokens, found["prefetch"].ready_tokens) == (0, 0)


class TestGates:
    @pytest.mark.asyncio
    async def test_a_passive_rank_answers_empty_and_touches_nothing(self) -> None:
        kv = PagedKV(4 * T)
        backend = FaultyBackend(MemoryBackend())
        async with open_engine(kv, 8, [backend], passive=True) as engine:
            assert_empty(await answers(engine, kv), kv, StopReason.PASSIVE)
        assert not {"contains", "read", "write"} & set(backend.calls)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("num_tokens", [0, 1, T - 1])
    async def test_less_than_a_chunk_is_too_short(self, num_tokens: int) -> None:
        kv = PagedKV(num_tokens)
        async with open_engine(kv, 8) as engine:
            assert_empty(await answers(engine, kv), kv, StopReason.TOO_SHORT)

    @pytest.mark.asyncio
    async def test_an_empty_prompt_with_an_empty_mask_is_a_no_op(self) -> None:
        kv = PagedKV(0)
        async with open_engine(kv, 8) as engine:
            assert (await engine.retrieve([], kv.slots, mask=[])).mask.tolist() == []
            assert (await engine.store([], kv.slots, mask=[])).total_tokens == 0

    @pytest.mark.asyncio
    async def test_min_tokens(self) -> None:
        kv = PagedKV(4 * T)
        async with open_engine(kv, 8, min_tokens=4 * T + 1) as engine:
            assert_empty(await answers(engine, kv), kv, StopReason.TOO_SHORT)
        async with open_engine(kv, 8, min_tokens=4 * T) as engine:
            assert (await engine.store(kv.tokens, kv.slots)).stored_tokens == 4 * T

    @pytest.mark.asyncio
    async def test_a_frozen_engine_reads_and_does_not_store(self) -> None:
        kv = PagedKV(4 * T)
        async with open_engine(kv, 8, [MemoryBackend()]) as engine:
            await engine.store(*kv.part(0, 2))
            engine.freeze(True)
            kept = await engine.store(kv.tokens, kv.slots)
            assert (kept.stored_tokens, kept.new_tokens, kept.stopped) == (0, 0, StopReason.FROZEN)
            assert (await kept.durable()).stopped is StopReason.FROZEN
            assert (await engine.lookup(kv.tokens)).hit_tokens == 2 * T
            assert (await engine.retrieve(kv.tokens, kv.slots)).loaded_tokens == 2 * T
            engine.freeze(False)
            assert (await engine.store(kv.tokens, kv.slots)).new_tokens == 2 * T

    @pytest.mark.asyncio
    async def test_a_degraded_engine_answers_empty_for_good(self) -> None:
        kv = PagedKV(4 * T)
        async with open_engine(kv, 8) as engine:
            await engine.store(kv.tokens, kv.slots)
            engine.degrade("the device is gone")
            engine.degrade("and something else")
            assert engine.health().degraded == "the device is gone"
            assert_empty(await answers(engine, kv), kv, StopReason.UNHEALTHY)

    @pytest.mark.asyncio
    async def test_the_gates_are_asked_in_order(self) -> None:
        """Healthy, passive, frozen, too short: the first closed one is the reason."""
        kv, short = PagedKV(4 * T), PagedKV(4 * T).tokens[:5]
        async with open_engine(kv, 8, passive=True) as engine:
            engine.freeze(True)
            assert (await engine.store(short, kv.slots)).stopped is StopReason.PASSIVE
            engine.degrade("broken")
            assert (await engine.store(short, kv.slots)).stopped is StopReason.UNHEALTHY
        async with open_engine(kv, 8) as engine:
            assert (await engine.store(short, kv.slots)).stopped is StopReason.TOO_SHORT
            engine.freeze(True)
            assert (await engine.store(short, kv.slots)).stopped is StopReason.FROZEN

    @pytest.mark.asyncio
    @pytest.mark.parametrize("option", [{}, {"passive": True}, {"min_tokens": 1000}])
    async def test_a_closed_gate_does_not_hide_a_wrong_call(self, option: dict[str, Any]) -> None:
        kv = PagedKV(4 * T)
        async with open_engine(kv, 8, **option) as engine:
            engine.degrade("broken")
            with pytest.raises(UsageError):
                await engine.lookup([-1])
            with pytest.raises(UsageError):
                await engine.retrieve(kv.tokens, kv.slots, mask=head_mask(3, 4 * T))
            with pytest.raises(UsageError):
                await engine.store(kv.tokens, kv.slots[:5])
            with pytest.raises(UsageError):
                await engine.prefetch(kv.tokens, deadline_s=-1)


@pytest.mark.asyncio
async def test_strict_raises_our_own_bugs_and_otherwise_they_make_an_empty_cache() -> None:
    class Lying(MemoryBackend):
        async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
            return 5  # type: ignore[return-value]

    kv = PagedKV(4 * T)
    async with open_engine(kv, 8, [Lying()], strict=True) as engine:
        with pytest.raises(InvariantError, match="unexpected TypeError"):
            await engine.lookup(kv.tokens)
    async with open_engine(kv, 8, [Lying()], strict=False) as engine:
        assert (await engine.lookup(kv.tokens)).stopped is StopReason.UNHEALTHY
        assert_empty(await answers(engine, kv), kv, StopReason.UNHEALTHY)


Call = Callable[[CacheEngine[Any], PagedKV], Awaitable[object]]

WRONG: dict[str, Call] = {
    "tokens are text": lambda e, kv: e.lookup("hello"),  # type: ignore[arg-type]
    "tokens are None": lambda e, kv: e.lookup(None),  # type: ignore[arg-type]
    "a token is negative": lambda e, kv: e.store([-1] * 64, kv.slots),
    "a token is too large": lambda e, kv: e.retrieve([2**32] * 64, kv.slots),
    "tokens are floats": lambda e, kv: e.prefetch([0.5] * 64),  # type: ignore[list-item]
    "scope is None": lambda e, kv: e.lookup(kv.tokens, scope=None),  # type: ignore[arg-type]
    "scope is a string": lambda e, kv: e.store(kv.tokens, kv.slots, scope="adapter"),  # type: ignore[arg-type]
    "media outside": lambda e, kv: e.lookup(kv.tokens, scope=RequestScope(media=[(64, bytes(16))])),
    "media digest too short": lambda e, kv: e.lookup(kv.tokens, scope=RequestScope(media=[(0, b"short")])),
    "no kv": lambda e, kv: e.retrieve(kv.tokens, None),
    "kv of another type": lambda e, kv: e.store(kv.tokens, [1, 2, 3]),
    "kv too short": lambda e, kv: e.retrieve(kv.tokens, kv.slots[:-1]),
    "slots outside": lambda e, kv: e.store(kv.tokens, kv.slots + 10_000),
    "lease_s is 0": lambda e, kv: e.lookup(kv.tokens, lease_s=0),
    "lease_s is infinite": lambda e, kv: e.lookup(kv.tokens, lease_s=math.inf),
    "lease_s is not a number": lambda e, kv: e.lookup(kv.tokens, lease_s=math.nan),
    "lease_s is text": lambda e, kv: e.lookup(kv.tokens, lease_s="5"),  # type: ignore[arg-type]
    "lease is something else": lambda e, kv: e.retrieve(kv.tokens, kv.slots, lease="lease-1"),  # type: ignore[arg-type]
    "deadline is negative": lambda e, kv: e.retrieve(kv.tokens, kv.slots, deadline_s=-0.1),
    "deadline is not a number": lambda e, kv: e.store(kv.tokens, kv.slots, deadline_s=math.nan),
    "deadline is text": lambda e, kv: e.prefetch(kv.tokens, deadline_s="1"),  # type: ignore[arg-type]
    "mask of numbers": lambda e, kv: e.store(kv.tokens, kv.slots, mask=[0] * 64),  # type: ignore[list-item]
    "mask is a number": lambda e, kv: e.retrieve(kv.tokens, kv.slots, mask=5),  # type: ignore[arg-type]
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_argument_is_a_usage_error_and_nothing_else(name: str) -> None:
    kv = PagedKV(4 * T)
    backend = FaultyBackend(MemoryBackend())
    async with open_engine(kv, 8, [backend]) as engine:
        with pytest.raises(UsageError) as refusal:
            await WRONG[name](engine, kv)
        assert str(refusal.value)
        assert not {"contains", "read", "write"} & set(backend.calls), "refused before any I/O"
        assert engine.health().degraded is None
        assert (await engine.store(kv.tokens, kv.slots)).stored_tokens == 4 * T
