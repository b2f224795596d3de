"""Any calls in any order, half-way through one another, with faults: the engine against a model."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from akvcache.testing import EngineMachine

SETTINGS = settings(
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)


def test_any_calls_in_any_order() -> None:
    run_state_machine_as_test(EngineMachine, settings=settings(SETTINGS, max_examples=120))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_calls_in_any_order() -> None:
    soak = settings(SETTINGS, max_examples=2000, stateful_step_count=80, derandomize=False, phases=tuple(Phase))
    run_state_machine_as_test(EngineMachine, settings=soak)
