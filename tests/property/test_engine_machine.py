"""Any calls in any order, half-way through one another, with faults: the engine against a model."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from akvcache_nvme import NvmeBackend
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from typing_extensions import override

from akvcache.backend import Backend
from akvcache.testing import EngineMachine

SETTINGS = settings(
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
SOAK = settings(SETTINGS, max_examples=2000, stateful_step_count=80, derandomize=False, phases=tuple(Phase))
SLACK_BYTES = 256 << 10
"""What an NVMe tier needs besides its frames."""


class NvmeMachine(EngineMachine):
    """The same over two directories."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="akv-machine-"))
        super().__init__()

    @override
    def make_backend(self, tier: int, capacity_bytes: int) -> Backend:
        return NvmeBackend(self.root / str(tier), capacity_bytes=capacity_bytes + SLACK_BYTES)

    @override
    def wipe_storage(self, tier: int) -> None:
        shutil.rmtree(self.root / str(tier), ignore_errors=True)

    @override
    def stored_bytes(self, tier: int) -> int:
        found = 0
        for path in (self.root / str(tier)).rglob("*"):
            try:
                found += path.lstat().st_blocks * 512
            except FileNotFoundError:
                continue  # moved while we looked
        return found - SLACK_BYTES

    @override
    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            shutil.rmtree(self.root)


def test_any_calls_in_any_order() -> None:
    run_state_machine_as_test(EngineMachine, settings=settings(SETTINGS, max_examples=120))


def test_any_calls_in_any_order_on_a_file_system() -> None:
    run_state_machine_as_test(NvmeMachine, settings=settings(SETTINGS, max_examples=20))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", [EngineMachine, NvmeMachine])
def test_many_calls_in_any_order(machine: type[EngineMachine]) -> None:
    run_state_machine_as_test(machine, settings=SOAK)
