"""What `lookup`, `retrieve`, `store` and `prefetch` answer."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from akvcache.host import HostLease

__all__ = (
    "NO_TIERS",
    "ClearResult",
    "DurableResult",
    "FlushResult",
    "Health",
    "LookupResult",
    "PrefetchResult",
    "RetrieveResult",
    "StopReason",
    "StoreResult",
    "TierHealth",
)

NO_TIERS: Mapping[str, int] = MappingProxyType({})


class StopReason(enum.StrEnum):
    """Why an answer is shorter than what was asked for. Caller, span and metric carry the same one."""

    MEMORY_PRESSURE = "memory_pressure"
    """No host slot became free in time."""
    DEADLINE = "deadline"
    """The caller's deadline passed."""
    MISSING = "missing"
    """The next chunk is in no tier (any more)."""
    CORRUPT = "corrupt"
    """A stored chunk did not verify; it was dropped."""
    BACKEND_ERROR = "backend_error"
    """A tier failed."""
    TRANSFER_ERROR = "transfer_error"
    """The copy between device and host failed."""
    CAPACITY = "capacity"
    """A lower tier had no room."""
    UNHEALTHY = "unhealthy"
    """The engine failed to open or found an invariant broken."""
    PASSIVE = "passive"
    """This rank leaves the cache to another one."""
    FROZEN = "frozen"
    """The engine is frozen: nothing is stored."""
    TOO_SHORT = "too_short"
    """Fewer tokens than one chunk, or than `EngineConfig.min_tokens`."""
    CLEARED = "cleared"
    """`clear` or a weights change happened meanwhile."""
    CLOSED = "closed"
    """The engine closed before a write began; on the write's span and metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupResult:
    """The longest cached prefix.

    Attributes:
        hit_tokens: Tokens of the prefix that are cached, from token 0.
        by_tier: Tier name to tokens it would serve; sums to `hit_tokens`.
        lease: Protects those chunks from eviction until released or expired; None if none was asked for
            or a gate is closed.
        stopped: Why the prefix ends; None if every chunk is cached.
    """

    hit_tokens: int
    by_tier: Mapping[str, int] = field(default_factory=lambda: NO_TIERS)
    lease: HostLease | None = None
    stopped: StopReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrieveResult:
    """What now lies in the caller's KV.

    Attributes:
        mask: ``torch.bool``, one per token, True exactly where bytes now lie in `kv`; one contiguous run. After
            `TRANSFER_ERROR` a failed copy may have touched tokens behind that run, never before it.
        hit_tokens: Tokens that were cached when the request was planned: the contiguous run of chunks that begins
            behind the mask's head (at token 0 without a mask). Less `loaded_tokens`, it is what was promised and
            not delivered.
        loaded_tokens: Trues in `mask`.
        by_tier: Tier name to tokens loaded from it; sums to `loaded_tokens`.
        stopped: Why it is shorter than the prompt's whole chunks; None if all were loaded.
    """

    mask: torch.Tensor
    hit_tokens: int
    loaded_tokens: int
    by_tier: Mapping[str, int] = field(default_factory=lambda: NO_TIERS)
    stopped: StopReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableResult:
    """How much of a store the lower tiers now hold.

    Attributes:
        durable_tokens: Tokens of the prefix, from token 0, that some persistent tier holds.
        stopped: Why it is shorter than what was stored; None if all of it is there.
    """

    durable_tokens: int
    stopped: StopReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreResult:
    """What was kept.

    Attributes:
        total_tokens: Tokens of the prompt.
        stored_tokens: Longest prefix, from token 0, that is now cached in some tier.
        new_tokens: Tokens copied from `kv` by this call.
        existing_tokens: Tokens of chunks, after the mask's head, that were cached already.
        stopped: Why not all whole chunks behind the mask's head are kept; None if they are. `stored_tokens` is less
            all the same where a chunk of the head is not cached.
    """

    total_tokens: int
    stored_tokens: int
    new_tokens: int
    existing_tokens: int
    stopped: StopReason | None = None
    _durable: Callable[[float | None], Awaitable[DurableResult]] | None = field(default=None, repr=False, compare=False)

    async def durable(self, timeout_s: float | None = None) -> DurableResult:
        """Wait until the lower tiers have taken or refused everything this store handed over.

        Args:
            timeout_s: Longest wait in seconds; ``store_deadline_s`` by default.

        Cancellation:
            The writes go on; only this wait ends.
        """
        if self._durable is None:
            return DurableResult(durable_tokens=0, stopped=self.stopped)
        return await self._durable(timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchResult:
    """How much of a prefix is in host memory now.

    Attributes:
        hit_tokens: Tokens of the prefix cached when planned.
        ready_tokens: Tokens of the prefix, from token 0, in host memory when this returned.
        stopped: Why it is shorter than the prompt's whole chunks; None if all are ready.
    """

    hit_tokens: int
    ready_tokens: int
    stopped: StopReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushResult:
    """Chunks whose writes had not ended when `flush` returned."""

    pending_chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearResult:
    """Chunks dropped from host memory, and the tiers that could not be emptied; those are out of use now."""

    dropped_chunks: int
    failed_tiers: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierHealth:
    """State of one lower tier: `inactive` says why it is out of use for good, `breaker` whether it is for now."""

    inactive: str | None
    breaker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """State of an engine: `degraded` says why it answers as an empty cache, if it does."""

    degraded: str | None
    tiers: Mapping[str, TierHealth]
