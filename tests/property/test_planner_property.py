"""The planner against the plainest way to say what it should answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from akvcache.keys import ChunkRun
from akvcache.planner import plan_prefix
from akvcache.testing import make_keys

KEYS = make_keys(12)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], dict[str, list[bool]]]:
    sizes = draw(st.lists(st.integers(1, 20), max_size=12))
    names = draw(st.lists(st.sampled_from(["host", "nvme", "nvme2", "s3"]), unique=True))
    presence = {name: draw(st.lists(st.booleans(), max_size=len(sizes) + 2)) for name in names}
    return sizes, presence


def tiers_of(presence: Mapping[str, Sequence[bool]], chunk: int) -> list[str]:
    return [name for name in presence if dict(enumerate(presence[name])).get(chunk, False)]


@settings(max_examples=500, deadline=None)
@given(problems())
def test_the_plan_is_the_longest_run_from_the_first_chunk_each_from_its_fastest_tier(
    problem: tuple[list[int], dict[str, list[bool]]],
) -> None:
    sizes, presence = problem
    run = ChunkRun(KEYS[: len(sizes)], [sum(sizes[: i + 1]) for i in range(len(sizes))])
    plan = plan_prefix(run, presence)

    lengths = [n for n in range(len(sizes) + 1) if all(tiers_of(presence, chunk) for chunk in range(n))]
    hit = max(lengths)
    assert [list(names) for names in plan.sources] == [tiers_of(presence, chunk) for chunk in range(hit)]
    assert plan.hit_tokens == sum(sizes[:hit]) == sum(plan.by_tier.values())
    for name in presence:
        first_choice = [sizes[chunk] for chunk in range(hit) if tiers_of(presence, chunk)[0] == name]
        assert plan.by_tier.get(name, 0) == sum(first_choice)
    assert all(plan.by_tier.values()), "a tier that serves nothing is not named"
