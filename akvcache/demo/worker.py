"""One process of the demo: ``python -m akvcache.demo.worker``. Reads a job, answers one request, reports.

Both processes run this code. They differ in one thing: the first one stores the prompt when it is done.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import torch
import xxhash

from akvcache import CacheEngine, EngineConfig, RequestScope, TensorConnector
from akvcache.connector import TensorKV
from akvcache.demo.messages import Event, Job, Report
from akvcache.demo.options import BadValue, DemoError, one_line
from akvcache.demo.runner import ModelRunner
from akvcache.demo.spans import SpanCollector
from akvcache.integrations.transformers import (
    cache_from_kv,
    connector_for,
    kv_from_cache,
    namespace_for,
    weights_digest,
)
from akvcache.results import DurableResult, LookupResult, RetrieveResult
from akvcache.supervision import run_blocking

if TYPE_CHECKING:
    from transformers import DynamicCache

__all__ = ("Worker", "main")

Emit = Callable[[Event], None]
LEASE_S: Final = 60.0
DURABLE_S: Final = 300.0
SPARE_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _FirstToken:
    """What is known once the answer's first token is; times count from the tokens being ready."""

    found: LookupResult
    loaded: RetrieveResult | None
    start: int
    token: int
    cache: DynamicCache
    looked_up_s: float
    retrieved_s: float
    done_s: float


class Worker:
    """Answers one request. The model runs on a thread of its own, so the engine's loop is never blocked."""

    def __init__(self, job: Job, emit: Emit, executor: ThreadPoolExecutor) -> None:
        self._job = job
        self._emit = emit
        self._executor = executor
        self._spans = SpanCollector()
        self._tracer = self._spans.tracer
        self._scope = RequestScope(salt=job.salt)

    async def run(self) -> Report:
        """Load the model, open the cache, answer.

        Raises:
            BadValue: The model cannot be loaded, or its cache cannot be kept.
        """
        job, folder = self._job, Path(self._job.model_folder)
        self._phase("load model", 3)
        try:
            runner = await run_blocking(self._executor, ModelRunner.load, folder, getattr(torch, job.dtype))
            self._step()
            weights = await run_blocking(self._executor, weights_digest, folder)
            connector = connector_for(runner.config, runner.dtype)
        except Exception as error:  # each library behind the loader has errors of its own
            raise BadValue(
                f"model folder {job.model_folder!r} must hold a causal language model that transformers can load: "
                f"{one_line(error)}"
            ) from error
        self._step()
        namespace = namespace_for(runner.config, model=job.model_name, dtype=runner.dtype, weights=weights)
        kv = connector.empty(len(job.tokens) + job.new_tokens)
        config = self._config(connector)
        async with CacheEngine.open(config, connector=connector, namespace=namespace, tracer=self._tracer) as engine:
            await run_blocking(self._executor, runner.warm_up, kv)
            self._step()
            report = await self._answer(engine, runner, connector, kv)
        return replace(report, spans=self._spans.records())

    def _config(self, connector: TensorConnector) -> EngineConfig:
        token_bytes, chunk_tokens = connector.layout.token_bytes, self._job.chunk_tokens
        prompt_bytes = token_bytes * (len(self._job.tokens) + 4 * chunk_tokens) + SPARE_BYTES
        return EngineConfig(
            chunk_tokens=chunk_tokens,
            host_bytes=prompt_bytes,
            write_queue_bytes=prompt_bytes,
            tiers=[f"nvme://{quote(str(Path(self._job.store).resolve()))}?capacity={4 * prompt_bytes}"],
        )

    async def _answer(
        self, engine: CacheEngine[TensorKV], runner: ModelRunner, connector: TensorConnector, kv: TensorKV
    ) -> Report:
        job = self._job
        stored, kept = 0, DurableResult(durable_tokens=0)
        with self._tracer.start_as_current_span("demo.request", attributes={"demo.process": job.role}):
            first = await self._first_token(engine, runner, kv)
            self._phase("generate", job.new_tokens - 1)
            with self._tracer.start_as_current_span("demo.generate"):
                answer = await run_blocking(
                    self._executor, runner.generate, first.token, job.new_tokens, first.cache, self._step
                )
            if job.role == "first":
                self._phase("store")
                handed_over = await engine.store(job.tokens, kv_from_cache(first.cache), scope=self._scope)
                stored = handed_over.stored_tokens
                self._phase("write to NVMe")
                kept = await handed_over.durable(DURABLE_S)
        self._phase("check")
        digest = await run_blocking(self._executor, _digest, kv, job.whole_chunk_tokens)
        return Report(
            pid=os.getpid(),
            hit_tokens=first.found.hit_tokens,
            hit_by_tier=dict(first.found.by_tier),
            loaded_tokens=first.start,
            loaded_by_tier=dict(first.loaded.by_tier) if first.loaded else {},
            loaded_bytes=first.start * connector.layout.token_bytes,
            computed_tokens=len(job.tokens) - first.start,
            ttft_s=first.done_s,
            lookup_s=first.looked_up_s,
            retrieve_s=first.retrieved_s - first.looked_up_s,
            prefill_s=first.done_s - first.retrieved_s,
            generated=answer,
            kv_digest=digest,
            stored_tokens=stored,
            durable_tokens=kept.durable_tokens,
            trouble=_trouble(engine, first, kept),
            spans=[],
        )

    async def _first_token(self, engine: CacheEngine[TensorKV], runner: ModelRunner, kv: TensorKV) -> _FirstToken:
        """Look up, retrieve, compute the rest. The clock starts here: the tokens are ready, the engine is open."""
        job, loaded = self._job, None
        began = time.perf_counter()
        self._phase("look up")
        reusable = job.tokens[: job.whole_chunk_tokens]
        found = await engine.lookup(reusable, scope=self._scope, lease_s=LEASE_S)
        looked_up = time.perf_counter()
        async with found.lease or nullcontext():
            if found.hit_tokens:
                self._phase("retrieve")
                loaded = await engine.retrieve(reusable, kv, scope=self._scope, lease=found.lease)
        retrieved = time.perf_counter()
        start = loaded.loaded_tokens if loaded else 0
        self._phase("prefill", runner.num_layers)
        cache = cache_from_kv(runner.config, kv, start)
        with self._tracer.start_as_current_span("demo.prefill", attributes={"demo.tokens": len(job.tokens) - start}):
            token = await run_blocking(self._executor, runner.prefill, job.tokens[start:], cache, self._step)
        return _FirstToken(
            found=found,
            loaded=loaded,
            start=start,
            token=token,
            cache=cache,
            looked_up_s=looked_up - began,
            retrieved_s=retrieved - began,
            done_s=time.perf_counter() - began,
        )

    def _phase(self, name: str, total: int = 1) -> None:
        self._emit(Event(kind="phase", name=name, total=total))

    def _step(self) -> None:
        self._emit(Event(kind="step"))


def _digest(kv: TensorKV, num_tokens: int) -> str:
    digest = xxhash.xxh3_128()
    for pair in kv:
        for tensor in pair:
            raw = tensor[:, :, :num_tokens].contiguous().view(torch.uint8)
            digest.update(raw.numpy().data)
    return digest.hexdigest()


def _trouble(engine: CacheEngine[TensorKV], first: _FirstToken, kept: DurableResult) -> str | None:
    health = engine.health()
    if health.degraded:
        return health.degraded
    inactive = [f"tier {name}: {tier.inactive}" for name, tier in health.tiers.items() if tier.inactive]
    stopped = kept.stopped or (first.loaded.stopped if first.loaded else None)
    return inactive[0] if inactive else stopped.value if stopped else None


def main() -> int:
    """Serve one job from standard input."""
    # Whatever a library prints goes to standard error; standard output carries events only.
    events = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)

    def emit(event: Event) -> None:
        print(event.to_json(), file=events)

    job = Job.from_json(sys.stdin.readline())
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="model") as executor:
            report = asyncio.run(Worker(job, emit, executor).run())
    except Exception as error:  # noqa: BLE001 - whatever went wrong becomes one line for the parent
        traceback.print_exc()
        code = error.exit_code if isinstance(error, DemoError) else 1
        emit(
            Event(
                kind="error",
                message=f"{type(error).__name__}: {one_line(error)}" if code == 1 else str(error),
                exit_code=code,
            )
        )
        return code
    emit(Event(kind="report", report=asdict(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
