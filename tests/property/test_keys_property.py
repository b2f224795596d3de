"""Keys, chunkers and masks against brute force."""

from __future__ import annotations

import array
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from akvcache.chunking import Chunker, FixedChunker, SegmentChunker
from akvcache.errors import UsageError
from akvcache.keys import CacheNamespace, ChunkKey, KeySchema, RequestScope
from akvcache.layout import KVLayout
from akvcache.tokens import MAX_TOKEN, canonical_tokens, masked_head

LAYOUT = KVLayout.mha(num_layers=1, num_kv_heads=1, head_dim=4, dtype="float16")

token = st.integers(0, MAX_TOKEN)
few = st.integers(0, 2)
"""Few different tokens: prompts then share prefixes and hold separators."""
digest = st.binary(min_size=16, max_size=20)
text = st.text(max_size=4)
field = st.none() | text
media = st.lists(st.tuples(st.integers(0, 15), digest), max_size=4)
scopes = st.builds(
    RequestScope, adapter=field, adapter_version=field, salt=field | st.binary(max_size=4), media=media.map(tuple)
)
separators = st.lists(few, min_size=1, max_size=3).map(tuple)
chunkers = st.builds(FixedChunker, st.integers(1, 6)) | st.builds(SegmentChunker, st.integers(3, 6), separators)


def keys_of(
    tokens: Sequence[int],
    scope: RequestScope,
    *,
    chunker: Chunker = FixedChunker(4),  # noqa: B008 - immutable
    namespace: CacheNamespace = CacheNamespace(),  # noqa: B008 - immutable
) -> Sequence[ChunkKey]:
    schema = KeySchema(namespace=namespace, layout=LAYOUT, chunker=chunker)
    return schema.run(canonical_tokens(tokens), scope).keys


@given(st.lists(token, max_size=300))
def test_every_container_gives_the_same_bytes(tokens: list[int]) -> None:
    expected = b"".join(value.to_bytes(4, "little") for value in tokens)
    containers = [
        tokens,
        tuple(tokens),
        array.array("Q", tokens),
        np.array(tokens, dtype=np.uint32),
        np.array(tokens, dtype=">i8"),
        torch.tensor(tokens, dtype=torch.int64),
        torch.tensor(tokens, dtype=torch.int64).to(torch.uint32),
    ]
    assert all(bytes(canonical_tokens(container)) == expected for container in containers)


@given(
    st.lists(token, max_size=20),
    st.integers(max_value=-1) | st.integers(MAX_TOKEN + 1) | st.floats() | st.booleans() | st.none() | st.text(),
    st.integers(0, 20),
)
def test_one_bad_token_spoils_a_list_and_is_named(tokens: list[int], bad: object, at: int) -> None:
    with pytest.raises(UsageError) as caught:
        canonical_tokens([*tokens[:at], bad, *tokens[at:]])  # type: ignore[list-item]
    assert repr(bad) in str(caught.value)


@given(st.lists(few, max_size=40), st.lists(few, max_size=40), chunkers)
def test_two_prompts_share_keys_exactly_as_far_as_they_share_chunks(
    left: list[int], right: list[int], chunker: Chunker
) -> None:
    def chunks(tokens: list[int]) -> list[list[int]]:
        stops = list(chunker.stops(canonical_tokens(tokens)))
        return [tokens[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]

    mine, theirs = chunks(left), chunks(right)
    shared = next((at for at, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), None)
    shared = min(len(mine), len(theirs)) if shared is None else shared
    my_keys = keys_of(left, RequestScope(), chunker=chunker)
    their_keys = keys_of(right, RequestScope(), chunker=chunker)
    assert list(my_keys[:shared]) == list(their_keys[:shared])
    assert not set(my_keys[shared:]) & set(their_keys[shared:])


def meaning(scope: RequestScope) -> tuple[object, ...]:
    return scope.adapter, scope.adapter_version, type(scope.salt), scope.salt, sorted(scope.media)


@given(scopes, scopes)
def test_keys_are_equal_exactly_where_scopes_are(left: RequestScope, right: RequestScope) -> None:
    tokens = list(range(16))
    mine, theirs = keys_of(tokens, left), keys_of(tokens, right)
    plain = [meaning(scope)[:4] for scope in (left, right)]
    if plain[0] != plain[1]:
        assert not set(mine) & set(theirs)
        return
    for depth in range(4):
        seen = [sorted(m for m in scope.media if m[0] < 4 * depth + 4) for scope in (left, right)]
        assert (mine[depth] == theirs[depth]) is (seen[0] == seen[1])


names = st.dictionaries(text, text, max_size=2)
axes = st.dictionaries(text, st.sampled_from([(0, 1), (0, 2), (1, 2)]), max_size=2)
namespaces = st.builds(CacheNamespace, model=text, weights_version=text, parallel=axes, extra=names)


@given(namespaces, namespaces)
def test_namespace_ids_are_equal_exactly_where_namespaces_are(left: CacheNamespace, right: CacheNamespace) -> None:
    ids = [KeySchema(namespace=n, layout=LAYOUT, chunker=FixedChunker(4)).namespace_id for n in (left, right)]
    same = (left.model, left.weights_version, dict(left.parallel), dict(left.extra)) == (
        right.model,
        right.weights_version,
        dict(right.parallel),
        dict(right.extra),
    )
    assert (ids[0] == ids[1]) is same


def segments(tokens: list[int], limit: int, separator: tuple[int, ...]) -> list[int]:
    """Walk token by token, as the docstring of SegmentChunker says."""
    stops: list[int] = []
    start = after_separator = 0
    for end in range(1, len(tokens) + 1):
        whole = end - len(separator) >= after_separator
        if whole and tuple(tokens[end - len(separator) : end]) == separator:
            stops.append(end)
            start = after_separator = end
        elif end - start == limit:
            stops.append(end)
            start = end
    return stops


@settings(max_examples=500)
@given(st.lists(few, max_size=60), st.integers(1, 6), separators)
def test_segments_are_what_a_walk_finds(tokens: list[int], limit: int, separator: tuple[int, ...]) -> None:
    assume(len(separator) <= limit)
    stops = list(SegmentChunker(limit, separator).stops(canonical_tokens(tokens)))
    assert stops == segments(tokens, limit, separator)


@settings(max_examples=300)
@given(st.lists(few, max_size=40), st.lists(few, max_size=40), chunkers)
def test_the_chunks_of_a_prompt_begin_those_of_its_extensions(
    tokens: list[int], more: list[int], chunker: Chunker
) -> None:
    stops = list(chunker.stops(canonical_tokens(tokens)))
    longer = list(chunker.stops(canonical_tokens(tokens + more)))
    assert longer[: len(stops)] == stops
    edges = [0, *longer]
    assert all(0 < after - before <= chunker.max_tokens for before, after in itertools.pairwise(edges))
    assert len(tokens) - (stops[-1] if stops else 0) < chunker.max_tokens, "the uncached tail is less than a chunk"


@given(st.lists(st.booleans(), max_size=12), st.integers(0, 12))
def test_a_mask_is_taken_exactly_if_it_reads_f_then_t(mask: list[bool], num_tokens: int) -> None:
    head = next((at for at, value in enumerate(mask) if value), len(mask))
    if len(mask) == num_tokens and all(mask[head:]):
        assert masked_head(mask, num_tokens) == masked_head(torch.tensor(mask, dtype=torch.bool), num_tokens) == head
    else:
        with pytest.raises(UsageError):
            masked_head(mask, num_tokens)
