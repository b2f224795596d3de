"""The four calls on an open, healthy engine: plan, move, report to span, metrics and result."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import torch
from opentelemetry.trace import Span

from akvcache.context import Budget, Context, by_source
from akvcache.loading import plan_loading
from akvcache.planner import plan_prefix
from akvcache.request import Request
from akvcache.results import NO_TIERS, LookupResult, PrefetchResult, RetrieveResult, StopReason, StoreResult
from akvcache.storing import durable, store_run
from akvcache.telemetry import names

__all__ = ("lookup", "prefetch", "retrieve", "store")

KV = TypeVar("KV")
_log = logging.getLogger("akvcache")


async def lookup(context: Context[KV], request: Request, lease_s: float | None) -> LookupResult:
    """Find the longest cached prefix."""
    run = request.run
    with context.telemetry.request(names.LOOKUP, request.num_tokens, request.keyed) as span:
        plan = await context.plan(run, context.host.resident, context.config.lookup_deadline_s)
        missing = StopReason.MISSING
        if context.epoch != request.epoch:
            plan, missing = plan_prefix(run, {}), StopReason.CLEARED
        count = len(plan.sources)
        lease = None
        if lease_s is not None:
            seconds = min(lease_s, context.config.max_lease_s)
            lease = context.host.lease(run.keys[:count], run.stops, plan.sources, seconds)
        stopped = None if count == len(run.keys) else missing
        counts = {names.TOKENS_REQUESTED: request.wanted_tokens, names.TOKENS_HIT: plan.hit_tokens}
        _finish(context, names.LOOKUP, span, stopped, counts, plan.by_tier)
        return LookupResult(hit_tokens=plan.hit_tokens, by_tier=plan.by_tier, lease=lease, stopped=stopped)


async def retrieve(context: Context[KV], request: Request, kv: KV, budget: Budget) -> RetrieveResult:
    """Stream the longest cached prefix into `kv`."""
    run, first = request.run, request.first
    with context.telemetry.request(names.RETRIEVE, request.num_tokens, request.keyed) as span:
        plan, loader = await plan_loading(context, request, budget, names.RETRIEVE)
        done = await loader.into(kv)
        for tier, phase in done.reads.items():
            context.telemetry.phase(names.RETRIEVE, names.TIER_READ, phase, tier=tier)
        context.telemetry.phase(names.RETRIEVE, names.H2D, done.h2d)
        start, stop = run.tokens_before(first), run.tokens_before(first + len(done.sources))
        mask = np.zeros(request.num_tokens, dtype=np.bool_)
        mask[start:stop] = True  # a NumPy array: torch would start its threads on the loop for a long prompt
        stopped = done.stopped
        if stopped is None and first + len(plan.sources) < len(run.keys):
            stopped = StopReason.MISSING
        by_tier = by_source(done.sources, run, first)
        context.telemetry.broken_promise(plan.hit_tokens - (stop - start))
        counts = {
            names.TOKENS_REQUESTED: request.wanted_tokens,
            names.TOKENS_HIT: plan.hit_tokens,
            names.TOKENS_LOADED: stop - start,
        }
        _finish(context, names.RETRIEVE, span, stopped, counts, by_tier)
        return RetrieveResult(
            mask=torch.as_tensor(mask),
            hit_tokens=plan.hit_tokens,
            loaded_tokens=stop - start,
            by_tier=by_tier,
            stopped=stopped,
        )


async def store(context: Context[KV], request: Request, kv: KV, budget: Budget) -> StoreResult:
    """Keep what is missing of a prompt."""
    run = request.run
    with context.telemetry.request(names.STORE, request.num_tokens, request.keyed) as span:
        done, writes = await store_run(context, request, kv, budget, span.get_span_context())
        context.telemetry.phase(names.STORE, names.LEASE, done.lease)
        context.telemetry.phase(names.STORE, names.D2H, done.d2h)
        stored = run.tokens_before(done.reached)
        counts = {
            names.TOKENS_REQUESTED: request.wanted_tokens,
            names.TOKENS_STORED: stored,
            names.TOKENS_NEW: done.new_tokens,
        }
        _finish(context, names.STORE, span, done.stopped, counts)
        why = f" ({done.stopped.value.replace('_', ' ')})" if done.stopped else ""
        _log.info("stored %d of %d tokens%s", stored, request.num_tokens, why)
        return StoreResult(
            total_tokens=request.num_tokens,
            stored_tokens=stored,
            new_tokens=done.new_tokens,
            existing_tokens=done.existing_tokens,
            stopped=done.stopped,
            _durable=lambda timeout_s: durable(context, run, stored, writes, timeout_s),
        )


async def prefetch(context: Context[KV], request: Request, budget: Budget) -> PrefetchResult:
    """Bring the longest cached prefix into host memory."""
    run = request.run
    with context.telemetry.request(names.PREFETCH, request.num_tokens, request.keyed) as span:
        plan, loader = await plan_loading(context, request, budget, names.PREFETCH)
        done = await loader.into_host()
        for tier, phase in done.reads.items():
            context.telemetry.phase(names.PREFETCH, names.TIER_READ, phase, tier=tier)
        ready = run.tokens_before(len(done.sources))
        stopped = done.stopped or (StopReason.MISSING if len(plan.sources) < len(run.keys) else None)
        counts = {
            names.TOKENS_REQUESTED: request.wanted_tokens,
            names.TOKENS_HIT: plan.hit_tokens,
            names.TOKENS_LOADED: ready,
        }
        _finish(context, names.PREFETCH, span, stopped, counts)
        return PrefetchResult(hit_tokens=plan.hit_tokens, ready_tokens=ready, stopped=stopped)


def _finish(
    context: Context[KV],
    op: str,
    span: Span,
    stopped: StopReason | None,
    tokens: Mapping[str, int],
    by_tier: Mapping[str, int] = NO_TIERS,
) -> None:
    context.telemetry.finished(op, span, stopped, tokens)
    context.telemetry.served(op, span, by_tier)
    context.observe()
