"""Collects the spans of one process and puts them into a form that crosses to another one."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Tracer
from typing_extensions import override

__all__ = ("Value", "SpanCollector", "SpanRecord", "SystemIdGenerator")

_SYSTEM: Final = random.SystemRandom()
Value = str | int | float | bool


class SystemIdGenerator(IdGenerator):
    """Ids from the system's random source.

    The default generator draws from Python's `random`, which model libraries seed: two processes then hand out the
    same trace ids, and a back end merges their traces.
    """

    @override
    def generate_span_id(self) -> int:
        return _SYSTEM.randrange(1, 1 << 64)

    @override
    def generate_trace_id(self) -> int:
        return _SYSTEM.randrange(1, 1 << 128)

    @override
    def is_trace_id_random(self) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRecord:
    """One finished span.

    Attributes:
        name: What ran.
        trace_id: Hexadecimal.
        span_id: Hexadecimal.
        parent_id: The span it ran in; None for a root.
        links: Spans that caused it without containing it.
        start_s: Seconds since the epoch.
        duration_s: How long it took.
        attributes: Its attributes.
    """

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    links: list[str]
    start_s: float
    duration_s: float
    attributes: dict[str, Value]


class SpanCollector:
    """A tracer whose finished spans stay in memory."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._provider = TracerProvider(id_generator=SystemIdGenerator(), shutdown_on_exit=False)
        self._provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    @property
    def tracer(self) -> Tracer:
        """Give this to the engine."""
        return self._provider.get_tracer("akvcache.demo")

    def records(self) -> list[SpanRecord]:
        """Return the spans finished so far, in the order they started."""
        return sorted(map(_record, self._exporter.get_finished_spans()), key=lambda span: span.start_s)


def _record(span: ReadableSpan) -> SpanRecord:
    context = span.get_span_context()
    assert context is not None
    start, end = span.start_time or 0, span.end_time or 0
    attributes = {name: value for name, value in (span.attributes or {}).items() if isinstance(value, Value)}
    return SpanRecord(
        name=span.name,
        trace_id=f"{context.trace_id:032x}",
        span_id=f"{context.span_id:016x}",
        parent_id=f"{span.parent.span_id:016x}" if span.parent else None,
        links=[f"{link.context.span_id:016x}" for link in span.links],
        start_s=start / 1e9,
        duration_s=(end - start) / 1e9,
        attributes=attributes,
    )
