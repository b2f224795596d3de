"""Chunkers: where prompts are cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from akvcache.chunking import Chunker, FixedChunker, SegmentChunker
from akvcache.errors import ConfigurationError
from akvcache.tokens import canonical_tokens


@pytest.mark.parametrize(("num_tokens", "stops"), [(0, []), (3, []), (4, [4]), (7, [4]), (8, [4, 8])])
def test_a_fixed_chunker_cuts_whole_chunks_only(num_tokens: int, stops: list[int]) -> None:
    assert list(FixedChunker(4).stops(canonical_tokens([7] * num_tokens))) == stops


@pytest.mark.parametrize("chunker", [FixedChunker(4), SegmentChunker(4, (1, 2))])
def test_a_chunker_says_how_long_a_chunk_gets(chunker: Chunker) -> None:
    assert chunker.max_tokens == 4


def test_names_tell_chunkers_apart() -> None:
    chunkers = [FixedChunker(4), FixedChunker(8), SegmentChunker(4, (1,)), SegmentChunker(8, (1,))]
    chunkers += [SegmentChunker(4, (1, 2)), SegmentChunker(4, (12,)), SegmentChunker(4, (2, 1))]
    assert len({chunker.name for chunker in chunkers}) == len(chunkers)


@pytest.mark.parametrize(
    ("tokens", "stops"),
    [
        ([], []),
        ([1, 2], []),
        ([1, 2, 9], [3]),
        ([9, 9, 9], [1, 2, 3]),
        ([1, 2, 3, 4], [4]),
        ([1, 2, 3, 4, 5], [4]),
        ([1, 2, 3, 4, 9], [4, 5]),
        ([1, 2, 3, 9, 5], [4]),
        ([1, 9, 2, 3, 4, 5, 6, 9, 7], [2, 6, 8]),
        ([1] * 12, [4, 8, 12]),
    ],
)
def test_a_segment_ends_after_its_separator_or_when_it_is_full(tokens: list[int], stops: list[int]) -> None:
    assert list(SegmentChunker(4, (9,)).stops(canonical_tokens(tokens))) == stops


def test_separators_do_not_overlap() -> None:
    assert list(SegmentChunker(8, (5, 5)).stops(canonical_tokens([5, 5, 5, 1, 5, 5]))) == [2, 6]


@pytest.mark.parametrize(
    "make",
    [
        lambda: FixedChunker(0),
        lambda: FixedChunker(-1),
        lambda: SegmentChunker(0, (1,)),
        lambda: SegmentChunker(4, ()),
        lambda: SegmentChunker(4, (-1,)),
        lambda: SegmentChunker(4, (2**32,)),
        lambda: SegmentChunker(4, (True,)),
        lambda: SegmentChunker(4, (1.0,)),  # type: ignore[arg-type]
        lambda: SegmentChunker(2, (1, 2, 3)),
    ],
)
def test_a_chunker_that_cannot_work_is_refused(make: Callable[[], Chunker]) -> None:
    with pytest.raises(ConfigurationError):
        make()
