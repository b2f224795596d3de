"""Spans and metrics of a test, in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from typing_extensions import override

__all__ = ("Recorder",)


class _Collector(SpanProcessor):
    def __init__(self) -> None:
        self.started = 0
        self.ended: list[ReadableSpan] = []

    @override
    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        self.started += 1

    @override
    def on_end(self, span: ReadableSpan) -> None:
        self.ended.append(span)


class Recorder:
    """A tracer and a meter of their own, no globals.

    Attributes:
        tracer: To give to an engine, and to open spans around its calls.
        meter: To give to an engine.
    """

    def __init__(self) -> None:
        self._collector = _Collector()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(self._collector)
        self._reader = InMemoryMetricReader()
        meters = MeterProvider([self._reader], shutdown_on_exit=False)
        self.tracer = provider.get_tracer("test")
        self.meter = meters.get_meter("test")

    @property
    def open_spans(self) -> int:
        """Spans that were started and have not ended."""
        return self._collector.started - len(self._collector.ended)

    def spans(self, name: str | None = None) -> list[ReadableSpan]:
        """Return ended spans, in the order of their ends."""
        return [span for span in self._collector.ended if name in (None, span.name)]

    def span(self, name: str) -> ReadableSpan:
        """Return the one ended span of this name."""
        [span] = self.spans(name)
        return span

    def attributes(self, name: str) -> dict[str, Any]:
        """Return the attributes of the one ended span of this name."""
        return dict(self.span(name).attributes or {})

    def children(self, parent: ReadableSpan) -> list[ReadableSpan]:
        """Return the ended spans right below `parent`."""
        assert parent.context is not None
        return [
            span for span in self.spans() if span.parent is not None and span.parent.span_id == parent.context.span_id
        ]

    def forget(self) -> None:
        """Drop the spans that have ended."""
        self._collector.started -= len(self._collector.ended)
        self._collector.ended.clear()

    def points(self, name: str) -> list[tuple[Mapping[str, Any], Any]]:
        """Return labels and values of a metric; of a histogram, the number of records."""
        data = self._reader.get_metrics_data()
        found: list[tuple[Mapping[str, Any], Any]] = []
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    if metric.name == name:
                        for point in metric.data.data_points:
                            value = point.count if isinstance(point, HistogramDataPoint) else point.value  # type: ignore[union-attr]
                            found.append((dict(point.attributes or {}), value))
        return found

    def total(self, name: str, **labels: str) -> int:
        """Return the sum of a metric over the points that carry these labels; dots are written as underscores."""
        wanted = {f"akv.{label}": value for label, value in labels.items()}
        return sum(value for attributes, value in self.points(name) if wanted.items() <= attributes.items())

    def snapshot(self) -> dict[str, list[tuple[Mapping[str, Any], Any]]]:
        """Return every metric's points."""
        data = self._reader.get_metrics_data()
        names = {
            metric.name
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }
        return {name: sorted(self.points(name), key=repr) for name in sorted(names)}
