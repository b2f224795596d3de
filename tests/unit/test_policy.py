"""Eviction order, example by example; tests/property/test_policy_property.py has the general case."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from akvcache.errors import ConfigurationError
from akvcache.keys import ChunkKey, depth_of
from akvcache.policy import EvictionPolicy, LruPolicy, SegmentedLruPolicy, make_policy
from akvcache.testing import make_keys

A, B, C = (make_keys(4, label=label) for label in "abc")


def anything(_key: ChunkKey) -> bool:
    return True


def request(policy: EvictionPolicy, keys: Sequence[ChunkKey]) -> None:
    """Do what a request does that finds room for all its chunks."""
    tick = policy.touch(keys)
    for key in keys:
        policy.insert(key, tick)


def order(policy: EvictionPolicy) -> list[ChunkKey]:
    return list(policy.victims(len(policy), anything))


@pytest.mark.parametrize("make", [LruPolicy, SegmentedLruPolicy])
class TestEveryPolicy:
    def test_the_tail_of_the_oldest_prefix_leaves_first(self, make: Callable[[int], EvictionPolicy]) -> None:
        policy = make(100)
        request(policy, A)
        request(policy, B)
        assert order(policy) == [*A[::-1], *B[::-1]]

    def test_a_use_saves_the_whole_path(self, make: Callable[[int], EvictionPolicy]) -> None:
        policy = make(100)
        request(policy, A)
        request(policy, B)
        policy.touch(A[:2])
        assert order(policy) == [A[3], A[2], *B[::-1], A[1], A[0]]

    def test_as_many_as_wanted_and_nothing_changes(self, make: Callable[[int], EvictionPolicy]) -> None:
        policy = make(100)
        request(policy, A)
        assert list(policy.victims(0, anything)) == []
        assert list(policy.victims(2, anything)) == list(policy.victims(2, anything)) == [A[3], A[2]]
        assert len(policy.victims(99, anything)) == len(policy) == 4

    def test_only_what_may_leave(self, make: Callable[[int], EvictionPolicy]) -> None:
        policy = make(100)
        request(policy, A)
        request(policy, B)
        assert list(policy.victims(3, lambda key: key not in A)) == [B[3], B[2], B[1]]
        assert list(policy.victims(3, lambda key: False)) == []
        assert order(policy) == [*A[::-1], *B[::-1]]

    def test_what_left_is_not_given_again(self, make: Callable[[int], EvictionPolicy]) -> None:
        policy = make(100)
        request(policy, A)
        policy.forget(A[3])
        policy.forget(A[3])
        policy.forget(C[0])
        assert order(policy) == [A[2], A[1], A[0]]
        policy.touch(A)
        assert len(policy) == 3, "touching does not add"
        policy.insert(A[3])
        assert set(order(policy)) == set(A)

    def test_inserting_twice_is_inserting_once(self, make: Callable[[int], EvictionPolicy]) -> None:
        policy = make(100)
        request(policy, A)
        request(policy, B)
        policy.insert(A[0])
        assert order(policy) == [*A[::-1], *B[::-1]]

    def test_an_older_request_may_insert_late(self, make: Callable[[int], EvictionPolicy]) -> None:
        policy = make(100)
        older = policy.touch(A)
        request(policy, B)
        for key in A:
            policy.insert(key, older)
        assert order(policy) == [*A[::-1], *B[::-1]]

    def test_a_prefix_never_eats_its_own_head(self, make: Callable[[int], EvictionPolicy]) -> None:
        policy = make(4)
        request(policy, A)
        policy.touch([*A, *make_keys(5, label="a")[4:]])
        newcomer = make_keys(5, label="a")[4]
        assert list(policy.victims(4, anything, newcomer=newcomer)) == []

    def test_a_prefix_takes_room_from_older_ones(self, make: Callable[[int], EvictionPolicy]) -> None:
        policy = make(4)
        request(policy, A)
        policy.touch(B)
        assert list(policy.victims(1, anything, newcomer=B[0])) == [A[3]]

    def test_a_deep_newcomer_takes_no_room_from_the_head_of_its_request(
        self, make: Callable[[int], EvictionPolicy]
    ) -> None:
        policy = make(4)
        request(policy, A[:2])
        tick = policy.touch(B)
        policy.insert(B[0], tick)
        policy.insert(B[1], tick)
        assert list(policy.victims(4, anything, newcomer=B[2])) == [A[1], A[0]]

    def test_many_uses_do_not_confuse_it(self, make: Callable[[int], EvictionPolicy]) -> None:
        policy = make(100)
        for _ in range(200):
            request(policy, A)
            request(policy, B)
        request(policy, A)
        assert order(policy)[-1] == A[0]
        assert set(order(policy)) == {*A, *B}


def fill_twice(policy: EvictionPolicy, count: int) -> list[ChunkKey]:
    hot = [make_keys(1, label=f"hot {number}")[0] for number in range(count)]
    for _ in range(2):
        for key in hot:
            request(policy, [key])
    return hot


def store(policy: EvictionPolicy, keys: Sequence[ChunkKey], capacity: int) -> list[ChunkKey]:
    """Store a prompt as a cache of `capacity` chunks would; return what it evicted."""
    evicted: list[ChunkKey] = []
    tick = policy.touch(keys)
    known = set(order(policy))
    for key in keys:
        if key not in known and len(policy) >= capacity:
            victims = policy.victims(1, anything, newcomer=key)
            if not victims:
                break
            policy.forget(victims[0])
            evicted += victims
        policy.insert(key, tick)
    return evicted


def test_slru_keeps_what_is_used_again_while_a_scan_passes() -> None:
    policy = SegmentedLruPolicy(10)
    hot = fill_twice(policy, 8)
    for number in range(100):
        evicted = store(policy, make_keys(3, label=f"scan {number}"), 10)
        assert not set(evicted) & set(hot)


def test_slru_survives_one_scan_longer_than_the_cache() -> None:
    policy = SegmentedLruPolicy(10)
    hot = fill_twice(policy, 8)
    store(policy, make_keys(1000, label="one long prompt"), 10)
    assert set(hot) <= set(order(policy))


def test_lru_does_not() -> None:
    policy = LruPolicy(10)
    hot = fill_twice(policy, 8)
    for number in range(100):
        store(policy, make_keys(3, label=f"scan {number}"), 10)
    assert not set(hot) & set(order(policy))


def test_slru_protects_nothing_for_ever() -> None:
    policy = SegmentedLruPolicy(10)
    old = fill_twice(policy, 8)
    for _ in range(4):
        for number in range(8):
            store(policy, make_keys(1, label=f"new {number}"), 10)
            store(policy, make_keys(1, label=f"new {number}"), 10)
    store(policy, make_keys(2, label="once"), 10)
    assert not set(old) & set(order(policy))


def test_slru_protects_at_most_its_share() -> None:
    policy = SegmentedLruPolicy(10)
    hot = fill_twice(policy, 10)
    once = [make_keys(1, label=f"once {number}")[0] for number in range(3)]
    for key in once:
        request(policy, [key])
    assert order(policy) == [hot[0], hot[1], *once, *hot[2:]], "the two beyond 80 % are on probation again"


def test_slru_gives_the_tail_of_a_protected_prefix_back_first() -> None:
    policy = SegmentedLruPolicy(4)
    request(policy, A)
    policy.touch(A)
    request(policy, [B[0]])
    assert order(policy) == [A[3], B[0], A[2], A[1], A[0]]


def test_slru_never_eats_a_protected_head_either() -> None:
    policy = SegmentedLruPolicy(10)
    fill_twice(policy, 2)
    request(policy, B)
    request(policy, A)
    policy.touch(A)
    newcomer = make_keys(5, label="a")[4]
    older = [key for key in order(policy) if key not in A and key not in B]
    assert list(policy.victims(9, lambda key: key not in B, newcomer=newcomer)) == older


def test_slru_with_room_for_one() -> None:
    policy = SegmentedLruPolicy(1)
    request(policy, [A[0]])
    policy.touch([A[0]])
    policy.touch([B[0]])
    assert list(policy.victims(1, anything, newcomer=B[0])) == [A[0]]


@pytest.mark.parametrize(("name", "kind"), [("lru", LruPolicy), ("slru", SegmentedLruPolicy)])
def test_policies_have_names(name: str, kind: type) -> None:
    assert type(make_policy(name, 10)) is kind


def test_an_unknown_policy_lists_the_known() -> None:
    with pytest.raises(ConfigurationError, match="eviction policy 'mru' is not known; use one of lru, slru"):
        make_policy("mru", 10)


def test_a_policy_shows_how_much_it_ranks() -> None:
    policy = LruPolicy(10)
    request(policy, A)
    assert repr(policy) == "<LruPolicy 4 chunks>"
    assert [depth_of(key) for key in A] == [0, 1, 2, 3]
