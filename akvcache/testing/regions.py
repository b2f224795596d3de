"""A small paged KV cache whose bytes a test chooses and compares."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from akvcache.connector import PagedConnector

__all__ = ("RegionKV", "make_rows")

_PLANE_BYTES = 8


def make_rows(label: str, num_tokens: int, token_bytes: int) -> np.ndarray:
    """Return ``[num_tokens, token_bytes]`` bytes that depend on `label` only."""
    raw = hashlib.shake_128(label.encode()).digest(num_tokens * token_bytes)
    return np.frombuffer(raw, dtype=np.uint8).reshape(num_tokens, token_bytes)


class RegionKV:
    """A paged cache on the CPU, cut in regions of which each serves one request.

    The blocks of all regions are interleaved, so a copy that strays by one block lands in another region.

    Attributes:
        connector: Moves its chunks.
        num_regions: How many requests it serves at once.
        region_tokens: Tokens per region.
        token_bytes: Bytes of one token over all layers.
    """

    def __init__(
        self, *, num_regions: int = 4, region_tokens: int = 64, num_layers: int = 2, block_tokens: int = 4
    ) -> None:
        shape = (num_regions * region_tokens // block_tokens, block_tokens, 1, _PLANE_BYTES)
        layers = [
            (torch.zeros(shape, dtype=torch.uint8), torch.zeros(shape, dtype=torch.uint8)) for _ in range(num_layers)
        ]
        self.connector = PagedConnector(layers)
        self.num_regions = num_regions
        self.region_tokens = region_tokens
        self.token_bytes = self.connector.layout.token_bytes
        self._blocks = region_tokens // block_tokens
        self._planes = [plane.view(-1, _PLANE_BYTES).numpy() for pair in layers for plane in pair]

    def __repr__(self) -> str:
        return f"<RegionKV {self.num_regions} regions of {self.region_tokens} tokens, {self.token_bytes} bytes each>"

    def slots(self, region: int, num_tokens: int | None = None) -> torch.Tensor:
        """Return the slot mapping of a region, or of its first tokens: what an engine call takes as `kv`."""
        table = [region + block * self.num_regions for block in range(self._blocks)]
        return self.connector.slots(table, self.region_tokens if num_tokens is None else num_tokens)

    def write(self, region: int, rows: np.ndarray) -> None:
        """Set the first tokens of a region to ``rows[tokens, token_bytes]``."""
        slots = self.slots(region, len(rows)).numpy()
        for plane, part in zip(self._planes, np.split(rows, len(self._planes), axis=1), strict=True):
            plane[slots] = part

    def read(self, region: int) -> np.ndarray:
        """Return a copy of a region, ``[region_tokens, token_bytes]``."""
        slots = self.slots(region).numpy()
        return np.concatenate([plane[slots] for plane in self._planes], axis=1)

    def payload(self, rows: np.ndarray) -> bytes:
        """Return the chunk payload in which tokens with these rows travel."""
        return b"".join(part.tobytes() for part in np.split(rows, len(self._planes), axis=1))
