"""A call's arguments, validated and keyed before any I/O."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass, field
from numbers import Real
from typing import Final, cast

from akvcache.errors import UsageError
from akvcache.keys import ChunkRun, KeySchema, RequestScope
from akvcache.results import StopReason
from akvcache.supervision import run_blocking
from akvcache.telemetry import Phase
from akvcache.tokens import Mask, TokenSequence, canonical_tokens, masked_head

__all__ = ("Request", "check_seconds", "check_lease_s", "prepare", "without_keys")

KEYS_ON_LOOP: Final = 1 << 14
"""Prompts up to this many tokens are keyed on the loop (about 0.2 ms); longer ones in a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A validated call.

    Attributes:
        num_tokens: Tokens of the prompt.
        run: Its chunks.
        first: Index of the first chunk behind the mask's head.
        stopped: The gate that is closed, if any.
        keyed: When the prompt was keyed, and how long that took.
        epoch: `Context.epoch` when the call began.
    """

    num_tokens: int
    run: ChunkRun
    first: int = 0
    stopped: StopReason | None = None
    keyed: Phase = field(default_factory=Phase)
    epoch: int = 0

    @property
    def wanted_tokens(self) -> int:
        """Tokens behind the mask's head: what a hit rate is measured against."""
        return self.num_tokens - self.run.tokens_before(self.first)


async def prepare(
    schema: KeySchema, executor: Executor, tokens: TokenSequence, scope: RequestScope, mask: Mask | None
) -> Request:
    """Check tokens, mask and scope, and key the prompt.

    Raises:
        UsageError: One of them is not valid.
    """
    try:
        return await _prepare(schema, executor, tokens, scope, mask)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"tokens, mask or scope cannot be read: {type(error).__name__}: {error}") from error


async def _prepare(
    schema: KeySchema, executor: Executor, tokens: TokenSequence, scope: RequestScope, mask: Mask | None
) -> Request:
    if not isinstance(cast("object", scope), RequestScope):
        raise UsageError(f"scope must be a RequestScope, got {type(scope).__name__}")
    keyed = Phase()
    with keyed.piece():
        if hasattr(tokens, "__len__") and len(tokens) > KEYS_ON_LOOP:
            num_tokens, run = await run_blocking(executor, _key, schema, tokens, scope)
        else:
            num_tokens, run = _key(schema, tokens, scope)
    head = masked_head(mask, num_tokens)
    first = next((index for index, stop in enumerate(run.stops) if stop > head), len(run.keys))
    below = run.tokens_before(first)
    if head not in (below, num_tokens):
        raise UsageError(
            f"mask begins with {head} False, which is not the end of a chunk; the nearest below is {below} "
            f"(chunker {schema.chunker.name})"
        )
    return Request(num_tokens=num_tokens, run=run, first=first, keyed=keyed)


def without_keys(tokens: TokenSequence, mask: Mask | None) -> Request:
    """Check a call to an engine that never opened."""
    num_tokens = len(canonical_tokens(tokens)) // 4
    masked_head(mask, num_tokens)
    return Request(num_tokens=num_tokens, run=ChunkRun((), ()))


def check_seconds(name: str, value: float | None) -> None:
    """Check a deadline or time-out.

    Raises:
        UsageError: It is not a number of seconds, at least 0.
    """
    try:
        valid = value is None or (isinstance(cast("object", value), Real) and float(value) >= 0)
    except OverflowError:
        valid = False
    if not valid:
        raise UsageError(f"{name} must be a number of seconds, at least 0, got {value!r:.60}")


def check_lease_s(value: float | None) -> None:
    """Check the length of a lease.

    Raises:
        UsageError: It is not a positive, finite number of seconds.
    """
    if value is not None and not (isinstance(cast("object", value), Real) and 0 < value < float("inf")):
        raise UsageError(f"lease_s must be a positive number of seconds, got {value!r}")


def _key(schema: KeySchema, tokens: TokenSequence, scope: RequestScope) -> tuple[int, ChunkRun]:
    canonical = canonical_tokens(tokens)
    return len(canonical) // 4, schema.run(canonical, scope)
