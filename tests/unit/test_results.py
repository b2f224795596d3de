"""Results are plain values; `StoreResult.durable` is the only one that waits."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from akvcache.results import DurableResult, LookupResult, RetrieveResult, StopReason, StoreResult


@pytest.mark.asyncio
async def test_a_store_that_handed_nothing_over_is_not_durable() -> None:
    result = StoreResult(total_tokens=10, stored_tokens=0, new_tokens=0, existing_tokens=0, stopped=StopReason.FROZEN)
    assert await result.durable() == DurableResult(durable_tokens=0, stopped=StopReason.FROZEN)


@pytest.mark.asyncio
async def test_durable_asks_the_engine_with_the_callers_timeout() -> None:
    asked: list[float | None] = []

    async def wait(timeout_s: float | None) -> DurableResult:
        asked.append(timeout_s)
        return DurableResult(durable_tokens=8)

    result = StoreResult(total_tokens=10, stored_tokens=8, new_tokens=8, existing_tokens=0, _durable=wait)
    assert (await result.durable()).durable_tokens == 8
    assert (await result.durable(0.5)).stopped is None
    assert asked == [None, 0.5]
    assert "_durable" not in repr(result)


def test_a_result_cannot_be_changed_and_starts_empty() -> None:
    found = LookupResult(hit_tokens=0)
    assert (dict(found.by_tier), found.lease, found.stopped) == ({}, None, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.hit_tokens = 5  # type: ignore[misc]
    loaded = RetrieveResult(mask=torch.zeros(2, dtype=torch.bool), hit_tokens=0, loaded_tokens=0)
    with pytest.raises(TypeError):
        loaded.by_tier["host"] = 1  # type: ignore[index]


def test_a_reason_is_its_name() -> None:
    assert all(reason.value == reason.name.lower() for reason in StopReason)
