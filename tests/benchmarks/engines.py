"""What `side_by_side.py` asks of an engine, and `Ideal`: the floor, the same work with no engine around it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from .memory import huge_buffer
from .workload import CHUNK_BYTES, CHUNK_TOKENS, KV, LAYERS, ROW_BYTES

CHUNK_SHAPE = (2, LAYERS, CHUNK_TOKENS, ROW_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What one engine is built for.

    Attributes:
        tier: "cpu", "disk", or "control": host memory with chunks of one layer, 1 MiB, that nobody copies.
        directory: Its own directory for the disk tier.
        direct: Whether the disk is used with O_DIRECT.
        num_tokens: Longest prompt.
        kv: The destination; a connector that must know the cache beforehand is built on it.
        source: The source, likewise.
    """

    tier: str
    directory: Path
    direct: bool
    num_tokens: int
    kv: KV
    source: KV

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return 1 if self.tier == "control" else LAYERS

    @property
    def size(self) -> int:
        """Bytes of the longest prompt."""
        return self.num_tokens * 2 * self.layers * ROW_BYTES


class Engine(Protocol):
    """One engine under test. The steps of a round come in this order."""

    def warm(self) -> None:
        """Touch whatever is allocated once."""
        ...

    def store(self, tokens: Sequence[int], kv: KV) -> None:
        """Hand over a prompt; returns when `kv` may be reused."""
        ...

    def persist(self) -> None:
        """Wait until the lower tier has taken everything of the last store."""
        ...

    def lookup(self, tokens: Sequence[int]) -> int:
        """Return how many tokens are cached."""
        ...

    def drop_host(self) -> None:
        """Forget the copies in host memory."""
        ...

    def retrieve(self, tokens: Sequence[int], kv: KV) -> int:
        """Bring the prompt back; return how many tokens came."""
        ...

    def clear(self) -> None:
        """Forget everything."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class Ideal:
    """xxh3 keys, one copy into a warm huge-page slot, four threads that move one file per chunk, no fsync."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._flags = os.O_DIRECT if setup.direct else 0
        self._threads = ThreadPoolExecutor(4)
        self._free: list[np.ndarray] = []
        self._host: dict[bytes, np.ndarray | None] = {}
        self._writes: list[Future[None]] = []
        setup.directory.mkdir(parents=True, exist_ok=True)

    def warm(self) -> None:
        """See `Engine.warm`."""
        self._free += [huge_buffer(CHUNK_BYTES) for _ in range(self._setup.num_tokens // CHUNK_TOKENS)]

    def store(self, tokens: Sequence[int], kv: KV) -> None:
        """See `Engine.store`."""
        for index, key in enumerate(self._keys(tokens)):
            slot = self._free.pop()
            kv.read(index * CHUNK_TOKENS, (index + 1) * CHUNK_TOKENS, slot.reshape(CHUNK_SHAPE))
            self._host[key] = slot
            if self._setup.tier == "disk":
                self._writes.append(self._threads.submit(self._write, key, slot))

    def persist(self) -> None:
        """See `Engine.persist`."""
        for write in self._writes:
            write.result()
        self._writes.clear()

    def lookup(self, tokens: Sequence[int]) -> int:
        """See `Engine.lookup`."""
        keys = self._keys(tokens)
        present = next((i for i, key in enumerate(keys) if key not in self._host), len(keys))
        return present * CHUNK_TOKENS

    def drop_host(self) -> None:
        """See `Engine.drop_host`."""
        self._free += [slot for slot in self._host.values() if slot is not None]
        self._host = dict.fromkeys(self._host)

    def retrieve(self, tokens: Sequence[int], kv: KV) -> int:
        """See `Engine.retrieve`."""
        keys = self._keys(tokens)
        reads: dict[bytes, Future[None]] = {}
        for key in keys:
            if self._host[key] is None:
                slot = self._host[key] = self._free.pop()
                reads[key] = self._threads.submit(self._read, key, slot)
        for index, key in enumerate(keys):
            if key in reads:
                reads[key].result()
            slot = self._host[key]
            assert slot is not None
            kv.write(index * CHUNK_TOKENS, (index + 1) * CHUNK_TOKENS, slot.reshape(CHUNK_SHAPE))
        return len(keys) * CHUNK_TOKENS

    def clear(self) -> None:
        """See `Engine.clear`."""
        self.drop_host()
        if self._setup.tier == "disk":
            for key in self._host:
                self._path(key).unlink()
        self._host.clear()

    def close(self) -> None:
        """See `Engine.close`."""
        self._threads.shutdown()
        shutil.rmtree(self._setup.directory, ignore_errors=True)

    @staticmethod
    def _keys(tokens: Sequence[int]) -> list[bytes]:
        data = np.asarray(tokens, dtype=np.uint32).tobytes()
        size, digest, keys = CHUNK_TOKENS * 4, b"", []
        for start in range(0, len(data) - size + 1, size):
            digest = xxhash.xxh3_128_digest(digest + data[start : start + size])
            keys.append(digest)
        return keys

    def _path(self, key: bytes) -> Path:
        return self._setup.directory / key.hex()

    def _write(self, key: bytes, slot: np.ndarray) -> None:
        descriptor = os.open(self._path(key), os.O_CREAT | os.O_WRONLY | self._flags, 0o644)
        assert os.pwritev(descriptor, [slot.data], 0) == CHUNK_BYTES
        os.close(descriptor)

    def _read(self, key: bytes, slot: np.ndarray) -> None:
        descriptor = os.open(self._path(key), os.O_RDONLY | self._flags)
        assert os.preadv(descriptor, [slot.data], 0) == CHUNK_BYTES
        os.close(descriptor)


def _lmcache(setup: Setup) -> Engine:
    from .peer_lmcache import LMCache  # needs its own environment

    return LMCache(setup)


def _akvcache(setup: Setup) -> Engine:
    from .peer_akvcache import AkvCache

    return AkvCache(setup)


ENGINES: Mapping[str, Callable[[Setup], Engine]] = {"ideal": Ideal, "lmcache": _lmcache, "akvcache": _akvcache}
