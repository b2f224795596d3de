"""Phases become one span each, counts never go down, and without an SDK nothing breaks."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.trace import StatusCode

from akvcache.telemetry import Phase, Telemetry, names
from tests.recorder import Recorder


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def telemetry(recorder: Recorder) -> Telemetry:
    return Telemetry(recorder.tracer, recorder.meter)


def test_names_are_unique_and_ours() -> None:
    values = [value for name, value in vars(names).items() if name.isupper()]
    assert len(values) == len(set(values))
    assert all(value.startswith("akv.") for value in values)


class TestPhase:
    def test_pieces_add_up(self) -> None:
        phase = Phase()
        with phase.piece(2, 100):
            pass
        first = phase.first_ns
        with phase.piece(3, 50):
            pass
        assert (phase.chunks, phase.num_bytes) == (5, 150)
        assert 0 < first == phase.first_ns <= phase.last_ns
        assert phase.busy_s >= 0

    def test_a_piece_that_raises_counts_its_time(self) -> None:
        phase = Phase()
        with pytest.raises(ValueError, match="no"), phase.piece(1, 10):
            raise ValueError("no")
        assert phase.last_ns >= phase.first_ns > 0

    def test_one_span_from_the_first_start_to_the_last_end(self, recorder: Recorder, telemetry: Telemetry) -> None:
        phase = Phase()
        with telemetry.request(names.STORE, 10, Phase()):
            for _ in range(3):
                with phase.piece(1, 7):
                    pass
            telemetry.phase(names.STORE, names.D2H, phase)
        span = recorder.span(names.D2H)
        assert (span.start_time, span.end_time) == (phase.first_ns, phase.last_ns)
        assert recorder.attributes(names.D2H) == {
            names.OP: names.STORE,
            names.BUSY_S: phase.busy_s,
            names.CHUNKS: 3,
            names.BYTES: 21,
        }
        assert recorder.children(recorder.span(names.STORE)) == [span]
        assert recorder.total(names.M_PHASE_BYTES, op=names.STORE, phase=names.D2H) == 21
        assert recorder.total(names.M_PHASE_SECONDS, op=names.STORE, phase=names.D2H) == 1

    def test_a_phase_that_never_ran_leaves_nothing(self, recorder: Recorder, telemetry: Telemetry) -> None:
        telemetry.phase(names.STORE, names.D2H, Phase())
        assert recorder.spans() == []
        assert recorder.points(names.M_PHASE_SECONDS) == []

    def test_a_phase_that_still_runs_has_a_span_that_ends_after_it_starts(
        self, recorder: Recorder, telemetry: Telemetry
    ) -> None:
        """A retrieve at its deadline does not wait for the read that was late."""
        phase = Phase()
        with phase.piece(1, 10):
            telemetry.phase(names.RETRIEVE, names.TIER_READ, phase, tier="nvme")
        span = recorder.span(names.TIER_READ)
        assert span.end_time is not None
        assert span.start_time is not None
        assert span.end_time >= span.start_time


class TestRequest:
    def test_the_parent_is_the_callers_span(self, recorder: Recorder, telemetry: Telemetry) -> None:
        with recorder.tracer.start_as_current_span("caller") as caller, telemetry.request(names.LOOKUP, 7, Phase()):
            assert trace.get_current_span() is not caller
        span = recorder.span(names.LOOKUP)
        assert span.parent == caller.get_span_context()
        assert recorder.attributes(names.LOOKUP) == {names.TOKENS_TOTAL: 7}
        assert span.status.status_code is StatusCode.UNSET

    def test_it_begins_with_the_keying(self, recorder: Recorder, telemetry: Telemetry) -> None:
        keyed = Phase()
        with keyed.piece():
            pass
        with telemetry.request(names.LOOKUP, 7, keyed):
            pass
        [keys] = recorder.children(recorder.span(names.LOOKUP))
        assert keys.name == names.KEYS
        assert recorder.span(names.LOOKUP).start_time == keys.start_time == keyed.first_ns

    @pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
    def test_an_exception_ends_it_with_an_error(
        self, recorder: Recorder, telemetry: Telemetry, error: BaseException
    ) -> None:
        with pytest.raises(type(error)), telemetry.request(names.STORE, 1, Phase()):
            raise error
        status = recorder.span(names.STORE).status
        assert (status.status_code, status.description) == (StatusCode.ERROR, type(error).__name__)
        assert recorder.open_spans == 0


class TestCounts:
    def test_an_outcome_is_on_the_span_and_in_the_counters(self, recorder: Recorder, telemetry: Telemetry) -> None:
        with telemetry.request(names.RETRIEVE, 50, Phase()) as span:
            telemetry.finished(names.RETRIEVE, span, "missing", {names.TOKENS_HIT: 32, names.TOKENS_LOADED: 16})
            telemetry.served(names.RETRIEVE, span, {"host": 16, "nvme": 16})
        attributes = recorder.attributes(names.RETRIEVE)
        assert attributes[names.STOPPED] == "missing"
        assert (attributes[names.TOKENS_HIT], attributes[names.TOKENS_LOADED]) == (32, 16)
        assert attributes[f"{names.TOKENS_HIT}.nvme"] == 16
        assert recorder.total(names.M_REQUESTS, op=names.RETRIEVE, stopped="missing") == 1
        assert recorder.total(names.M_TOKENS, outcome=names.TOKENS_HIT) == 32
        assert recorder.total(names.M_TOKENS, outcome="served", tier="host") == 16

    def test_counters_never_go_down(self, recorder: Recorder, telemetry: Telemetry) -> None:
        """OB-08."""
        with telemetry.request(names.LOOKUP, 1, Phase()) as span:
            telemetry.finished(names.LOOKUP, span, None, {names.TOKENS_HIT: -5})
            telemetry.served(names.LOOKUP, span, {"host": -5})
            telemetry.broken_promise(-3)
        assert recorder.total(names.M_TOKENS) == 0
        assert recorder.total(names.M_BROKEN_PROMISES) == 0
        assert recorder.total(names.M_REQUESTS, stopped="none") == 1

    def test_every_instrument(self, recorder: Recorder, telemetry: Telemetry) -> None:
        telemetry.operation("nvme", "read", "ok")
        telemetry.corrupt("nvme")
        telemetry.evicted("host", 0)
        telemetry.evicted("host", 3)
        telemetry.write_dropped("nvme", "queue_full")
        telemetry.write_dropped("nvme", "cleared", 4)
        telemetry.pool({"free": 2, "cached": 3, "in_use": 1})
        telemetry.tier("nvme", 2, 4096)
        assert recorder.points(names.M_TIER_OPERATIONS) == [
            ({names.TIER: "nvme", names.OP: "read", names.OUTCOME: "ok"}, 1)
        ]
        assert recorder.total(names.M_CORRUPT, tier="nvme") == 1
        assert recorder.points(names.M_EVICTED) == [({names.TIER: "host"}, 3)]
        assert recorder.total(names.M_WRITES_DROPPED, tier="nvme") == 5
        assert recorder.total(names.M_POOL_SLOTS, state="cached") == 3
        assert recorder.total(names.M_BREAKER, tier="nvme") == 2
        assert recorder.total(names.M_QUEUE_BYTES, tier="nvme") == 4096


class TestWrites:
    def test_a_background_write_is_a_trace_of_its_own_linked_to_its_cause(
        self, recorder: Recorder, telemetry: Telemetry
    ) -> None:
        with telemetry.request(names.STORE, 1, Phase()) as store:
            telemetry.write_span("nvme", store.get_span_context()).end()
        span = recorder.span(names.TIER_WRITE)
        assert span.parent is None
        assert span.context is not None
        assert span.context.trace_id != store.get_span_context().trace_id
        assert [link.context for link in span.links] == [store.get_span_context()]

    def test_without_tracing_there_is_nothing_to_link(self, recorder: Recorder, telemetry: Telemetry) -> None:
        telemetry.write_span("nvme", trace.INVALID_SPAN_CONTEXT).end()
        assert list(recorder.span(names.TIER_WRITE).links) == []


def test_without_an_sdk_all_of_it_does_nothing() -> None:
    telemetry = Telemetry()
    phase = Phase()
    with telemetry.request(names.STORE, 1, phase) as span, phase.piece(1, 1):
        telemetry.finished(names.STORE, span, "missing", {names.TOKENS_HIT: 1})
    telemetry.phase(names.STORE, names.D2H, phase)
    telemetry.write_span("nvme", span.get_span_context()).end()
    telemetry.pool({"free": 1})
