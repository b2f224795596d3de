"""The fixed workload: a Llama-3-like KV cache cut to 8 layers, in two layouts, all bytes from a fixed seed.

8 layers, 8 KV heads of 128, bfloat16: 32 KiB per token, 8 MiB per chunk of 256 tokens.

Every engine moves tokens with the same NumPy calls, so that a comparison is about engines: `np.copyto` for the flat
layout, `np.take` and fancy assignment of whole blocks for the paged one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

LAYERS = 8
HEADS = 8
HEAD_DIM = 128
ROW_BYTES = HEADS * HEAD_DIM * 2
TOKEN_BYTES = 2 * LAYERS * ROW_BYTES
BLOCK_TOKENS = 16
CHUNK_TOKENS = 256
CHUNK_BYTES = CHUNK_TOKENS * TOKEN_BYTES
VOCABULARY = 128_000


class KV(Protocol):
    """The device side of one prompt."""

    def read(self, start: int, stop: int, out: np.ndarray) -> None:
        """Copy tokens ``[start, stop)`` into `out`: uint8 ``[planes, layers, tokens, row bytes]``."""
        ...

    def write(self, start: int, stop: int, source: np.ndarray) -> None:
        """Copy `source` into tokens ``[start, stop)``; the mirror image of `read`."""
        ...

    def zero(self) -> None:
        """Forget all bytes."""
        ...

    def equals(self, other: KV) -> bool:
        """Return whether every byte is the same."""
        ...


def _memory(shape: tuple[int, ...], seed: int | None) -> np.ndarray:
    """Return zeros or noise in memory as torch allocates it.

    That is on 64 bytes; NumPy's own arrays begin 16 bytes into a page, which halves the speed of a copy into them.
    """
    memory = torch.zeros(shape, dtype=torch.uint8).numpy()
    if seed is None:
        memory.fill(0)  # touches the pages
    else:
        noise = np.random.default_rng(seed).bytes(memory.size)
        np.copyto(memory, np.frombuffer(noise, dtype=np.uint8).reshape(shape))
    return memory


class FlatKV:
    """One array ``[planes, layers, tokens, row bytes]``."""

    def __init__(self, num_tokens: int, seed: int | None = None) -> None:
        shape = (2, LAYERS, num_tokens, ROW_BYTES)
        self.data = _memory(shape, seed)

    def read(self, start: int, stop: int, out: np.ndarray) -> None:
        """See `KV.read`."""
        np.copyto(out, self.data[:, :, start:stop])

    def write(self, start: int, stop: int, source: np.ndarray) -> None:
        """See `KV.write`."""
        np.copyto(self.data[:, :, start:stop], source)

    def zero(self) -> None:
        """See `KV.zero`."""
        self.data.fill(0)

    def equals(self, other: KV) -> bool:
        """See `KV.equals`."""
        return isinstance(other, FlatKV) and np.array_equal(self.data, other.data)


class PagedKV:
    """Per layer (K, V) ``[blocks, block tokens, heads, head dim]`` with a shuffled block table."""

    def __init__(self, num_tokens: int, seed: int | None = None) -> None:
        blocks = num_tokens // BLOCK_TOKENS
        self.block_table = np.random.default_rng(7).permutation(blocks)
        shape = (blocks, BLOCK_TOKENS * ROW_BYTES)
        self.planes = [
            [_memory(shape, None if seed is None else seed + 2 * layer + plane) for plane in (0, 1)]
            for layer in range(LAYERS)
        ]

    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the cache as bfloat16 tensors sharing this memory."""
        shape = (-1, BLOCK_TOKENS, HEADS, HEAD_DIM)
        return [
            (torch.from_numpy(k).view(torch.bfloat16).view(shape), torch.from_numpy(v).view(torch.bfloat16).view(shape))
            for k, v in self.planes
        ]

    def read(self, start: int, stop: int, out: np.ndarray) -> None:
        """See `KV.read`."""
        blocks = self.block_table[start // BLOCK_TOKENS : stop // BLOCK_TOKENS]
        for layer, planes in enumerate(self.planes):
            for plane, data in enumerate(planes):
                np.take(data, blocks, axis=0, out=out[plane, layer].reshape(blocks.size, -1), mode="clip")

    def write(self, start: int, stop: int, source: np.ndarray) -> None:
        """See `KV.write`."""
        blocks = self.block_table[start // BLOCK_TOKENS : stop // BLOCK_TOKENS]
        for layer, planes in enumerate(self.planes):
            for plane, data in enumerate(planes):
                data[blocks] = source[plane, layer].reshape(blocks.size, -1)

    def zero(self) -> None:
        """See `KV.zero`."""
        for planes in self.planes:
            for data in planes:
                data.fill(0)

    def equals(self, other: KV) -> bool:
        """See `KV.equals`."""
        return isinstance(other, PagedKV) and all(
            np.array_equal(mine, theirs)
            for ours, others in zip(self.planes, other.planes, strict=True)
            for mine, theirs in zip(ours, others, strict=True)
        )


class NullKV:
    """Moves nothing: what is left is the control plane."""

    def read(self, start: int, stop: int, out: np.ndarray) -> None:
        """See `KV.read`."""

    def write(self, start: int, stop: int, source: np.ndarray) -> None:
        """See `KV.write`."""

    def zero(self) -> None:
        """See `KV.zero`."""

    def equals(self, other: KV) -> bool:
        """See `KV.equals`."""
        return isinstance(other, NullKV)


LAYOUTS = {"flat": FlatKV, "paged": PagedKV}


def prompt(num_tokens: int, generator: np.random.Generator) -> list[int]:
    """Return random token ids as a list, what most tokenizers give."""
    return generator.integers(0, VOCABULARY, num_tokens).tolist()


def spans(num_tokens: int, chunk_tokens: int = CHUNK_TOKENS) -> Sequence[tuple[int, int]]:
    """Return the token range of each whole chunk."""
    return [(at, at + chunk_tokens) for at in range(0, num_tokens - chunk_tokens + 1, chunk_tokens)]
