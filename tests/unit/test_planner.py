"""From presence to plan, example by example; tests/property/test_planner_property.py has the general case."""

from __future__ import annotations

import pytest

from akvcache.keys import ChunkRun
from akvcache.planner import HOST, plan_prefix
from akvcache.testing import make_keys

RUN = ChunkRun(make_keys(4), [16, 32, 40, 56])
"""Chunks of 16, 16, 8 and 16 tokens."""


def test_a_prefix_over_several_tiers_is_one_hit() -> None:
    plan = plan_prefix(
        RUN, {HOST: [True, False, False, False], "nvme": [False, True, False, True], "s3": [False, False, True, True]}
    )
    assert [list(names) for names in plan.sources] == [[HOST], ["nvme"], ["s3"], ["nvme", "s3"]]
    assert plan.hit_tokens == 56
    assert plan.by_tier == {HOST: 16, "nvme": 32, "s3": 8}


def test_the_first_chunk_that_is_nowhere_ends_it() -> None:
    plan = plan_prefix(RUN, {HOST: [True, True, False, True], "nvme": [True, False, False, True]})
    assert (plan.hit_tokens, len(plan.sources), plan.by_tier) == (32, 2, {HOST: 32})


@pytest.mark.parametrize("presence", [{}, {HOST: []}, {HOST: [False] * 4, "s3": [False, True, True, True]}])
def test_a_missing_head_is_no_hit(presence: dict[str, list[bool]]) -> None:
    plan = plan_prefix(RUN, presence)
    assert (plan.hit_tokens, list(plan.sources), plan.by_tier) == (0, [], {})


def test_a_tier_that_answers_for_fewer_chunks_lacks_the_rest() -> None:
    assert plan_prefix(RUN, {"s3": [True, True]}).hit_tokens == 32


def test_no_chunks_no_plan() -> None:
    assert plan_prefix(ChunkRun([], []), {HOST: []}).hit_tokens == 0
