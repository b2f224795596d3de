"""An engine with its parts in view, to prove that nothing of an operation stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from opentelemetry.metrics import Meter

from akvcache.assembly import assemble
from akvcache.backend import Backend
from akvcache.clock import Clock
from akvcache.config import EngineConfig
from akvcache.connector import KVConnector
from akvcache.context import Context
from akvcache.engine import CacheEngine
from akvcache.keys import CacheNamespace
from akvcache.telemetry import Telemetry

__all__ = ("Inspected", "open_inspected")

KV = TypeVar("KV")


@dataclass(frozen=True, slots=True)
class Inspected(Generic[KV]):
    """An open engine and the parts it is made of."""

    engine: CacheEngine[KV]
    context: Context[KV]

    def leftovers(self, *, leases: int = 0) -> dict[str, object]:
        """Return everything that is not as it is at rest; empty at rest.

        Args:
            leases: Lookup leases that the caller still holds.
        """
        host, queues = self.context.host, self.context.queues
        pool, index = host.pool, host.index
        host.expire()
        found: dict[str, object] = {
            "slot leases": pool.num_leases,
            "requests waiting for a slot": pool.num_waiters,
            "holds": [hold for hold in index.holds if not hold.owner.startswith("lease-")],
            "dropped chunks still held": index.num_leaving,
            "chunks being filled or held": 0 if leases else len(index) - index.reclaimable,
            "slots that are neither free nor cached": pool.num_slots - pool.num_free - len(index),
            "lookup leases": host.num_leases - leases,
            "tasks": self.context.supervisor.num_tasks,
            "pending writes": [queue for queue in queues if queue.num_pending or queue.queued_bytes],
        }
        return {what: value for what, value in found.items() if value}

    async def rest(self, *, leases: int = 0, timeout_s: float = 10.0) -> None:
        """Wait until nothing is left over.

        Raises:
            AssertionError: Something still was after `timeout_s`; the message says what.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while left := self.leftovers(leases=leases):
            if loop.time() > end:
                raise AssertionError(f"left over: {left}")
            await asyncio.sleep(0.001)


@asynccontextmanager
async def open_inspected(
    config: EngineConfig,
    *,
    connector: KVConnector[KV],
    tiers: Sequence[Backend] = (),
    namespace: CacheNamespace | None = None,
    clock: Clock | None = None,
    meter: Meter | None = None,
) -> AsyncGenerator[Inspected[KV]]:
    """Open an engine like `CacheEngine.open` and show its parts as well."""
    engine: CacheEngine[KV]
    telemetry = Telemetry(None, meter)
    context = await assemble(
        config,
        connector,
        namespace or CacheNamespace(model="test"),
        tiers,
        clock,
        telemetry,
        lambda reason: engine.degrade(reason),  # noqa: PLW0108 - bound below
        lambda: engine.check_usable(),  # noqa: PLW0108
    )
    engine = CacheEngine(context, config, telemetry, None)
    try:
        yield Inspected(engine, context)
    finally:
        await engine.aclose()
