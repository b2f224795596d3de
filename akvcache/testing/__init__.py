"""Test kit for akvcache and for whoever writes a backend or a connector; needs ``akvcache[testing]``."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("akvcache.testing.contract", "akvcache.testing.capacity")

from akvcache.testing.capacity import CapacityContract  # noqa: E402
from akvcache.testing.clock import VirtualClock  # noqa: E402
from akvcache.testing.contract import BackendContract  # noqa: E402
from akvcache.testing.device import (  # noqa: E402
    CopyFault,
    FakeDevice,
    FakeDeviceConnector,
    FakeEvent,
    FakeStream,
    Stepping,
)
from akvcache.testing.faulty import Fault, FaultKind, FaultyBackend, Op, Stop  # noqa: E402
from akvcache.testing.frames import (  # noqa: E402
    aligned_buffer,
    make_frame,
    make_keys,
    make_namespace_id,
    make_payload,
)
from akvcache.testing.inspection import Inspected, open_inspected  # noqa: E402
from akvcache.testing.loop import JumpingLoop  # noqa: E402
from akvcache.testing.machine import EngineMachine  # noqa: E402
from akvcache.testing.memory import MemoryBackend, MemoryStore  # noqa: E402
from akvcache.testing.regions import RegionKV, make_rows  # noqa: E402

__all__ = (
    "BackendContract",
    "CapacityContract",
    "CopyFault",
    "EngineMachine",
    "FakeDevice",
    "FakeDeviceConnector",
    "FakeEvent",
    "FakeStream",
    "Fault",
    "FaultKind",
    "FaultyBackend",
    "Inspected",
    "JumpingLoop",
    "MemoryBackend",
    "MemoryStore",
    "Op",
    "RegionKV",
    "Stepping",
    "Stop",
    "VirtualClock",
    "aligned_buffer",
    "make_frame",
    "make_keys",
    "make_namespace_id",
    "make_payload",
    "make_rows",
    "open_inspected",
)
