"""What to load from where. Pure: presence in, plan out.

A prefix whose chunks lie in different tiers is one hit; the first chunk that is nowhere ends it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from akvcache.keys import ChunkRun

__all__ = ("HOST", "Plan", "plan_prefix")

HOST: Final = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The longest contiguous prefix and where each of its chunks would come from.

    Attributes:
        sources: Tier names that hold each chunk of the prefix, fastest first; never empty.
        hit_tokens: Tokens of the prefix.
        by_tier: Fastest tier to tokens; sums to `hit_tokens`.
    """

    sources: Sequence[Sequence[str]]
    hit_tokens: int
    by_tier: Mapping[str, int]


def plan_prefix(run: ChunkRun, presence: Mapping[str, Sequence[bool]]) -> Plan:
    """Return the plan for a prompt.

    Args:
        run: Its chunks.
        presence: Tier name to one bool per chunk, fastest tier first; a shorter list reads as absent beyond its end.
    """
    sources: list[Sequence[str]] = []
    by_tier: dict[str, int] = {}
    for index in range(len(run.keys)):
        holders = [tier for tier, has in presence.items() if index < len(has) and has[index]]
        if not holders:
            break
        start, stop = run.span(index)
        by_tier[holders[0]] = by_tier.get(holders[0], 0) + stop - start
        sources.append(holders)
    return Plan(sources=sources, hit_tokens=run.tokens_before(len(sources)), by_tier=by_tier)
