"""The pool on a CUDA device: pinned once, copied asynchronously, awaited by event."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from akvcache.buffers import HostPool
from akvcache.layout import KVLayout
from akvcache.transfer import Transfer

pytestmark = pytest.mark.gpu
ROW = 1 << 20


class _CudaRows:
    """Chunk i is row i of a device tensor; copies run on a side stream."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows
        self._stream = torch.cuda.Stream()
        self.layout = KVLayout.mha(num_layers=1, num_kv_heads=1, head_dim=ROW // 2, dtype="uint8")

    def check(self, kv: object, num_tokens: int) -> None:
        """Accept anything."""

    def gather(self, kv: object, spans: Sequence[tuple[int, int]], out: Sequence[memoryview]) -> torch.cuda.Event:
        self._stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(self._stream):
            for (start, _), target in zip(spans, out, strict=True):
                torch.frombuffer(target, dtype=torch.uint8).copy_(self._rows[start], non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return event

    def scatter(self, kv: object, spans: Sequence[tuple[int, int]], src: Sequence[memoryview]) -> torch.cuda.Event:
        with torch.cuda.stream(self._stream):
            for (start, _), source in zip(spans, src, strict=True):
                self._rows[start].copy_(torch.frombuffer(source, dtype=torch.uint8), non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        torch.cuda.default_stream().wait_event(event)
        return event


@pytest.mark.asyncio
async def test_pinned_slots_carry_bytes_both_ways() -> None:
    pool = HostPool(num_slots=8, slot_bytes=ROW)
    assert pool.arena.pin()
    rows = torch.randint(0, 255, (8, ROW), dtype=torch.uint8, device="cuda")
    before = rows.clone()
    executor = ThreadPoolExecutor(1, thread_name_prefix="akv-copy")
    transfer = Transfer(_CudaRows(rows), executor)
    lease = pool.try_lease(8)
    assert lease is not None
    frames = [slot.frame for slot in lease.slots]
    spans = [(index, index + 1) for index in range(8)]
    await transfer.gather(None, spans, frames)
    rows.zero_()
    await transfer.scatter(None, spans, frames)
    torch.cuda.synchronize()
    assert torch.equal(rows, before)
    lease.release()
    transfer.close()
    executor.shutdown()
    pool.close()
