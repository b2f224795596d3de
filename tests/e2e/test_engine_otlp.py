"""What a collector receives over OTLP/HTTP, and that one that does not answer costs nothing."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from typing_extensions import override

from akvcache import CacheEngine
from akvcache.telemetry import names
from akvcache.testing import MemoryBackend, MemoryStore
from tests.support import CHUNK, MODEL, PagedKV, config_for

T = CHUNK


class Collector:
    """An OTLP/HTTP receiver on a port of its own.

    Attributes:
        bodies: The requests it got, as bytes.
    """

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                bodies.append(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            @override
            def log_message(self, *_args: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(5.0)
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    receiver = Collector()
    yield receiver
    receiver.close()


@pytest.mark.asyncio
async def test_a_collector_receives_valid_spans(collector: Collector) -> None:
    exporters = pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    provider = TracerProvider(resource=Resource.create({"service.name": "test"}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporters.OTLPSpanExporter(endpoint=collector.endpoint)))
    tracer = provider.get_tracer("akvcache")
    kv = PagedKV(6 * T)
    async with CacheEngine.open(
        config_for(kv, 4),
        connector=kv.connector,
        namespace=MODEL,
        tiers=[MemoryBackend(MemoryStore())],
        tracer=tracer,
    ) as engine:
        with tracer.start_as_current_span("request"):
            await engine.store(kv.tokens, kv.slots)
            await engine.flush()
            await engine.retrieve(kv.tokens, kv.slots)
            await engine.lookup(kv.tokens[:3])
    await asyncio.to_thread(provider.force_flush)
    await asyncio.to_thread(provider.shutdown)

    spans = []
    for body in collector.bodies:
        message = messages.ExportTraceServiceRequest()
        message.ParseFromString(body)
        for resource in message.resource_spans:
            assert {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"] == "test"
            spans += [span for scope in resource.scope_spans for span in scope.spans]
    by_name = {span.name: span for span in spans}
    assert set(by_name) == {
        "request",
        names.STORE,
        names.RETRIEVE,
        names.LOOKUP,
        names.KEYS,
        names.LEASE,
        names.D2H,
        names.PLAN,
        names.TIER_READ,
        names.H2D,
        names.TIER_WRITE,
    }
    for span in spans:
        assert len(span.trace_id) == 16
        assert len(span.span_id) == 8
        assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
    root = by_name["request"]
    for name in (names.STORE, names.RETRIEVE, names.LOOKUP):
        assert by_name[name].parent_span_id == root.span_id
        assert by_name[name].trace_id == root.trace_id
    assert by_name[names.D2H].parent_span_id == by_name[names.STORE].span_id
    assert by_name[names.TIER_READ].parent_span_id == by_name[names.RETRIEVE].span_id
    write = by_name[names.TIER_WRITE]
    assert write.parent_span_id == b""
    assert write.trace_id != root.trace_id
    assert [link.span_id for link in write.links] == [by_name[names.STORE].span_id]
    retrieve = {a.key: a.value for a in by_name[names.RETRIEVE].attributes}
    assert retrieve[names.TOKENS_LOADED].int_value == 6 * T
    lookup = {a.key: a.value for a in by_name[names.LOOKUP].attributes}
    assert lookup[names.STOPPED].string_value == "too_short"


class Stuck(SpanExporter):
    """An exporter whose collector does not answer."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.answer = threading.Event()

    @override
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.answer.wait(30.0)
        return SpanExportResult.SUCCESS


@pytest.mark.asyncio
async def test_a_collector_that_does_not_answer_delays_nothing() -> None:
    """OB-06: neither the calls nor closing wait for it; the provider is the application's to shut down."""
    exporter = Stuck()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(
        BatchSpanProcessor(exporter, schedule_delay_millis=1, max_queue_size=64, max_export_batch_size=8)
    )
    kv = PagedKV(100 * T)
    loop = asyncio.get_running_loop()
    start = loop.time()
    async with CacheEngine.open(
        config_for(kv, 128),
        connector=kv.connector,
        namespace=MODEL,
        tiers=[MemoryBackend()],
        tracer=provider.get_tracer("akvcache"),
    ) as engine:
        for i in range(100):
            assert (await engine.store(*kv.part(i, i + 1))).stored_tokens == T
        assert await asyncio.to_thread(exporter.asked.wait, 5.0)
    assert loop.time() - start < 10.0
    exporter.answer.set()
    await asyncio.to_thread(provider.shutdown)
