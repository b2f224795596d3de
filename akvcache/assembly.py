"""Builds an engine's parts and takes them apart again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import anyio.lowlevel

from akvcache.backend import Backend, BackendContext
from akvcache.buffers import HostPool
from akvcache.chunking import Chunker, FixedChunker, SegmentChunker
from akvcache.clock import Clock, SystemClock
from akvcache.config import EngineConfig
from akvcache.connector import KVConnector
from akvcache.context import Context
from akvcache.errors import BackendUnavailable, ConfigurationError
from akvcache.frame import HEADER_BYTES, MAX_PARTS, frame_bytes
from akvcache.host import HostTier
from akvcache.keys import CacheNamespace, KeySchema
from akvcache.layout import KVLayout
from akvcache.policy import make_policy
from akvcache.registry import make_backend
from akvcache.results import StopReason
from akvcache.supervision import CircuitBreaker, Supervisor, join_executor, run_blocking, shielded
from akvcache.telemetry import Telemetry
from akvcache.tiers import Tier
from akvcache.transfer import Transfer
from akvcache.writeback import WriteQueue

__all__ = ("assemble", "dismantle")

KV = TypeVar("KV")
_log = logging.getLogger("akvcache")
THREAD_JOIN_S: Final = 5.0


async def assemble(
    config: EngineConfig,
    connector: KVConnector[KV],
    namespace: CacheNamespace | None,
    backends: Sequence[Backend] | None,
    clock: Clock | None,
    telemetry: Telemetry,
    degrade: Callable[[str], None],
    check_usable: Callable[[], None],
) -> Context[KV]:
    """Build and open everything an engine needs; on failure nothing stays behind.

    Raises:
        ConfigurationError: The configuration is not usable.
    """
    _check_arguments(config, connector, namespace, backends)
    await anyio.lowlevel.checkpoint()  # loads anyio's backend now (0.2 s), not in the first cancellation
    clock = clock or SystemClock()
    layout = connector.layout
    chunker = _chunker(config, layout)
    schema = KeySchema(
        namespace=namespace or CacheNamespace(), layout=layout, chunker=chunker, algorithm=config.key_hash
    )
    if backends is None:
        backends = await _backends(config.tiers) if config.tiers else []
    if namespace is None and backends:
        _log.warning(
            "no namespace given: every engine of this layout shares entries on these tiers; "
            "pass namespace=CacheNamespace(model=..., weights_version=...)"
        )
    slot_bytes = frame_bytes(layout.payload_bytes(chunker.max_tokens))
    pool = _pool(config, slot_bytes, chunker)
    host = HostTier(
        pool=pool,
        policy=make_policy(config.eviction, pool.num_slots),
        clock=clock,
        telemetry=telemetry,
        reserve=min(config.staging_reserve, pool.num_slots // 4) if backends else 0,
    )
    supervisor = Supervisor(schema.namespace_id.hex()[:8])
    executor = ThreadPoolExecutor(config.copy_threads, thread_name_prefix="akv-copy")
    tiers = [
        Tier(
            backend,
            config=config,
            supervisor=supervisor,
            executor=executor,
            breaker=CircuitBreaker(clock=clock, failures=config.breaker_failures, reset_s=config.breaker_reset_s),
            telemetry=telemetry,
        )
        for backend in backends
    ]
    _name_apart(tiers)
    window = max(1, config.window_size // slot_bytes)
    window = min(window, max(1, pool.num_slots - host.reserve))
    context = Context(
        config=config,
        connector=connector,
        layout=layout,
        schema=schema,
        host=host,
        tiers=tiers,
        queues=[
            WriteQueue(
                tier,
                host=host,
                layout=layout,
                limit_bytes=config.write_queue_size,
                supervisor=supervisor,
                executor=executor,
                telemetry=telemetry,
            )
            for tier in tiers
        ],
        transfer=Transfer(connector, executor, config.copy_threads),
        supervisor=supervisor,
        executor=executor,
        telemetry=telemetry,
        wave_chunks=max(1, min(config.wave_size // (slot_bytes - HEADER_BYTES), (window + 1) // 2)),
        window_chunks=window,
        degrade=degrade,
        check_usable=check_usable,
    )
    try:
        await _open(context, slot_bytes)
    except BaseException:
        await shielded(dismantle(context))
        raise
    return context


async def _open(context: Context[KV], slot_bytes: int) -> None:
    host = context.host
    for tier in context.tiers:
        await tier.open(BackendContext(frame_bytes=slot_bytes, is_protected=host.is_protected), context.schema)
    await run_blocking(context.executor, host.pool.arena.pin)
    if context.config.prefault:
        context.supervisor.spawn(_prefault(host.pool), name="prefault")
    _log.info(
        "akvcache open: %d host slots of %d bytes, tiers: %s",
        host.pool.num_slots,
        slot_bytes,
        ", ".join(f"{tier.name} ({tier.inactive or 'active'})" for tier in context.tiers) or "none",
    )


async def _prefault(pool: HostPool) -> None:
    thread = ThreadPoolExecutor(1, thread_name_prefix="akv-prefault")
    try:
        await run_blocking(thread, pool.arena.prefault)
    finally:
        await join_executor(thread, THREAD_JOIN_S)


async def dismantle(context: Context[KV]) -> None:
    """Stop intake, drain, close leaves first, report what could not be finished. Never raises."""
    context.host.pool.arena.stop_prefault()
    try:
        async with asyncio.timeout(context.config.close_timeout_s):
            for queue in context.queues:
                await queue.idle()
    except TimeoutError:
        pass
    for queue in context.queues:
        if queue.num_pending:
            dropped = queue.drop_queued(StopReason.CLOSED)
            _log.warning(
                "tier %s: closed with %d writes given up and %d unfinished", queue.tier.name, dropped, queue.num_pending
            )
    stuck = await context.supervisor.drain(min(context.config.close_timeout_s, context.config.io_timeout_s))
    if stuck:
        _log.warning("closed with %d operations that did not end", stuck)
    for tier in context.tiers:
        await tier.aclose(context.config.io_timeout_s)
    context.host.clear()
    context.host.pool.close()
    context.transfer.close()
    if not stuck:
        await run_blocking(context.executor, context.host.pool.arena.unpin)
    if not await join_executor(context.executor, THREAD_JOIN_S):
        _log.warning("closed with a copy thread that did not end")


def _check_arguments(config: object, connector: object, namespace: object, backends: Sequence[object] | None) -> None:
    """Refuse what could only fail later, and less clearly."""
    if not isinstance(config, EngineConfig):
        raise ConfigurationError(f"config must be an EngineConfig, got {type(config).__name__}")
    if not isinstance(getattr(connector, "layout", None), KVLayout):
        raise ConfigurationError(f"connector must be a KVConnector with a layout, got {type(connector).__name__}")
    if namespace is not None and not isinstance(namespace, CacheNamespace):
        raise ConfigurationError(f"namespace must be a CacheNamespace, got {type(namespace).__name__}")
    for backend in backends or ():
        if not hasattr(backend, "contains"):
            raise ConfigurationError(f"tiers must be backends, got {backend!r}; URLs belong into EngineConfig.tiers")
    paths = [url.partition("?")[0] for url in config.tiers]
    for path in paths:
        if not path.endswith("://") and paths.count(path) > 1:
            raise ConfigurationError(f"tier {path!r} is given twice")


def _chunker(config: EngineConfig, layout: KVLayout) -> Chunker:
    if len(layout.groups) > MAX_PARTS:
        raise ConfigurationError(f"the layout has {len(layout.groups)} layer groups, at most {MAX_PARTS} are possible")
    if config.chunk_tokens % layout.block_tokens:
        raise ConfigurationError(
            f"chunk_tokens is {config.chunk_tokens}, it must be a multiple of the block of {layout.block_tokens} tokens"
        )
    if config.chunker == "segments":
        if layout.block_tokens != 1 and layout.tag.startswith("opaque"):
            raise ConfigurationError("chunker 'segments' cuts inside blocks, which this connector's layout forbids")
        return SegmentChunker(config.chunk_tokens, tuple(config.separator))
    return FixedChunker(config.chunk_tokens)


def _pool(config: EngineConfig, slot_bytes: int, chunker: Chunker) -> HostPool:
    num_slots = config.host_size // slot_bytes
    if num_slots < 2:
        raise ConfigurationError(
            f"host_bytes is {config.host_size}, one chunk of {chunker.max_tokens} tokens takes {slot_bytes}; "
            f"give it at least {2 * slot_bytes} or use smaller chunks"
        )
    return HostPool(num_slots=num_slots, slot_bytes=slot_bytes)


async def _backends(urls: Sequence[str]) -> list[Backend]:
    thread = ThreadPoolExecutor(1, thread_name_prefix="akv-plugins")
    try:
        return await run_blocking(thread, lambda: [make_backend(url) for url in urls])
    except BackendUnavailable as error:
        raise ConfigurationError(str(error)) from error
    finally:
        await join_executor(thread, THREAD_JOIN_S)


def _name_apart(tiers: Sequence[Tier]) -> None:
    """Give tiers of one kind different names: nvme, nvme2, ..."""
    seen: dict[str, int] = {}
    for tier in tiers:
        seen[tier.name] = seen.get(tier.name, 0) + 1
        if seen[tier.name] > 1:
            tier.name = f"{tier.name}{seen[tier.name]}"
