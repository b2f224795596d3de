"""What many tests need: a small paged KV cache with known bytes, and an engine over it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from akvcache import CacheEngine, CacheNamespace, EngineConfig, PagedConnector
from akvcache.backend import Backend
from akvcache.frame import frame_bytes
from akvcache.keys import depth_of
from akvcache.testing import MemoryStore

__all__ = ("CHUNK", "MODEL", "PagedKV", "config_for", "depths", "head_mask", "open_engine")

CHUNK = 16
MODEL = CacheNamespace(model="test-model")


class PagedKV:
    """A paged cache on the CPU whose blocks are handed out in a shuffled order.

    Args:
        num_tokens: Tokens of the one prompt it holds.
        seed: Seed of bytes and block order.
    """

    def __init__(
        self, num_tokens: int, *, seed: int = 0, num_layers: int = 2, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        blocks = -(-num_tokens // 4) + 3
        shape = (blocks, 4, 2, 8)
        self.layers = [
            (torch.randn(shape, generator=generator).to(dtype), torch.randn(shape, generator=generator).to(dtype))
            for _ in range(num_layers)
        ]
        self.connector = PagedConnector(self.layers)
        order = torch.randperm(blocks, generator=generator).tolist()
        self.slots = self.connector.slots(order, num_tokens)
        self.tokens = torch.randint(0, 50_000, (num_tokens,), generator=generator).tolist()

    def rows(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return a copy of the KV of a token range, ``[layers * 2, tokens, bytes]``."""
        slots = self.slots[start:stop]
        planes = [plane.view(-1, 16)[slots] for pair in self.layers for plane in pair]
        return torch.stack(planes).view(torch.uint8).clone()

    def part(self, start: int, stop: int) -> tuple[list[int], torch.Tensor]:
        """Return tokens and slots of a range of chunks, as a prompt of its own."""
        return self.tokens[start * CHUNK : stop * CHUNK], self.slots[start * CHUNK : stop * CHUNK]

    def wipe(self) -> None:
        """Overwrite all bytes."""
        for pair in self.layers:
            for plane in pair:
                plane.fill_(-1)


def config_for(kv: PagedKV, num_slots: int, **options: object) -> EngineConfig:
    """Return a strict configuration whose host pool holds `num_slots` chunks."""
    slot = frame_bytes(kv.connector.layout.payload_bytes(CHUNK))
    values: dict[str, object] = {
        "chunk_tokens": CHUNK,
        "host_bytes": num_slots * slot,
        "memory_wait_s": 0.2,
        "prefault": False,
        "strict": True,
    }
    return EngineConfig.from_mapping({**values, **options})


def open_engine(kv: PagedKV, num_slots: int = 32, tiers: Sequence[Backend] = (), **options: object):
    """Return the context manager of an engine over `kv`."""
    config = config_for(kv, num_slots, **options)
    return CacheEngine.open(config, connector=kv.connector, namespace=MODEL, tiers=list(tiers))


def head_mask(num_head: int, num_tokens: int) -> list[bool]:
    """Return a mask that excludes the first `num_head` tokens."""
    return [False] * num_head + [True] * (num_tokens - num_head)


def depths(store: MemoryStore) -> list[int]:
    """Return the positions of the chunks in a store, ascending."""
    return sorted(depth_of(key) for key in store.frames)
