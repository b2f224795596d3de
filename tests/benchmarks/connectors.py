"""akvcache connectors over the workload's two layouts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from akvcache.connector import KVConnector, NullConnector, PagedConnector, Span
from akvcache.layout import KVLayout

from .workload import BLOCK_TOKENS, HEAD_DIM, HEADS, KV, LAYERS, ROW_BYTES, FlatKV, NullKV, PagedKV


class FlatConnector:
    """`kv` of a request is a `FlatKV`; a chunk is copied in runs of one layer and plane."""

    layout = KVLayout.mha(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype="bfloat16")

    def check(self, kv: FlatKV, num_tokens: int) -> None:
        """See `KVConnector.check`."""

    def gather(self, kv: FlatKV, spans: Sequence[Span], out: Sequence[memoryview]) -> None:
        """See `KVConnector.gather`."""
        for (start, stop), payload in zip(spans, out, strict=True):
            kv.read(start, stop, self._planes_first(payload, stop - start))

    def scatter(self, kv: FlatKV, spans: Sequence[Span], src: Sequence[memoryview]) -> None:
        """See `KVConnector.scatter`."""
        for (start, stop), payload in zip(spans, src, strict=True):
            kv.write(start, stop, self._planes_first(payload, stop - start))

    @staticmethod
    def _planes_first(payload: memoryview, num_tokens: int) -> np.ndarray:
        chunk = np.frombuffer(payload, dtype=np.uint8).reshape(LAYERS, 2, num_tokens, ROW_BYTES)
        return chunk.transpose(1, 0, 2, 3)


class TwoCachesConnector:
    """The product's `PagedConnector`, gathering from one cache and scattering into another of the same shape."""

    def __init__(self, source: PagedKV, destination: PagedKV) -> None:
        self._source = PagedConnector(source.layers())
        self._destination = PagedConnector(destination.layers())
        self.layout = self._source.layout

    def check(self, kv: torch.Tensor, num_tokens: int) -> None:
        """See `KVConnector.check`."""
        self._source.check(kv, num_tokens)

    def gather(self, kv: torch.Tensor, spans: Sequence[Span], out: Sequence[memoryview]) -> None:
        """See `KVConnector.gather`."""
        self._source.gather(kv, spans, out)

    def scatter(self, kv: torch.Tensor, spans: Sequence[Span], src: Sequence[memoryview]) -> None:
        """See `KVConnector.scatter`."""
        self._destination.scatter(kv, spans, src)


def connect(source: KV, destination: KV) -> tuple[KVConnector[object], object, object]:
    """Return a connector for a pair of caches, and the `kv` argument of a store and of a retrieve."""
    if isinstance(source, PagedKV) and isinstance(destination, PagedKV):
        offsets = np.arange(BLOCK_TOKENS)
        slots = torch.from_numpy((source.block_table[:, None] * BLOCK_TOKENS + offsets).reshape(-1))
        return TwoCachesConnector(source, destination), slots, slots
    if isinstance(source, NullKV):
        layout = KVLayout.mha(num_layers=1, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype="bfloat16")
        return NullConnector(layout), None, None
    return FlatConnector(), source, destination
