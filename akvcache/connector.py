"""The seam to a serving engine: how one chunk leaves and enters its KV memory.

Call order per request: 1. ``check`` on the loop, before any I/O; 2. ``gather`` or ``scatter`` on a copy thread, once
per wave of chunks. The engine never looks inside `kv`.

Three connectors live here: `PagedConnector` for a paged cache addressed by a slot mapping, `TensorConnector` for
per-layer contiguous tensors (the shape of transformers' ``DynamicCache``), both on the CPU, and `NullConnector`,
which moves nothing, for measuring the control plane.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
import torch
from typing_extensions import override

from akvcache.errors import ConfigurationError, UsageError
from akvcache.layout import DTYPE_BYTES, KVLayout

__all__ = (
    "DeviceEvent",
    "KVConnector",
    "NullConnector",
    "PagedConnector",
    "Span",
    "TensorConnector",
    "TensorKV",
)

Span = tuple[int, int]
"""Half-open token range of a chunk inside the prompt."""

KV_contra = TypeVar("KV_contra", contravariant=True)


class DeviceEvent(Protocol):
    """A point in a device stream."""

    def query(self) -> bool:
        """Return whether everything before this point is done. Never blocks; any thread."""
        ...


class KVConnector(Protocol[KV_contra]):
    """Moves chunks between a serving engine's KV and host slots."""

    @property
    def layout(self) -> KVLayout:
        """Arrangement of bytes in a chunk; fixed for the connector's life."""
        ...

    def check(self, kv: KV_contra, num_tokens: int) -> None:
        """Check that `kv` has a place for `num_tokens` tokens.

        Raises:
            UsageError: It has not; the message says what would be right.
        """
        ...

    def gather(self, kv: KV_contra, spans: Sequence[Span], out: Sequence[memoryview]) -> DeviceEvent | None:
        """Copy chunks out of `kv` (device to host). Runs on a copy thread.

        The copy must be ordered after whatever computes the source, on the connector's own side stream.

        Args:
            kv: The engine's KV.
            spans: Token range of each chunk.
            out: One writable payload per chunk, exactly its bytes, laid out as `layout` says.

        Returns:
            None if the bytes are there, else the event after which they are.
        """
        ...

    def scatter(self, kv: KV_contra, spans: Sequence[Span], src: Sequence[memoryview]) -> DeviceEvent | None:
        """Copy chunks into `kv` (host to device); the mirror image of `gather`.

        Only the tokens of `spans` may be written.
        """
        ...


def _bytes_2d(tensor: torch.Tensor, rows: int) -> np.ndarray:
    """Return a contiguous tensor as ``[rows, bytes]`` sharing its memory."""
    raw = tensor.detach().view(rows, -1).view(torch.uint8)
    return raw.numpy()


def _dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ConfigurationError(f"KV dtype {dtype} is not supported; use one of {', '.join(DTYPE_BYTES)}")
    return name


class PagedConnector:
    """A paged KV cache on the CPU, addressed by a slot mapping.

    `kv` of a request is its slot mapping: an int64 tensor with one slot per token, where slot ``s`` is row
    ``s % block_tokens`` of block ``s // block_tokens``. Build it from a block table with `slots`.

    NumPy moves the bytes, not torch: `np.take` and fancy assignment release the GIL and ran 20 times as fast as
    ``index_copy_`` here (docs/reference/benchmarks.md), and torch's thread count stays as the caller set it.
    """

    def __init__(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Wrap a cache.

        Args:
            layers: (K, V) per layer, each ``[num_blocks, block_tokens, num_kv_heads, head_dim]``, contiguous,
                on the CPU, all of one shape and dtype.

        Raises:
            ConfigurationError: A layer differs; the message names it.
        """
        if not layers:
            raise ConfigurationError("a paged cache needs at least one layer")
        shape, dtype = layers[0][0].shape, layers[0][0].dtype
        if len(shape) != 4 or 0 in shape:
            raise ConfigurationError(f"layer 0 has shape {tuple(shape)}, expected [blocks, block_tokens, heads, dim]")
        for index, pair in enumerate(layers):
            for plane in pair:
                if plane.shape != shape or plane.dtype != dtype:
                    raise ConfigurationError(
                        f"layer {index} is {tuple(plane.shape)} of {plane.dtype}, layer 0 is {tuple(shape)} of {dtype}"
                    )
                if plane.device.type != "cpu" or not plane.is_contiguous():
                    raise ConfigurationError(f"layer {index} must be a contiguous CPU tensor, it is on {plane.device}")
        blocks, block_tokens, heads, dim = shape
        self._block_tokens = block_tokens
        self._num_slots = blocks * block_tokens
        self._planes = [(_bytes_2d(k, self._num_slots), _bytes_2d(v, self._num_slots)) for k, v in layers]
        self._layout = KVLayout.mha(
            num_layers=len(layers),
            num_kv_heads=heads,
            head_dim=dim,
            dtype=_dtype_name(dtype),
            block_tokens=block_tokens,
        )

    @property
    def layout(self) -> KVLayout:
        """See `KVConnector.layout`."""
        return self._layout

    def slots(self, block_table: Sequence[int], num_tokens: int) -> torch.Tensor:
        """Return the slot mapping of `num_tokens` tokens that lie in these blocks, in order."""
        table = torch.as_tensor(block_table, dtype=torch.int64)
        offsets = torch.arange(self._block_tokens, dtype=torch.int64)
        return (table[:, None] * self._block_tokens + offsets).reshape(-1)[:num_tokens]

    def check(self, kv: object, num_tokens: int) -> None:
        """See `KVConnector.check`."""
        if not isinstance(kv, torch.Tensor):
            raise UsageError(f"kv must be a slot mapping (see `slots`), got {type(kv).__name__}")
        if kv.dtype != torch.int64 or kv.ndim != 1 or kv.device.type != "cpu":
            raise UsageError(
                "kv must be a one-dimensional int64 slot mapping on the CPU, "
                f"got {kv.dtype} of {tuple(kv.shape)} on {kv.device}"
            )
        if kv.numel() < num_tokens:
            raise UsageError(f"slot mapping has {kv.numel()} slots, the request has {num_tokens} tokens")
        slots = kv.numpy()  # NumPy's minimum: torch would start its threads on the loop for a long prompt
        if slots.size and not 0 <= int(slots.min()) <= int(slots.max()) < self._num_slots:
            raise UsageError(f"slot mapping holds slots outside 0..{self._num_slots - 1}")

    def gather(self, kv: torch.Tensor, spans: Sequence[Span], out: Sequence[memoryview]) -> None:
        """See `KVConnector.gather`."""
        for (start, stop), target in zip(spans, out, strict=True):
            rows, index = self._rows(kv, start, stop)
            for (layer, plane), view in self._views(target, stop - start).items():
                source = self._planes[layer][plane]
                np.take(source.reshape(rows, -1), index, axis=0, out=view.reshape(index.size, -1), mode="clip")

    def scatter(self, kv: torch.Tensor, spans: Sequence[Span], src: Sequence[memoryview]) -> None:
        """See `KVConnector.scatter`."""
        for (start, stop), source in zip(spans, src, strict=True):
            rows, index = self._rows(kv, start, stop)
            for (layer, plane), view in self._views(source, stop - start).items():
                self._planes[layer][plane].reshape(rows, -1)[index] = view.reshape(index.size, -1)

    def _rows(self, kv: torch.Tensor, start: int, stop: int) -> tuple[int, np.ndarray]:
        """Return how many rows a plane has and which ones to move: whole blocks where the slots allow it."""
        slots = kv[start:stop].numpy()
        size = self._block_tokens
        if size > 1 and slots.size % size == 0:
            table = slots.reshape(-1, size)
            if (table[:, 0] % size == 0).all() and (np.diff(table, axis=1) == 1).all():
                return self._num_slots // size, table[:, 0] // size
        return self._num_slots, slots

    def _views(self, payload: memoryview, num_tokens: int) -> dict[tuple[int, int], np.ndarray]:
        flat = np.frombuffer(payload, dtype=np.uint8)
        return {
            (layer, plane): flat[slice(*self._layout.run(0, layer, plane, num_tokens))]
            for layer in range(len(self._planes))
            for plane in (0, 1)
        }


TensorKV = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(K, V) per layer, each ``[1, num_kv_heads, num_tokens, head_dim]`` on the CPU."""


class TensorConnector:
    """Per-layer contiguous tensors, the shape of transformers' ``DynamicCache``, on the CPU.

    `kv` of a request is a `TensorKV` with room for its tokens; a chunk keeps the heads outermost
    (``[heads, tokens, dim]``) so that each head's run is copied whole.
    """

    def __init__(self, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self._heads, self._dim, self._dtype = num_kv_heads, head_dim, dtype
        self._layout = KVLayout.mha(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=_dtype_name(dtype),
            tag="HND",
        )

    @property
    def layout(self) -> KVLayout:
        """See `KVConnector.layout`."""
        return self._layout

    def empty(self, num_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return uninitialised KV with room for `num_tokens` tokens."""
        shape = (1, self._heads, num_tokens, self._dim)
        layers = self._layout.groups[0].num_layers
        return [(torch.empty(shape, dtype=self._dtype), torch.empty(shape, dtype=self._dtype)) for _ in range(layers)]

    def check(self, kv: TensorKV, num_tokens: int) -> None:
        """See `KVConnector.check`."""
        if len(kv) != self._layout.groups[0].num_layers:
            raise UsageError(f"kv has {len(kv)} layers, the layout has {self._layout.groups[0].num_layers}")
        for index, pair in enumerate(kv):
            for tensor in pair:
                shape = tuple(tensor.shape)
                if (*shape[:2], *shape[3:]) != (1, self._heads, self._dim) or tensor.dtype != self._dtype:
                    raise UsageError(
                        f"layer {index} is {shape} of {tensor.dtype}, "
                        f"expected (1, {self._heads}, tokens, {self._dim}) of {self._dtype}"
                    )
                if shape[2] < num_tokens:
                    raise UsageError(f"layer {index} has room for {shape[2]} tokens, the request has {num_tokens}")
                if tensor.device.type != "cpu" or tensor.stride(-1) != 1:
                    raise UsageError(
                        f"layer {index} is on {tensor.device} with strides {tensor.stride()}, "
                        "expected the CPU with the last dimension contiguous"
                    )

    def gather(self, kv: TensorKV, spans: Sequence[Span], out: Sequence[memoryview]) -> None:
        """See `KVConnector.gather`."""
        for span, payload in zip(spans, out, strict=True):
            for tensor, view in self._pairs(kv, span, payload):
                np.copyto(view, tensor)

    def scatter(self, kv: TensorKV, spans: Sequence[Span], src: Sequence[memoryview]) -> None:
        """See `KVConnector.scatter`."""
        for span, payload in zip(spans, src, strict=True):
            for tensor, view in self._pairs(kv, span, payload):
                np.copyto(tensor, view)

    def _pairs(self, kv: TensorKV, span: Span, payload: memoryview) -> list[tuple[np.ndarray, np.ndarray]]:
        start, stop = span
        flat = np.frombuffer(payload, dtype=np.uint8)
        pairs: list[tuple[np.ndarray, np.ndarray]] = []
        for layer, planes in enumerate(kv):
            for plane, tensor in enumerate(planes):
                run = flat[slice(*self._layout.run(0, layer, plane, stop - start))]
                source = tensor.detach()[0, :, start:stop].view(torch.uint8)
                pairs.append((source.numpy(), run.reshape(source.shape)))
        return pairs


class NullConnector:
    """Moves nothing: a layout without a device, for measuring the control plane."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout

    @override
    def __repr__(self) -> str:
        return f"<NullConnector {self._layout.token_bytes} bytes per token>"

    @property
    def layout(self) -> KVLayout:
        """See `KVConnector.layout`."""
        return self._layout

    def check(self, kv: object, num_tokens: int) -> None:
        """See `KVConnector.check`."""

    def gather(self, kv: object, spans: Sequence[Span], out: Sequence[memoryview]) -> None:
        """See `KVConnector.gather`."""

    def scatter(self, kv: object, spans: Sequence[Span], src: Sequence[memoryview]) -> None:
        """See `KVConnector.scatter`."""
