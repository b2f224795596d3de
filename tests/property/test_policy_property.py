"""Policies against a model without a heap, inside a cache that stores prompts as the engine does."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akvcache.keys import ChunkKey, depth_of
from akvcache.policy import EvictionPolicy, LruPolicy, SegmentedLruPolicy
from akvcache.testing import make_namespace_id

Prompt = tuple[int, ...]


class Model:
    """The same rules on plain lists: (segment, last request, -depth) decides, smallest first."""

    def __init__(self, protected_limit: int) -> None:
        self.protected_limit = protected_limit
        self.now = 1
        self.chunks: dict[ChunkKey, tuple[int, int]] = {}

    def rank(self, key: ChunkKey) -> tuple[int, int, int]:
        segment, tick = self.chunks[key]
        return segment, tick, -depth_of(key)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        self.now += 1
        for key in keys:
            if key in self.chunks:
                self.chunks[key] = (1 if self.protected_limit else 0, self.now)
        protected = sorted((key for key in self.chunks if self.chunks[key][0]), key=self.rank)
        for key in protected[: max(0, len(protected) - self.protected_limit)]:
            self.chunks[key] = (0, self.chunks[key][1])

    def insert(self, key: ChunkKey) -> None:
        self.chunks.setdefault(key, (0, self.now))

    def victims(self, count: int, leased: set[ChunkKey], newcomer: ChunkKey | None) -> list[ChunkKey]:
        chosen: list[ChunkKey] = []
        for key in sorted(self.chunks, key=self.rank):
            if len(chosen) == count or (newcomer is not None and self.rank(key)[1:] >= (self.now, -depth_of(newcomer))):
                break
            if key not in leased:
                chosen.append(key)
        return chosen


def path_of(prompt: Prompt) -> list[ChunkKey]:
    """Return one key per chunk; prompts that begin alike share keys, as in the engine."""
    prefix = make_namespace_id()
    return [
        ChunkKey(prefix + depth.to_bytes(4, "big") + hashlib.sha256(repr(prompt[: depth + 1]).encode()).digest())
        for depth in range(len(prompt))
    ]


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
lease = st.none() | prompts


@pytest.mark.parametrize(
    ("make", "share"), [(LruPolicy, 0.0), (SegmentedLruPolicy, SegmentedLruPolicy.PROTECTED_SHARE)]
)
@settings(max_examples=150, deadline=None)
@given(capacity=st.integers(1, 12), requests=st.lists(st.tuples(prompts, lease), min_size=1, max_size=40))
def test_a_cache_under_a_policy(
    make: Callable[[int], EvictionPolicy], share: float, capacity: int, requests: list[tuple[Prompt, Prompt | None]]
) -> None:
    policy, model = make(capacity), Model(max(1, int(capacity * share)) if share else 0)
    stored: set[ChunkKey] = set()
    parents = {
        key: path[at - 1] for prompt, _ in requests for path in [path_of(prompt)] for at, key in enumerate(path) if at
    }
    for prompt, leased_prompt in requests:
        path = path_of(prompt)
        leased = set(path_of(leased_prompt)) if leased_prompt else set()
        tick = policy.touch(path)
        model.touch(path)
        for key in path:
            if key in stored:
                continue
            if len(stored) == capacity:
                victims = list(policy.victims(1, lambda chunk: chunk not in leased, newcomer=key))  # noqa: B023
                assert victims == model.victims(1, leased, key)
                if not victims:
                    break
                assert victims[0] not in path, "a prefix never eats its own head"
                assert victims[0] not in leased
                policy.forget(victims[0])
                del model.chunks[victims[0]]
                stored.remove(victims[0])
            policy.insert(key, tick)
            model.insert(key)
            stored.add(key)
        assert all(parents[key] in stored for key in stored if key in parents), "a chunk without its head is useless"
        assert len(policy) == len(stored)
        everything = list(policy.victims(len(stored), lambda chunk: True))
        assert everything == model.victims(len(stored), set(), None)
