"""Operations on the whole cache: flush, clear, other weights."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TypeVar

from akvcache.context import Context
from akvcache.errors import UsageError
from akvcache.keys import KeySchema
from akvcache.request import check_seconds
from akvcache.results import ClearResult, FlushResult, StopReason

__all__ = ("clear", "flush", "set_weights_version")

KV = TypeVar("KV")


async def flush(context: Context[KV], timeout_s: float) -> FlushResult:
    """See `CacheEngine.flush`."""
    check_seconds("timeout_s", timeout_s)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            for queue in context.queues:
                await queue.idle()
    return FlushResult(pending_chunks=sum(queue.num_pending for queue in context.queues))


async def clear(context: Context[KV], timeout_s: float) -> ClearResult:
    """See `CacheEngine.clear`.

    The epoch ends operations in flight; the host index hides its chunks at once; queued writes are given up; a key
    whose write is running stays hidden until that write has ended and its entry is deleted. All tiers are hidden
    before the first is emptied, so that nothing of one reaches host memory meanwhile.

    Cancellation:
        Only this wait ends: the tiers stay hidden and are emptied in the background.
    """
    check_seconds("timeout_s", timeout_s)
    if not timeout_s:
        raise UsageError("timeout_s must be above 0: a tier that is not emptied in time is taken out of use")
    context.epoch += 1
    dropped = context.host.clear()
    for queue in context.queues:
        queue.drop_queued(StopReason.CLEARED)
        queue.disown_running()
    emptying = {tier: tier.empty(context.schema) for tier in context.tiers if tier.inactive is None}
    if emptying:
        await asyncio.wait(emptying.values(), timeout=timeout_s)
    for tier, task in emptying.items():
        if not task.done():
            tier.retire(f"clear failed: not done in {timeout_s} s")
    failed = [tier.name for tier in context.tiers if tier.inactive is not None]
    return ClearResult(dropped_chunks=dropped, failed_tiers=failed)


async def set_weights_version(context: Context[KV], weights_version: str) -> None:
    """See `CacheEngine.set_weights_version`.

    Cancellation:
        The old version stays in force.
    """
    old = context.schema
    namespace = replace(old.namespace, weights_version=weights_version)
    schema = KeySchema(namespace=namespace, layout=old.layout, chunker=old.chunker, algorithm=old.algorithm)
    for tier in context.tiers:
        await tier.attach(schema)
    context.schema = schema
    context.epoch += 1
    context.host.clear()
