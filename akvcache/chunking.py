"""Where a prompt is cut. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from akvcache.errors import ConfigurationError
from akvcache.tokens import is_token

__all__ = ("Chunker", "FixedChunker", "SegmentChunker")


class Chunker(Protocol):
    """Cuts a prompt into chunks."""

    @property
    def name(self) -> str:
        """What enters the namespace: two chunkers of one name cut every prompt alike."""
        ...

    @property
    def max_tokens(self) -> int:
        """Longest chunk it makes; a host slot holds this many tokens."""
        ...

    def stops(self, tokens: memoryview) -> Sequence[int]:
        """Return where each chunk ends, ascending; tokens after the last stop are the uncached tail.

        Args:
            tokens: Canonical tokens, uint32 little-endian bytes.
        """
        ...


@dataclass(frozen=True, slots=True)
class FixedChunker:
    """Chunks of `chunk_tokens` tokens each."""

    chunk_tokens: int

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ConfigurationError(f"chunk_tokens must be at least 1, got {self.chunk_tokens}")

    @property
    def name(self) -> str:
        """`Chunker.name`."""
        return f"fixed:{self.chunk_tokens}"

    @property
    def max_tokens(self) -> int:
        """See `Chunker.max_tokens`."""
        return self.chunk_tokens

    def stops(self, tokens: memoryview) -> Sequence[int]:
        """See `Chunker.stops`."""
        return range(self.chunk_tokens, len(tokens) // 4 + 1, self.chunk_tokens)


@dataclass(frozen=True, slots=True)
class SegmentChunker:
    """A chunk ends after each separator, and after `chunk_tokens` tokens without one.

    Prompts made of whole documents share a prefix up to a document's end, not up to a multiple of a fixed
    size. Keys stay chained: a document is found again behind the same documents only, because its KV depends
    on everything before it.
    """

    chunk_tokens: int
    separator: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ConfigurationError(f"chunk_tokens must be at least 1, got {self.chunk_tokens}")
        if not self.separator or not all(is_token(t) for t in self.separator):
            raise ConfigurationError(f"separator must be a non-empty list of token ids, got {self.separator}")
        if len(self.separator) > self.chunk_tokens:
            raise ConfigurationError(f"separator is longer than chunk_tokens ({self.chunk_tokens})")

    @property
    def name(self) -> str:
        """`Chunker.name`."""
        return f"segments:{self.chunk_tokens}:{','.join(map(str, self.separator))}"

    @property
    def max_tokens(self) -> int:
        """See `Chunker.max_tokens`."""
        return self.chunk_tokens

    def stops(self, tokens: memoryview) -> Sequence[int]:
        """See `Chunker.stops`."""
        ids = np.frombuffer(tokens, dtype="<u4")
        width = len(self.separator)
        if ids.size < width:
            match = np.zeros(0, dtype=np.intp)
        else:
            windows = np.lib.stride_tricks.sliding_window_view(ids, width)
            match = np.flatnonzero((windows == np.asarray(self.separator, dtype=np.uint32)).all(axis=1))
        stops: list[int] = []
        start = 0
        for end in [*(int(m) + width for m in match), int(ids.size) + self.chunk_tokens]:
            if end - width < start:
                continue  # overlaps the separator before it
            limit = min(end, int(ids.size))
            while limit - start > self.chunk_tokens or (limit - start == self.chunk_tokens and limit != end):
                start += self.chunk_tokens
                stops.append(start)
            if end <= ids.size and end > start:
                stops.append(end)
                start = end
        return stops
