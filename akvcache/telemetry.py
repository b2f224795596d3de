"""Every span, metric and attribute name, once.

The core uses the OpenTelemetry API only; the application configures the SDK. Spans are per phase and request, never
per chunk: a phase that runs in pieces (reads beside copies) becomes one span from its first start to its last end.
The parent is the caller's current context. Background writes outlive the store and are linked to it instead.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Final

from opentelemetry import metrics, trace
from opentelemetry.metrics import Meter
from opentelemetry.trace import Link, Span, SpanContext, Status, StatusCode, Tracer

__all__ = ("Phase", "Telemetry", "names")


class names:  # noqa: N801 - reads as a namespace: names.LOOKUP
    """Names of spans, attributes and metrics (docs/reference/metrics.md)."""

    LOOKUP: Final = "akv.lookup"
    RETRIEVE: Final = "akv.retrieve"
    STORE: Final = "akv.store"
    PREFETCH: Final = "akv.prefetch"
    PLAN: Final = "akv.plan"
    KEYS: Final = "akv.keys"
    LEASE: Final = "akv.lease"
    D2H: Final = "akv.d2h"
    H2D: Final = "akv.h2d"
    TIER_READ: Final = "akv.tier.read"
    TIER_WRITE: Final = "akv.tier.write"

    TOKENS_TOTAL: Final = "akv.tokens.total"
    TOKENS_REQUESTED: Final = "akv.tokens.requested"
    TOKENS_HIT: Final = "akv.tokens.hit"
    TOKENS_LOADED: Final = "akv.tokens.loaded"
    TOKENS_STORED: Final = "akv.tokens.stored"
    TOKENS_NEW: Final = "akv.tokens.new"
    STOPPED: Final = "akv.stopped"
    TIER: Final = "akv.tier"
    OP: Final = "akv.op"
    PHASE: Final = "akv.phase"
    OUTCOME: Final = "akv.outcome"
    STATE: Final = "akv.state"
    BYTES: Final = "akv.bytes"
    CHUNKS: Final = "akv.chunks"
    BUSY_S: Final = "akv.busy_s"

    M_REQUESTS: Final = "akv.requests"
    M_TOKENS: Final = "akv.tokens"
    M_BROKEN_PROMISES: Final = "akv.tokens.promised_not_delivered"
    M_PHASE_BYTES: Final = "akv.phase.bytes"
    M_PHASE_SECONDS: Final = "akv.phase.seconds"
    M_TIER_OPERATIONS: Final = "akv.tier.operations"
    M_CORRUPT: Final = "akv.chunks.corrupt"
    M_EVICTED: Final = "akv.chunks.evicted"
    M_WRITES_DROPPED: Final = "akv.writes.dropped"
    M_POOL_SLOTS: Final = "akv.pool.slots"
    M_QUEUE_BYTES: Final = "akv.writes.queued_bytes"
    M_BREAKER: Final = "akv.tier.breaker"


class Phase:
    """Accumulates one phase of one request over its pieces."""

    __slots__ = ("busy_s", "chunks", "first_ns", "last_ns", "num_bytes", "running")

    def __init__(self) -> None:
        self.first_ns = 0
        self.last_ns = 0
        self.busy_s = 0.0
        self.chunks = 0
        self.num_bytes = 0
        self.running = 0

    @contextmanager
    def piece(self, chunks: int = 0, num_bytes: int = 0) -> Generator[None]:
        """Time one piece."""
        start = time.time_ns()
        self.first_ns = self.first_ns or start
        began = time.perf_counter()
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self.busy_s += time.perf_counter() - began
            self.last_ns = time.time_ns()
            self.chunks += chunks
            self.num_bytes += num_bytes


class Telemetry:
    """Instruments of one engine.

    Args:
        tracer: Where spans go; None is the global provider's.
        meter: Where metrics go; None is the global provider's.
    """

    def __init__(self, tracer: Tracer | None = None, meter: Meter | None = None) -> None:
        self._tracer = tracer or trace.get_tracer("akvcache")
        self._meter = meter or metrics.get_meter("akvcache")
        counter = self._meter.create_counter
        self._requests = counter(names.M_REQUESTS, unit="{request}", description="Calls by operation and stop reason")
        self._tokens = counter(names.M_TOKENS, unit="{token}", description="Tokens by operation and outcome")
        self._broken = counter(
            names.M_BROKEN_PROMISES, unit="{token}", description="Tokens that a retrieve planned and did not deliver"
        )
        self._bytes = counter(names.M_PHASE_BYTES, unit="By", description="Bytes moved by phase and tier")
        self._seconds = self._meter.create_histogram(
            names.M_PHASE_SECONDS, unit="s", description="Busy time of a phase in one request, by phase and tier"
        )
        self._operations = counter(names.M_TIER_OPERATIONS, unit="{operation}", description="Tier calls by outcome")
        self._corrupt = counter(names.M_CORRUPT, unit="{chunk}", description="Chunks that did not verify")
        self._evicted = counter(names.M_EVICTED, unit="{chunk}", description="Chunks evicted from host memory")
        gauge = self._meter.create_gauge
        self._slots = gauge(names.M_POOL_SLOTS, unit="{slot}", description="Host slots by state")
        self._queued = gauge(names.M_QUEUE_BYTES, unit="By", description="Bytes queued for writing by tier")
        self._breaker = gauge(names.M_BREAKER, unit="1", description="Breaker: 0 closed, 1 half-open, 2 open")
        self._dropped = counter(
            names.M_WRITES_DROPPED, unit="{chunk}", description="Writes given up by tier and reason"
        )

    @contextmanager
    def request(self, name: str, total_tokens: int, keyed: Phase) -> Generator[Span]:
        """Open the span of one call under the caller's current context; it begins with the keying of the prompt."""
        with self._tracer.start_as_current_span(
            name, start_time=keyed.first_ns or None, record_exception=False, set_status_on_exception=False
        ) as span:
            span.set_attribute(names.TOKENS_TOTAL, total_tokens)
            self.phase(name, names.KEYS, keyed)
            try:
                yield span
            except BaseException as error:
                span.set_status(Status(StatusCode.ERROR, type(error).__name__))
                raise

    def phase(self, op: str, phase: str, done: Phase, *, tier: str = "") -> None:
        """Emit the span and metrics of a phase under the current span; nothing if it never ran.

        The span of a phase that the call no longer waits for, such as a late read, ends here.
        """
        if not done.first_ns:
            return
        attributes: dict[str, str | int | float] = {names.OP: op}
        if tier:
            attributes[names.TIER] = tier
        labels = {**attributes, names.PHASE: phase}
        self._seconds.record(done.busy_s, labels)
        if done.num_bytes:
            self._bytes.add(done.num_bytes, labels)
        attributes.update({names.BUSY_S: done.busy_s, names.CHUNKS: done.chunks, names.BYTES: done.num_bytes})
        span = self._tracer.start_span(phase, start_time=done.first_ns, attributes=attributes)
        span.end(end_time=time.time_ns() if done.running else done.last_ns)

    def written(self, tier: str, done: Phase) -> None:
        """Count the background writes of one store to one tier."""
        labels = {names.OP: names.STORE, names.PHASE: names.TIER_WRITE, names.TIER: tier}
        self._seconds.record(done.busy_s, labels)
        self._bytes.add(done.num_bytes, labels)

    def finished(self, op: str, span: Span, stopped: str | None, tokens: Mapping[str, int]) -> None:
        """Put the outcome of a call on its span and into the counters.

        Args:
            op: Span name of the call.
            span: Its span.
            stopped: The stop reason, or None.
            tokens: Token counts by attribute name; negative ones count as 0.
        """
        self._requests.add(1, {names.OP: op, names.STOPPED: stopped or "none"})
        if stopped:
            span.set_attribute(names.STOPPED, stopped)
        for name, count in tokens.items():
            span.set_attribute(name, count)
            self._tokens.add(max(0, count), {names.OP: op, names.OUTCOME: name})

    def served(self, op: str, span: Span, by_tier: Mapping[str, int]) -> None:
        """Count tokens by the tier that serves them."""
        for tier, count in by_tier.items():
            span.set_attribute(f"{names.TOKENS_HIT}.{tier}", count)
            self._tokens.add(max(0, count), {names.OP: op, names.OUTCOME: "served", names.TIER: tier})

    def broken_promise(self, num_tokens: int) -> None:
        """Count tokens that were planned and not delivered."""
        self._broken.add(max(0, num_tokens))

    def operation(self, tier: str, op: str, outcome: str) -> None:
        """Count one call to a tier."""
        self._operations.add(1, {names.TIER: tier, names.OP: op, names.OUTCOME: outcome})

    def corrupt(self, tier: str) -> None:
        """Count one chunk that did not verify."""
        self._corrupt.add(1, {names.TIER: tier})

    def evicted(self, tier: str, count: int) -> None:
        """Count chunks that left a tier to make room."""
        if count:
            self._evicted.add(count, {names.TIER: tier})

    def write_dropped(self, tier: str, reason: str, count: int = 1) -> None:
        """Count writes that were given up."""
        self._dropped.add(count, {names.TIER: tier, names.OUTCOME: reason})

    def write_span(self, tier: str, cause: SpanContext) -> Span:
        """Start the span of the background writes of one store to one tier, linked to the store."""
        links = [Link(cause)] if cause.is_valid else []
        return self._tracer.start_span(names.TIER_WRITE, context=_ROOT, links=links, attributes={names.TIER: tier})

    def pool(self, slots: Mapping[str, int]) -> None:
        """Set the gauge of host slots by state."""
        for state, count in slots.items():
            self._slots.set(count, {names.STATE: state})

    def tier(self, tier: str, breaker: int, queued_bytes: int) -> None:
        """Set the gauges of one tier."""
        self._breaker.set(breaker, {names.TIER: tier})
        self._queued.set(queued_bytes, {names.TIER: tier})


_ROOT: Final = trace.set_span_in_context(trace.INVALID_SPAN)
