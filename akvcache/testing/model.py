"""What a whole engine may answer: the model behind `akvcache.testing.machine`.

A chunk's bytes follow from its key and from how often its namespace was cleared, so bytes of another key and bytes
from before a `clear` are both recognised.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from typing_extensions import override

from akvcache.config import EngineConfig
from akvcache.engine import CacheEngine
from akvcache.keys import ChunkKey, KeySchema, RequestScope
from akvcache.results import RetrieveResult, StopReason, StoreResult
from akvcache.testing.faulty import FaultKind, Op
from akvcache.testing.regions import RegionKV, make_rows
from akvcache.tokens import canonical_tokens

__all__ = (
    "CHUNK",
    "FAULTS",
    "MAX_CHUNKS",
    "PROMPTS",
    "WAVE_CHUNKS",
    "Chunk",
    "EngineModel",
    "ErrorLog",
    "IdleRegions",
    "InFlight",
    "Prompt",
    "small_config",
    "store_while_frozen",
)

CHUNK: Final = 8
MAX_CHUNKS: Final = 6
WAVE_CHUNKS: Final = 2

FAULTS: Final = st.one_of(
    st.tuples(
        st.sampled_from((Op.CONTAINS, Op.READ, Op.READ, Op.WRITE, Op.WRITE, Op.DELETE, Op.SCAN, Op.ATTACH)),
        st.sampled_from((FaultKind.FAIL, FaultKind.FAIL_AFTER, FaultKind.HANG, FaultKind.HANG, FaultKind.SLOW)),
    ),
    st.tuples(
        st.sampled_from((Op.READ, Op.WRITE)),
        st.sampled_from((FaultKind.LOSE, FaultKind.TRUNCATE, FaultKind.CORRUPT)),
    ),
)
"""An operation of a tier and what goes wrong with it."""

_rows = functools.cache(make_rows)


def small_config(frame_bytes: int, num_slots: int, copy_threads: int) -> EngineConfig:
    """Return a strict configuration: a pool of `num_slots` frames, waves of `WAVE_CHUNKS`, windows of two waves."""
    return EngineConfig(
        chunk_tokens=CHUNK,
        host_bytes=num_slots * frame_bytes,
        wave_bytes=WAVE_CHUNKS * frame_bytes,
        window_bytes=2 * WAVE_CHUNKS * frame_bytes,
        copy_threads=copy_threads,
        prefault=False,
        strict=True,
    )


class Prompt(NamedTuple):
    """A request: prompts of one salt share as many chunks as their paths do."""

    salt: str
    path: tuple[int, ...]
    tail: int = 0

    @property
    def tokens(self) -> list[int]:
        """Its tokens; the last `tail` of them fill no chunk."""
        return [100 * chunk + at for chunk in self.path for at in range(CHUNK)] + [99] * self.tail

    @property
    def scope(self) -> RequestScope:
        """Its scope."""
        return RequestScope(salt=self.salt or None)

    def mask(self, head: int) -> Sequence[bool] | None:
        """Return the mask that leaves out `head` chunks."""
        return [at >= head * CHUNK for at in range(len(self.tokens))] if head else None


_PATHS: Final = ((1,), (1, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2, 1, 1), (1, 1, 1, 2, 2), (2, 1, 1, 1, 1, 1))

PROMPTS: Final = st.builds(
    Prompt,
    st.sampled_from(("", "", "", "salted")),
    st.sampled_from((*_PATHS, *_PATHS, ())),
    st.sampled_from((0, 3)),
)
"""Few prompts that share much, so that calls meet each other's chunks."""


class Chunk(NamedTuple):
    """What a key stands for; `path` ends with the chunk itself."""

    version: str
    salt: str
    path: tuple[int, ...]

    def rows(self, generation: int, token_bytes: int) -> np.ndarray:
        """Return its bytes in one generation, that is: after so many clears."""
        return _rows(f"{self}/{generation}", CHUNK, token_bytes)


async def store_while_frozen(engine: CacheEngine[torch.Tensor], slots: torch.Tensor) -> None:
    """Freeze, store one chunk, which must say so and copy nothing, and go on."""
    engine.freeze(True)  # noqa: FBT003
    kept = await engine.store([1] * CHUNK, slots)
    assert (kept.stopped, kept.new_tokens) == (StopReason.FROZEN, 0), kept
    engine.freeze(False)  # noqa: FBT003


@dataclass(slots=True, kw_only=True)
class InFlight:
    """A call that has begun."""

    task: asyncio.Task[object]
    check: Callable[[], None]
    region: int | None
    cancelled: bool = False


class IdleRegions:
    """Regions of a cache that no call uses, filled with noise that must stay as it is."""

    def __init__(self, kv: RegionKV) -> None:
        self._kv = kv
        self._noise: dict[int, np.ndarray] = {}
        self._serial = 0
        for region in range(kv.num_regions):
            self.lay(region)

    def __len__(self) -> int:
        return len(self._noise)

    def lay(self, region: int) -> None:
        """Take a region back and fill it anew."""
        self._serial += 1
        shape = (self._kv.region_tokens, self._kv.token_bytes)
        self._noise[region] = np.random.default_rng(self._serial).integers(0, 256, shape, dtype=np.uint8)
        self._kv.write(region, self._noise[region])

    def take(self) -> int:
        """Give a region to a call."""
        return self._noise.popitem()[0]

    def touched(self) -> list[int]:
        """Return the regions that somebody has written since."""
        return [region for region, noise in self._noise.items() if not np.array_equal(self._kv.read(region), noise)]


class EngineModel:
    """What was handed to the engine, and what it may therefore answer.

    Attributes:
        version: Weights version in force.
        generations: How often each version was cleared.
        chunks: What every key seen so far stands for.
    """

    def __init__(self, kv: RegionKV) -> None:
        self.version = "v1"
        self.generations = {"v1": 0, "v2": 0}
        self.chunks: dict[ChunkKey, Chunk] = {}
        self._offered: set[tuple[Chunk, int]] = set()
        self._kv = kv

    @property
    def generation(self) -> int:
        """Generation of the version in force."""
        return self.generations[self.version]

    def chunks_of(self, prompt: Prompt, schema: KeySchema) -> list[Chunk]:
        """Return the chunks of a prompt under the version in force."""
        depths = range(1, len(prompt.path) + 1)
        chunks = [Chunk(self.version, prompt.salt, prompt.path[:depth]) for depth in depths]
        run = schema.run(canonical_tokens(prompt.tokens), prompt.scope)
        self.chunks.update(zip(run.keys, chunks, strict=True))
        return chunks

    def offer(self, chunks: Sequence[Chunk]) -> None:
        """Note that a store was asked to keep these."""
        self._offered.update((chunk, self.generation) for chunk in chunks)

    def rows(self, chunks: Sequence[Chunk]) -> np.ndarray:
        """Return the bytes of consecutive chunks now."""
        parts = [chunk.rows(self.generations[chunk.version], self._kv.token_bytes) for chunk in chunks]
        return np.concatenate([np.zeros((0, self._kv.token_bytes), dtype=np.uint8), *parts])

    def is_current(self, key: ChunkKey, payload: bytes) -> bool:
        """Return whether these are the bytes of a key now."""
        return self._kv.payload(self.rows([self.chunks[key]])) == payload

    def whose(self, payload: bytes) -> list[tuple[Chunk, int]]:
        """Return which chunks, of which generation, have these bytes: what a failure should say."""
        known = [(chunk, past) for chunk in self.chunks.values() for past in range(self.generations[chunk.version] + 1)]
        return [(c, past) for c, past in known if self._kv.payload(c.rows(past, self._kv.token_bytes)) == payload]

    def hit_check(self, chunks: Sequence[Chunk]) -> Callable[[int], None]:
        """Return a check that an answer promises no more than was ever handed over since the last clear.

        A call that overlaps a clear may answer for either side of it.
        """
        version, began = self.version, self.generation

        def check(hit_tokens: int) -> None:
            hits = [
                next((i for i, chunk in enumerate(chunks) if (chunk, generation) not in self._offered), len(chunks))
                for generation in range(began, self.generations[version] + 1)
            ]
            assert hit_tokens % CHUNK == 0
            assert hit_tokens <= max(hits) * CHUNK, f"promises {hit_tokens} tokens of {chunks}"

        return check

    def store_check(self, prompt: Prompt, head: int) -> Callable[[StoreResult], None]:
        """Return a check that a store counts right."""

        def check(kept: StoreResult) -> None:
            whole = len(prompt.path) * CHUNK
            assert kept.total_tokens == len(prompt.tokens), kept
            assert 0 <= kept.stored_tokens <= whole, kept
            assert kept.stored_tokens % CHUNK == 0, kept
            assert min(kept.new_tokens, kept.existing_tokens) >= 0, kept
            assert kept.new_tokens + kept.existing_tokens <= whole - head * CHUNK, kept
            assert kept.stopped is not None or kept.new_tokens + kept.existing_tokens == whole - head * CHUNK, kept

        return check

    def loaded_check(
        self, prompt: Prompt, chunks: Sequence[Chunk], region: int, head: int
    ) -> Callable[[RetrieveResult], None]:
        """Return a check that a retrieve brought the right bytes, all of one generation, and wrote nothing else."""
        version, began, before = self.version, self.generation, self._kv.read(region)
        promised = self.hit_check(chunks[head:])

        def check(loaded: RetrieveResult) -> None:
            promised(loaded.hit_tokens)
            start, stop = head * CHUNK, head * CHUNK + loaded.loaded_tokens
            mask = [start <= at < stop for at in range(len(prompt.tokens))]
            assert torch.equal(loaded.mask, torch.tensor(mask, dtype=torch.bool)), loaded
            assert loaded.loaded_tokens <= loaded.hit_tokens, loaded
            assert sum(loaded.by_tier.values()) == loaded.loaded_tokens, loaded
            after = self._kv.read(region)
            assert np.array_equal(after[:start], before[:start]), "rows in front of the mask were written"
            # A wave of which one part has failed may have brought its other part.
            touched = stop + (WAVE_CHUNKS * CHUNK if loaded.stopped is StopReason.TRANSFER_ERROR else 0)
            assert np.array_equal(after[touched:], before[touched:]), "rows behind the mask were written"
            parts = after[start:stop].reshape(-1, CHUNK, self._kv.token_bytes)
            brought = list(zip(parts, chunks[head : stop // CHUNK], strict=True))
            assert any(
                all(np.array_equal(part, chunk.rows(generation, self._kv.token_bytes)) for part, chunk in brought)
                for generation in range(began, self.generations[version] + 1)
            ), f"wrong bytes for {prompt}"

        return check


class ErrorLog(logging.Handler):
    """Notes what only a bug logs."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._errors = errors

    @override
    def emit(self, record: logging.LogRecord) -> None:
        """Keep errors, and warnings that something was left behind at closing."""
        message = record.getMessage()
        if record.levelno >= logging.ERROR or "closed with" in message or "closing failed" in message:
            self._errors.append(f"{message}: {record.exc_info and record.exc_info[1]!r}")
