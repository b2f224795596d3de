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
from akvcache.testing.memory import MemoryBackend, MemoryStore  # noqa: E402

__all__ = (
    "BackendContract",
    "CapacityContract",
    "CopyFault",
    "FakeDevice",
    "FakeDeviceConnector",
    "FakeEvent",
    "FakeStream",
    "Fault",
    "FaultKind",
    "FaultyBackend",
    "MemoryBackend",
    "MemoryStore",
    "Op",
    "Stepping",
    "Stop",
    "VirtualClock",
    "aligned_buffer",
    "make_frame",
    "make_keys",
    "make_namespace_id",
    "make_payload",
)
