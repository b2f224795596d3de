"""How callers see the types; checked by tests/typing/test_typing.py, never run."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import assert_type

import numpy as np
import torch

from akvcache import (
    CacheEngine,
    CacheNamespace,
    DurableResult,
    EngineConfig,
    KVConnector,
    KVLayout,
    LookupResult,
    PagedConnector,
    PrefetchResult,
    RequestScope,
    RetrieveResult,
    StopReason,
    StoreResult,
    SyncCacheEngine,
    TensorConnector,
)
from akvcache.backend import Backend
from akvcache.connector import NullConnector, TensorKV
from akvcache.facade import Ticket
from akvcache.host import HostLease
from akvcache.results import ClearResult, FlushResult, Health, TierHealth
from akvcache.testing import FakeDevice, FakeDeviceConnector, FaultyBackend, MemoryBackend


async def paged(config: EngineConfig, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], tokens: list[int]) -> None:
    connector = PagedConnector(layers)
    async with CacheEngine.open(config, connector=connector, namespace=CacheNamespace(model="m")) as engine:
        assert_type(engine, CacheEngine[torch.Tensor])
        slots = connector.slots([0, 1], 32)
        found = await engine.lookup(tokens, scope=RequestScope(salt="x"), lease_s=5)
        assert_type(found, LookupResult)
        assert_type(found.lease, HostLease | None)
        assert_type(found.by_tier, Mapping[str, int])
        loaded = await engine.retrieve(tokens, slots, mask=[True], lease=found.lease, deadline_s=1)
        assert_type(loaded, RetrieveResult)
        assert_type(loaded.mask, torch.Tensor)
        assert_type(loaded.stopped, StopReason | None)
        kept = await engine.store(tokens, slots)
        assert_type(kept, StoreResult)
        assert_type(await kept.durable(), DurableResult)
        assert_type(await engine.prefetch(tokens), PrefetchResult)
        assert_type(await engine.flush(), FlushResult)
        assert_type(await engine.clear(), ClearResult)
        assert_type(engine.health(), Health)
        assert_type(engine.health().tiers, Mapping[str, TierHealth])
        await engine.store(tokens, "not a slot mapping")  # type: ignore[arg-type]
        await engine.lookup("not tokens")  # type: ignore[arg-type]
        await engine.lookup(tokens, lease_s="5")  # type: ignore[arg-type]


async def token_containers(engine: CacheEngine[object]) -> None:
    for tokens in ([1, 2], (1, 2), range(5), np.arange(5), torch.arange(5)):
        assert_type(await engine.lookup(tokens), LookupResult)
    await engine.lookup([0.5])  # type: ignore[list-item]
    await engine.lookup(None)  # type: ignore[arg-type]


async def tensors(config: EngineConfig, kv: TensorKV) -> None:
    connector = TensorConnector(num_layers=1, num_kv_heads=1, head_dim=8, dtype=torch.float16)
    async with CacheEngine.open(config, connector=connector) as engine:
        assert_type(engine, CacheEngine[Sequence[tuple[torch.Tensor, torch.Tensor]]])
        await engine.store([1], kv)
        await engine.retrieve([1], connector.empty(5))


def blocking(config: EngineConfig, connector: KVConnector[torch.Tensor], slots: torch.Tensor) -> None:
    with SyncCacheEngine(config, connector=connector) as engine:
        assert_type(engine, SyncCacheEngine[torch.Tensor])
        assert_type(engine.store([1], slots), StoreResult)
        ticket = engine.submit(lambda e: e.retrieve([1], slots))
        assert_type(ticket, Ticket[RetrieveResult])
        assert_type(ticket.poll(), RetrieveResult | None)
        assert_type(ticket.wait(5), RetrieveResult)


class OwnConnector:
    """What a third party writes."""

    @property
    def layout(self) -> KVLayout:
        return KVLayout.mha(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float16")

    def check(self, kv: dict[str, int], num_tokens: int) -> None:
        """Check."""

    def gather(self, kv: dict[str, int], spans: Sequence[tuple[int, int]], out: Sequence[memoryview]) -> None:
        """Copy out."""

    def scatter(self, kv: dict[str, int], spans: Sequence[tuple[int, int]], src: Sequence[memoryview]) -> None:
        """Copy in."""


async def own_connector(config: EngineConfig) -> None:
    async with CacheEngine.open(config, connector=OwnConnector()) as engine:
        assert_type(engine, CacheEngine[dict[str, int]])
        await engine.store([1], {"request": 1})
        await engine.store([1], {"request": "1"})  # type: ignore[dict-item]


async def not_a_connector(config: EngineConfig) -> None:
    CacheEngine.open(config, connector=object())  # type: ignore[arg-type]


def protocols(layout: KVLayout, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    backends: list[Backend] = [MemoryBackend(), FaultyBackend(MemoryBackend())]
    paged_connector: KVConnector[torch.Tensor] = PagedConnector(layers)
    null: KVConnector[object] = NullConnector(layout)
    fake: KVConnector[torch.Tensor] = FakeDeviceConnector(PagedConnector(layers), FakeDevice())
    del backends, paged_connector, null, fake


def durable_is_awaitable(kept: StoreResult) -> Awaitable[DurableResult]:
    return kept.durable(timeout_s=1)
