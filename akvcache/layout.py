"""The shape of one token's KV and the bytes of one chunk. Pure arithmetic.

A chunk of ``T`` tokens is one contiguous region, layer outermost, group after group::

    group 0: [num_layers, planes, T, plane_bytes]   group 1: [...]   ...

so that a range of layers is one range of bytes, and a token range of one layer and plane is one run.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from akvcache.errors import ConfigurationError

__all__ = ("DTYPE_BYTES", "PAGE_BYTES", "KVLayout", "LayerGroup", "round_up")

PAGE_BYTES: Final = 4096
"""Alignment of every chunk in memory and on storage: what O_DIRECT asks for."""

DTYPE_BYTES: Final = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that share one shape.

    Attributes:
        num_layers: Layers in this group.
        plane_bytes: Bytes of one token in each plane; K and V are two planes, an MLA latent is one.
        dtype: Name of the element type, one of `DTYPE_BYTES`.
    """

    num_layers: int
    plane_bytes: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ConfigurationError(f"num_layers must be at least 1, got {self.num_layers}")
        if not self.plane_bytes or min(self.plane_bytes) < 1:
            raise ConfigurationError(f"plane_bytes must be positive, got {self.plane_bytes}")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigurationError(f"dtype {self.dtype!r} is not known; use one of {', '.join(DTYPE_BYTES)}")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers and planes of the group."""
        return self.num_layers * sum(self.plane_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """How the bytes of a chunk are arranged; part of every key through `digest`.

    Attributes:
        groups: Layer groups in order.
        block_tokens: Tokens of the engine's allocation unit; a chunk is a whole number of blocks.
        tag: The engine's own name for the inside of a plane ("NHD", "HND", an opaque block format). Two
            layouts of equal sizes and different tags never share bytes.
    """

    groups: tuple[LayerGroup, ...]
    block_tokens: int = 1
    tag: str = "NHD"

    def __post_init__(self) -> None:
        if not self.groups:
            raise ConfigurationError("a layout needs at least one layer group")
        if self.block_tokens < 1:
            raise ConfigurationError(f"block_tokens must be at least 1, got {self.block_tokens}")

    @classmethod
    def mha(
        cls,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str,
        block_tokens: int = 1,
        tag: str = "NHD",
    ) -> KVLayout:
        """Return the layout of plain or grouped-query attention: separate K and V planes."""
        if dtype not in DTYPE_BYTES:
            raise ConfigurationError(f"dtype {dtype!r} is not known; use one of {', '.join(DTYPE_BYTES)}")
        plane = num_kv_heads * head_dim * DTYPE_BYTES[dtype]
        group = LayerGroup(num_layers=num_layers, plane_bytes=(plane, plane), dtype=dtype)
        return cls(groups=(group,), block_tokens=block_tokens, tag=f"{tag}:{num_kv_heads}x{head_dim}")

    @classmethod
    def mla(cls, *, num_layers: int, latent_dim: int, rope_dim: int, dtype: str, block_tokens: int = 1) -> KVLayout:
        """Return the layout of multi-head latent attention: one plane holding latent and rope parts."""
        if dtype not in DTYPE_BYTES:
            raise ConfigurationError(f"dtype {dtype!r} is not known; use one of {', '.join(DTYPE_BYTES)}")
        plane = (latent_dim + rope_dim) * DTYPE_BYTES[dtype]
        group = LayerGroup(num_layers=num_layers, plane_bytes=(plane,), dtype=dtype)
        return cls(groups=(group,), block_tokens=block_tokens, tag=f"MLA:{latent_dim}+{rope_dim}")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over everything."""
        return sum(group.token_bytes for group in self.groups)

    def payload_bytes(self, num_tokens: int) -> int:
        """Return the bytes of a chunk of `num_tokens` tokens, without header or padding."""
        return self.token_bytes * num_tokens

    def part_bytes(self, num_tokens: int) -> tuple[int, ...]:
        """Return the bytes of each group's part of such a chunk, in order."""
        return tuple(group.token_bytes * num_tokens for group in self.groups)

    def run(self, group: int, layer: int, plane: int, num_tokens: int) -> tuple[int, int]:
        """Return the half-open byte range of one layer's plane inside a chunk of `num_tokens` tokens.

        ::

            [ group 0 ........ ][ group 1: layer 0 | layer 1 | ... ]
                                            [ plane 0 | plane 1 ]
                                            ^start    ^stop (of plane 0)
        """
        start = sum(g.token_bytes for g in self.groups[:group]) * num_tokens
        shape = self.groups[group]
        start += layer * sum(shape.plane_bytes) * num_tokens
        start += sum(shape.plane_bytes[:plane]) * num_tokens
        return start, start + shape.plane_bytes[plane] * num_tokens

    @property
    def digest(self) -> bytes:
        """32 bytes that differ whenever the meaning of a chunk's bytes differs."""
        fields = [f"v1|{self.tag}|{self.block_tokens}"]
        fields += [f"{g.num_layers}|{','.join(map(str, g.plane_bytes))}|{g.dtype}" for g in self.groups]
        return hashlib.sha256("\n".join(fields).encode()).digest()
