"""Keys: equal wherever the bytes are equal, different wherever anything that changes the bytes differs."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from akvcache.chunking import Chunker, FixedChunker, SegmentChunker
from akvcache.errors import ConfigurationError, UsageError
from akvcache.keys import CacheNamespace, ChunkKey, KeySchema, RequestScope, depth_of, digest_of, namespace_of
from akvcache.layout import KVLayout
from akvcache.tokens import TokenSequence, canonical_tokens

LAYOUT = KVLayout.mha(num_layers=2, num_kv_heads=2, head_dim=8, dtype="bfloat16", block_tokens=4)
NAMESPACE = CacheNamespace(model="m", weights_version="1", parallel={"tp": (0, 2)}, extra={"quant": "none"})
CHUNKER = FixedChunker(16)
NO_SCOPE = RequestScope()
TOKENS = list(range(100, 164))
DIGEST_A, DIGEST_B = bytes(16), bytes(15) + b"\x01"


def schema(
    *,
    namespace: CacheNamespace = NAMESPACE,
    layout: KVLayout = LAYOUT,
    chunker: Chunker = CHUNKER,
    algorithm: str = "sha256",
) -> KeySchema:
    return KeySchema(namespace=namespace, layout=layout, chunker=chunker, algorithm=algorithm)


def keys(tokens: TokenSequence = TOKENS, scope: RequestScope = NO_SCOPE, **parts: object) -> Sequence[ChunkKey]:
    return schema(**parts).run(canonical_tokens(tokens), scope).keys  # type: ignore[arg-type]


# The same keys everywhere.

IN_ANOTHER_PROCESS = """
import array, json, numpy as np, torch
from akvcache.chunking import FixedChunker
from akvcache.keys import CacheNamespace, KeySchema, RequestScope
from akvcache.layout import KVLayout
from akvcache.tokens import canonical_tokens
tokens = list(range(100, 164))
containers = {
    "list": tokens, "tuple": tuple(tokens), "range": range(100, 164), "array": array.array("q", tokens),
    "int32": np.array(tokens, np.int32), "int64": np.array(tokens, np.int64), "uint32": np.array(tokens, np.uint32),
    "torch.int32": torch.tensor(tokens, dtype=torch.int32), "torch.int64": torch.tensor(tokens),
    "torch.uint32": torch.tensor(tokens, dtype=torch.uint32),
}
layout = KVLayout.mha(num_layers=2, num_kv_heads=2, head_dim=8, dtype="bfloat16", block_tokens=4)
namespace = CacheNamespace(model="m", weights_version="1", parallel={"tp": (0, 2)}, extra={"quant": "none"})
schema = KeySchema(namespace=namespace, layout=layout, chunker=FixedChunker(16))
scope = RequestScope(adapter="a", salt="s", media=[(20, bytes(16))])
run = lambda tokens: [key.hex() for key in schema.run(canonical_tokens(tokens), scope).keys]
print(json.dumps({name: run(tokens) for name, tokens in containers.items()}))
"""


@pytest.mark.parametrize(
    "seeds",
    [(1, 2**32 - 1), pytest.param((0, 1, 2, 3, 42, 1000, 2**31, 2**32 - 1), marks=pytest.mark.soak)],
    ids=["two", "eight"],
)
def test_interpreters_and_containers_agree(seeds: tuple[int, ...]) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", IN_ANOTHER_PROCESS],
            env=os.environ | {"PYTHONHASHSEED": str(seed)},
            stdout=subprocess.PIPE,
        )
        for seed in seeds
    ]
    answers = [json.loads(process.communicate()[0]) for process in processes]
    assert all(process.returncode == 0 for process in processes)
    here = [key.hex() for key in keys(scope=RequestScope(adapter="a", salt="s", media=[(20, DIGEST_A)]))]
    assert len(here) == 4
    assert [len(answer) for answer in answers] == [10] * len(seeds)
    assert all(found == here for answer in answers for found in answer.values())


def test_keys_are_what_the_docstring_says() -> None:
    """An independent reading of the scheme, with the standard library only."""

    def fields(*pairs: tuple[str, bytes]) -> bytes:
        return b"".join(struct.pack("<II", len(t.encode()), len(v)) + t.encode() + v for t, v in pairs)

    described = fields(
        ("model", b"m"), ("weights", b"1"), ("parallel.tp", struct.pack("<II", 0, 2)), ("extra.quant", b"none")
    )
    identity = fields(
        ("schema", struct.pack("<I", 1)),
        ("namespace", described),
        ("layout", LAYOUT.digest),
        ("chunker", b"fixed:16"),
        ("hash", b"sha256"),
    )
    namespace_id = hashlib.sha256(identity).digest()[:16]
    scope = fields(("adapter", b"a"), ("adapter_version", b"2"), ("salt.text", b"s"))
    digest = hashlib.sha256(fields(("namespace", namespace_id), ("scope", scope))).digest()
    expected = []
    for depth in range(4):
        chunk = TOKENS[16 * depth : 16 * depth + 16]
        media = fields(("media.20", DIGEST_A), ("media.31", DIGEST_B)) if depth == 1 else b""
        digest = hashlib.sha256(digest + struct.pack("<I", 16) + struct.pack("<16I", *chunk) + media).digest()
        expected.append(namespace_id + struct.pack(">I", depth) + digest)
    found = keys(scope=RequestScope(adapter="a", adapter_version="2", salt="s", media=[(31, DIGEST_B), (20, DIGEST_A)]))
    assert list(found) == expected


GOLDEN = {
    "sha256": (
        "8cabf33b9db6186156094ff3b9f292ad000000004abe8c1d42cdc9b821379536fde94a801de3582e8781f1c67029f8b1911f1eec",
        "8cabf33b9db6186156094ff3b9f292ad0000000165121768cbc19ef9e2ed8672a7b3c4de9ccc75753bdadc90ca5cbf82b409a5cf",
    ),
    "xxh3_128": (
        "d7b4b804f2c51b08014182149148b8cb00000000ae7289deab35062db19eb6a92dce070c",
        "d7b4b804f2c51b08014182149148b8cb000000015920f175195c7dd3da64475f66d38d62",
    ),
}


@pytest.mark.parametrize("algorithm", GOLDEN)
def test_keys_of_a_released_schema_never_change(algorithm: str) -> None:
    found = keys(TOKENS[:32], RequestScope(adapter="a", salt=b"s"), algorithm=algorithm)
    assert tuple(key.hex() for key in found) == GOLDEN[algorithm]


def test_the_parts_of_a_key_can_be_read_back() -> None:
    used = schema()
    for depth, key in enumerate(keys()):
        assert namespace_of(key) == used.namespace_id
        assert depth_of(key) == depth
        assert len(digest_of(key)) == 32
        assert namespace_of(key) + depth.to_bytes(4, "big") + digest_of(key) == key


def test_runs_share_keys_up_to_where_prompts_part() -> None:
    other = [*TOKENS[:40], 7, *TOKENS[41:]]
    assert keys()[:2] == keys(other)[:2]
    assert not set(keys()[2:]) & set(keys(other)[2:])


def test_equal_chunks_behind_different_prefixes_have_different_keys() -> None:
    repeated = keys([5] * 64)
    assert len({digest_of(key) for key in repeated}) == 4


def test_the_tail_below_a_chunk_has_no_key() -> None:
    run = schema().run(canonical_tokens(TOKENS[:47]), NO_SCOPE)
    assert len(run.keys) == 2
    assert list(run.stops) == [16, 32]
    assert [run.span(0), run.span(1)] == [(0, 16), (16, 32)]
    assert [run.tokens_before(index) for index in range(3)] == [0, 16, 32]


# Different keys for different bytes.

NAMESPACES = {
    "model": replace(NAMESPACE, model="n"),
    "weights": replace(NAMESPACE, weights_version="2"),
    "rank": replace(NAMESPACE, parallel={"tp": (1, 2)}),
    "size": replace(NAMESPACE, parallel={"tp": (0, 3)}),
    "axis": replace(NAMESPACE, parallel={"pp": (0, 2)}),
    "two axes": replace(NAMESPACE, parallel={"tp": (0, 2), "pp": (0, 1)}),
    "no axis": replace(NAMESPACE, parallel={}),
    "extra value": replace(NAMESPACE, extra={"quant": "fp8"}),
    "extra name": replace(NAMESPACE, extra={"rope": "none"}),
    "no extra": replace(NAMESPACE, extra={}),
    "shifted": replace(NAMESPACE, model="m1", weights_version=""),
    "empty": CacheNamespace(),
}
LAYOUTS = {
    "dtype": KVLayout.mha(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float16", block_tokens=4),
    "layers": KVLayout.mha(num_layers=4, num_kv_heads=2, head_dim=8, dtype="bfloat16", block_tokens=4),
    "heads": KVLayout.mha(num_layers=2, num_kv_heads=4, head_dim=8, dtype="bfloat16", block_tokens=4),
    "same bytes, other heads": KVLayout.mha(num_layers=2, num_kv_heads=4, head_dim=4, dtype="bfloat16", block_tokens=4),
    "block": KVLayout.mha(num_layers=2, num_kv_heads=2, head_dim=8, dtype="bfloat16", block_tokens=8),
    "tag": KVLayout.mha(num_layers=2, num_kv_heads=2, head_dim=8, dtype="bfloat16", block_tokens=4, tag="HND"),
    "mla": KVLayout.mla(num_layers=2, latent_dim=16, rope_dim=16, dtype="bfloat16", block_tokens=4),
}
CHUNKERS = {
    "size": FixedChunker(8),
    "kind": SegmentChunker(16, (1,)),
    "separator": SegmentChunker(16, (2,)),
    "separators": SegmentChunker(16, (1, 2)),
    "segment size": SegmentChunker(8, (1,)),
}


def test_every_part_of_the_namespace_changes_every_key() -> None:
    found = {"default": keys(), "hash": keys(algorithm="xxh3_128")}
    found |= {f"namespace: {name}": keys(namespace=value) for name, value in NAMESPACES.items()}
    found |= {f"layout: {name}": keys(layout=value) for name, value in LAYOUTS.items()}
    found |= {f"chunker: {name}": keys(chunker=value) for name, value in CHUNKERS.items()}
    namespace_ids = {name: namespace_of(run[0]) for name, run in found.items()}
    assert len(set(namespace_ids.values())) == len(namespace_ids)
    digests = [digest_of(key) for run in found.values() for key in run]
    assert len(set(digests)) == len(digests)


SCOPES = [
    RequestScope(),
    RequestScope(adapter=""),
    RequestScope(adapter="x"),
    RequestScope(adapter="y"),
    RequestScope(adapter="x", adapter_version="1"),
    RequestScope(adapter="x", adapter_version="2"),
    RequestScope(adapter="x", adapter_version=""),
    RequestScope(adapter_version="x"),
    RequestScope(salt=""),
    RequestScope(salt=b""),
    RequestScope(salt="x"),
    RequestScope(salt=b"x"),
    RequestScope(salt="X"),
    RequestScope(adapter="x", salt="x"),
    RequestScope(adapter="x", salt=b"x"),
    RequestScope(adapter="a|salt=b"),
    RequestScope(adapter="a", salt="b"),
    RequestScope(adapter="a\0", salt="b"),
    RequestScope(adapter="a", salt="\0b"),
    RequestScope(adapter="a\n", salt="b"),
    RequestScope(adapter="salt.text", salt="b"),
    RequestScope(adapter="a", adapter_version="b", salt="c"),
    RequestScope(adapter="ab", salt="c"),
    RequestScope(adapter="a", adapter_version="bc"),
    RequestScope(salt="\u00e9"),
    RequestScope(salt="e\u0301"),
    RequestScope(salt="\u00e9".encode("latin-1")),
    RequestScope(salt="\ud800"),
    RequestScope(salt="\udc00"),
    RequestScope(salt="?"),
    RequestScope(salt="\ud800\udc00"),
    RequestScope(salt="\U00010000"),
    RequestScope(salt="\ud800".encode("utf-8", "surrogatepass")),
    RequestScope(media=[(0, DIGEST_A)]),
    RequestScope(media=[(0, DIGEST_B)]),
    RequestScope(media=[(1, DIGEST_A)]),
    RequestScope(media=[(0, DIGEST_A), (1, DIGEST_A)]),
    RequestScope(media=[(0, DIGEST_A), (0, DIGEST_B)]),
    RequestScope(media=[(0, DIGEST_A + DIGEST_B)]),
    RequestScope(salt=DIGEST_A, media=[(0, DIGEST_A)]),
]


@pytest.mark.parametrize("algorithm", ["sha256", "xxh3_128"])
def test_every_part_of_the_scope_changes_every_key(algorithm: str) -> None:
    runs = [keys(scope=scope, algorithm=algorithm) for scope in SCOPES]
    flat = [key for run in runs for key in run]
    assert len(flat) == 4 * len(SCOPES)
    assert len(set(flat)) == len(flat)


def test_separators_inside_namespace_fields_do_not_blur_them() -> None:
    pairs = [
        (CacheNamespace(model="a", weights_version="b"), CacheNamespace(model="a\0b")),
        (
            CacheNamespace(model="a|weights", weights_version="b"),
            CacheNamespace(model="a", weights_version="weights|b"),
        ),
        (CacheNamespace(extra={"a": "b", "c": "d"}), CacheNamespace(extra={"a": "b\0c\0d"})),
        (CacheNamespace(extra={"a.b": "c"}), CacheNamespace(extra={"a": "b.c"})),
        (CacheNamespace(extra={"\u00e9": "x"}), CacheNamespace(extra={"e": "\u0301x"})),
    ]
    for left, right in pairs:
        assert schema(namespace=left).namespace_id != schema(namespace=right).namespace_id


def test_order_of_names_and_of_media_does_not_matter() -> None:
    one = CacheNamespace(parallel={"tp": (0, 2), "pp": (1, 2)}, extra={"a": "1", "b": "2"})
    two = CacheNamespace(parallel={"pp": (1, 2), "tp": (0, 2)}, extra={"b": "2", "a": "1"})
    assert keys(namespace=one) == keys(namespace=two)
    media = [(3, DIGEST_A), (40, DIGEST_B), (3, DIGEST_B)]
    assert keys(scope=RequestScope(media=media)) == keys(scope=RequestScope(media=media[::-1]))
    assert keys(scope=RequestScope(media=[(np.int64(3), DIGEST_A)])) == keys(scope=RequestScope(media=[(3, DIGEST_A)]))


@pytest.mark.parametrize("position", [48, 55, 63])
def test_a_medium_changes_keys_from_its_own_chunk_on(position: int) -> None:
    tokens = list(range(96))
    plain = keys(tokens)
    first = keys(tokens, RequestScope(media=[(position, DIGEST_A)]))
    second = keys(tokens, RequestScope(media=[(position, DIGEST_B)]))
    assert plain[:3] == first[:3] == second[:3]
    for at in range(3, 6):
        assert len({plain[at], first[at], second[at]}) == 3


def test_a_medium_in_the_uncached_tail_changes_no_key() -> None:
    assert keys(TOKENS[:40], RequestScope(media=[(39, DIGEST_A)])) == keys(TOKENS[:40])


def test_seventy_thousand_media_give_as_many_keys() -> None:
    used, tokens = schema(chunker=FixedChunker(1)), canonical_tokens([1])
    digests = (hashlib.blake2b(number.to_bytes(4, "big"), digest_size=16).digest() for number in range(70_000))
    found = {used.run(tokens, RequestScope(media=[(0, digest)])).keys[0] for digest in digests}
    assert len(found) == 70_000


# Wrong input.


@pytest.mark.parametrize(
    ("media", "named"),
    [
        ([(-1, DIGEST_A)], "media position -1 is outside the 64 tokens"),
        ([(64, DIGEST_A)], "media position 64 is outside"),
        ([("3", DIGEST_A)], "media position '3'"),
        ([(3.0, DIGEST_A)], "media position 3.0"),
        ([(3, bytes(15))], "media digest at 3 .* at least 16 bytes"),
        ([(3, "x" * 16)], "media digest at 3"),
        ([(3, 7)], "media digest at 3"),
    ],
)
def test_wrong_media_are_named(media: list[tuple[int, bytes]], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        keys(scope=RequestScope(media=media))


@pytest.mark.parametrize(("name", "value"), [("adapter", 3), ("adapter_version", b"1"), ("salt", 5)])
def test_a_scope_is_made_of_text(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"{name} must be text, got {type(value).__name__}"):
        RequestScope(**{name: value})  # type: ignore[arg-type]


def test_a_salt_is_never_shown() -> None:
    scope = RequestScope(salt="the secret")
    assert "secret" not in repr(scope)
    assert "secret" not in repr(schema())


@pytest.mark.parametrize("rank", [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_is_below_its_size(rank: tuple[int, int]) -> None:
    with pytest.raises(ConfigurationError, match="parallel axis 'tp'"):
        CacheNamespace(parallel={"tp": rank})


def test_a_namespace_does_not_change_under_its_schema() -> None:
    parallel, extra = {"tp": (0, 2)}, {"a": "1"}
    namespace = CacheNamespace(parallel=parallel, extra=extra)
    before = namespace.encode()
    parallel["tp"], extra["a"] = (1, 2), "2"
    assert namespace.encode() == before
    with pytest.raises(TypeError):
        namespace.extra["a"] = "3"  # type: ignore[index]


def test_an_unknown_hash_lists_the_known() -> None:
    with pytest.raises(ConfigurationError, match=r"key_hash 'md5' is not known; use one of sha256, xxh3_128"):
        schema(algorithm="md5")


def test_a_schema_describes_itself_without_secrets() -> None:
    described = json.loads(json.dumps(schema().describe()))
    assert described["namespace_id"] == schema().namespace_id.hex()
    assert described["model"] == "m"
    assert described["parallel"] == {"tp": [0, 2]}
    assert described["chunker"] == "fixed:16"
    assert described["dtypes"] == ["bfloat16"]
    assert described["token_bytes"] == LAYOUT.token_bytes
    assert schema().namespace_id.hex() in repr(schema())


def test_no_tokens_are_no_keys() -> None:
    assert list(keys([])) == []


def test_equal_documents_share_keys_up_to_their_end_only() -> None:
    chunker = SegmentChunker(16, (9,))
    one, two = keys([1, 2, 9, 3, 9, 4], chunker=chunker), keys([1, 2, 9, 5, 6, 9], chunker=chunker)
    assert one[0] == two[0]
    assert one[1] != two[1]
