"""Residency of chunks: what is visible, what may leave, who keeps it; counts never go wrong."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akvcache.buffers import Slot
from akvcache.errors import InvariantError
from akvcache.index import ChunkState, Entry, Hold, HostIndex
from akvcache.keys import ChunkKey
from akvcache.policy import LruPolicy
from akvcache.testing import make_keys

A = make_keys(8, label="a")


class Rig:
    """An index whose slots are plain numbers.

    Attributes:
        changes: How often the index said that chunks may have become free to leave.
    """

    def __init__(self) -> None:
        self.changes = 0
        self.index = HostIndex(LruPolicy(100), self._changed)
        self.serial = 0

    def _changed(self) -> None:
        self.changes += 1

    def begin(self, key: ChunkKey) -> Entry:
        self.serial += 1
        return self.index.begin(key, Slot(self.serial, memoryview(b"")), 16)

    def add(self, key: ChunkKey) -> Entry:
        entry = self.begin(key)
        assert self.index.publish(entry)
        return entry

    def freed(self) -> list[int]:
        slots, self.index.freed = self.index.freed, []
        return [slot.index for slot in slots]


@pytest.fixture
def rig() -> Rig:
    return Rig()


class TestVisibility:
    def test_a_chunk_is_visible_from_publish_to_eviction(self, rig: Rig) -> None:
        entry = rig.begin(A[0])
        assert rig.index.resident(A[0]) is None
        assert (len(rig.index), rig.index.reclaimable) == (1, 0)
        assert rig.index.publish(entry)
        assert rig.index.resident(A[0]) is entry
        assert rig.index.reclaimable == 1
        assert rig.index.evict(1) == [A[0]]
        assert rig.index.resident(A[0]) is None
        assert entry.state is ChunkState.EVICTING
        assert rig.freed() == [1]
        assert (len(rig.index), rig.index.reclaimable) == (0, 0)

    def test_an_abandoned_chunk_was_never_there(self, rig: Rig) -> None:
        rig.index.abandon(rig.begin(A[0]))
        assert rig.index.resident(A[0]) is None
        assert rig.freed() == [1]
        assert rig.add(A[0]).state is ChunkState.RESIDENT

    def test_filling_a_chunk_twice_is_our_bug_and_is_caught(self, rig: Rig) -> None:
        rig.begin(A[0])
        with pytest.raises(InvariantError, match="filled twice"):
            rig.begin(A[0])

    def test_representations_show_state(self, rig: Rig) -> None:
        entry = rig.add(A[0])
        hold = Hold(rig.index, "store-1")
        hold.add(entry)
        assert repr(entry).endswith("RESIDENT <Slot 1> holds=1>")
        assert repr(hold) == "<Hold store-1 1 entries>"
        rig.index.drop(A[0])
        assert repr(rig.index) == "<HostIndex 0 chunks, 0 reclaimable, 1 leaving>"


class TestHolds:
    def test_a_held_chunk_does_not_leave(self, rig: Rig) -> None:
        entries = [rig.add(key) for key in A[:3]]
        hold = Hold(rig.index, "lease")
        hold.add(entries[1])
        assert rig.index.reclaimable == 2
        assert rig.index.evict(9) == [A[2], A[0]]
        hold.release()
        assert rig.index.evict(9) == [A[1]]

    def test_each_owner_counts_once_and_releases_once(self, rig: Rig) -> None:
        entry = rig.add(A[0])
        one, two = Hold(rig.index, "one"), Hold(rig.index, "two")
        one.add(entry)
        one.add(entry)
        two.add(entry)
        assert (entry.holds, len(one), len(two)) == (2, 1, 1)
        one.release()
        one.release()
        assert entry.holds == 1
        assert rig.index.reclaimable == 0
        two.discard(entry)
        assert entry.holds == 0
        assert rig.index.reclaimable == 1
        assert rig.index.holds == set()

    def test_live_holds_are_known(self, rig: Rig) -> None:
        entries = [rig.add(key) for key in A[:2]]
        hold = Hold(rig.index, "one")
        assert rig.index.holds == set()
        for entry in entries:
            hold.add(entry)
        assert rig.index.holds == {hold}
        hold.discard(entries[0])
        assert rig.index.holds == {hold}
        hold.discard(entries[1])
        assert rig.index.holds == set()

    def test_giving_up_a_hold_is_announced_once(self, rig: Rig) -> None:
        hold = Hold(rig.index, "one")
        hold.release()
        assert rig.changes == 0, "nothing was held"
        for key in A[:3]:
            hold.add(rig.add(key))
        hold.release()
        assert rig.changes == 1

    def test_releasing_more_often_than_held_is_our_bug_and_is_caught(self, rig: Rig) -> None:
        entry = rig.add(A[0])
        with pytest.raises(InvariantError, match="released more often than held"):
            rig.index.unhold(entry)

    def test_a_chunk_held_while_it_is_filled_stays_held(self, rig: Rig) -> None:
        entry = rig.begin(A[0])
        hold = Hold(rig.index, "retrieve")
        hold.add(entry)
        rig.index.publish(entry)
        assert rig.index.reclaimable == 0
        assert rig.index.evict(1) == []
        hold.release()
        assert rig.index.reclaimable == 1

    def test_a_slot_of_an_abandoned_chunk_stays_until_the_last_holder_lets_go(self, rig: Rig) -> None:
        entry = rig.begin(A[0])
        hold = Hold(rig.index, "late read")
        hold.add(entry)
        rig.index.abandon(entry)
        assert rig.freed() == []
        assert rig.index.num_leaving == 1
        again = rig.add(A[0])
        hold.release()
        assert rig.freed() == [1]
        assert rig.index.num_leaving == 0
        assert rig.index.resident(A[0]) is again


class TestDrop:
    def test_an_unheld_chunk_goes_at_once(self, rig: Rig) -> None:
        rig.add(A[0])
        assert rig.index.drop(A[0])
        assert rig.freed() == [1]
        assert not rig.index.drop(A[0])

    def test_a_held_chunk_is_invisible_at_once_and_its_slot_follows(self, rig: Rig) -> None:
        entry = rig.add(A[0])
        hold = Hold(rig.index, "write")
        hold.add(entry)
        assert rig.index.drop(A[0])
        assert rig.index.resident(A[0]) is None
        assert (rig.freed(), rig.index.num_leaving) == ([], 1)
        hold.release()
        assert (rig.freed(), rig.index.num_leaving, rig.index.reclaimable) == ([1], 0, 0)

    def test_a_chunk_being_filled_is_settled_by_whoever_fills_it(self, rig: Rig) -> None:
        published, abandoned = rig.begin(A[0]), rig.begin(A[1])
        assert rig.index.clear() == 2
        assert rig.freed() == []
        assert not rig.index.publish(published)
        rig.index.abandon(abandoned)
        assert sorted(rig.freed()) == [1, 2]
        assert rig.index.resident(A[0]) is None
        assert rig.index.reclaimable == 0

    def test_a_dropped_key_can_be_filled_anew_before_the_old_slot_has_gone(self, rig: Rig) -> None:
        old = rig.begin(A[0])
        rig.index.drop(A[0])
        new = rig.add(A[0])
        assert not rig.index.publish(old)
        assert rig.index.resident(A[0]) is new
        assert rig.freed() == [1]
        assert rig.index.evict(9) == [A[0]]

    def test_clear_drops_everything(self, rig: Rig) -> None:
        for key in A[:5]:
            rig.add(key)
        hold = Hold(rig.index, "one")
        entry = rig.index.resident(A[2])
        assert entry is not None
        hold.add(entry)
        assert rig.index.clear() == 5
        assert len(rig.index) == 0
        assert len(rig.freed()) == 4
        hold.release()
        assert len(rig.freed()) == 1


class TestOrder:
    def test_the_tail_leaves_before_the_head(self, rig: Rig) -> None:
        for key in A[:4]:
            rig.add(key)
        assert rig.index.evict(2) == [A[3], A[2]]

    def test_a_touch_refreshes_the_whole_path(self, rig: Rig) -> None:
        b = make_keys(2, label="b")
        for path in (A[:2], b):
            tick = rig.index.touch(path)
            for key in path:
                rig.index.publish(rig.begin(key), tick)
        rig.index.touch(A[:2])
        assert rig.index.evict(3) == [b[1], b[0], A[1]]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "publish", "abandon", "hold", "discard", "release", "evict", "drop", "clear"]),
        st.integers(0, 5),
        st.integers(0, 2),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_every_slot_comes_back_exactly_once_whatever_the_order(steps: list[tuple[str, int, int]]) -> None:
    """RL-08: freed exactly once, when nobody holds it and it is not visible; live plus freed is everything begun."""
    rig = Rig()
    holds = [Hold(rig.index, str(number)) for number in range(3)]
    held: list[dict[Entry, None]] = [{}, {}, {}]
    writing: list[Entry] = []
    visible: dict[ChunkKey, Entry] = {}
    begun: dict[int, Entry] = {}
    freed: list[int] = []
    for action, which, who in steps:
        key = A[which]
        if (
            action == "begin"
            and key not in visible
            and not any(e.key == key and e.state is ChunkState.WRITING for e in writing)
        ):
            entry = rig.begin(key)
            writing.append(entry)
            begun[entry.slot.index] = entry
        elif action in ("publish", "abandon") and writing:
            entry = writing.pop(which % len(writing))
            if action == "abandon":
                rig.index.abandon(entry)
            elif rig.index.publish(entry):
                visible[entry.key] = entry
        elif action == "hold" and (entry_or_none := rig.index.resident(key) or next(iter(writing), None)) is not None:
            holds[who].add(entry_or_none)
            held[who][entry_or_none] = None
        elif action == "discard" and held[who]:
            entry, _ = held[who].popitem()
            holds[who].discard(entry)
        elif action == "release":
            holds[who].release()
            held[who].clear()
        elif action == "evict":
            for victim in rig.index.evict(which):
                assert not any(visible[victim] in owner for owner in held), "a held chunk was evicted"
                del visible[victim]
        elif action == "drop":
            rig.index.drop(key)
            visible.pop(key, None)
        elif action == "clear":
            rig.index.clear()
            visible.clear()
        freed += rig.freed()
        assert len(freed) == len(set(freed)), "a slot was freed twice"
        assert {k: rig.index.resident(k) for k in A[:6]} == {k: visible.get(k) for k in A[:6]}
        assert rig.index.reclaimable == sum(entry.holds == 0 for entry in visible.values())
        kept = {e.slot.index for e in [*visible.values(), *writing]} | {e.slot.index for owner in held for e in owner}
        assert set(freed) == set(begun) - kept
