"""Chunk keys: what must be equal for two chunks to hold the same bytes.

::

    namespace id = SHA-256(namespace, layout, chunker, hash, schema)[:16]
    h(0)         = H(namespace id, scope)
    h(i+1)       = H(h(i) | number of tokens | tokens of chunk i | media in chunk i)
    key(i)       = namespace id (16 bytes) | i (4 bytes) | h(i+1)

Every variable field is tagged and length-prefixed before it is hashed, so no two different field lists
have one encoding. Tokens are canonical little-endian uint32, so neither the container nor the integer width
changes a key, and nothing depends on Python's `hash()`. The chunk's position stands in the key so that every
tier can evict the tail of a prefix before its head without a side index.

SHA-256 is the default because prefix caches shared by tenants have seen crafted collisions; `xxh3_128` is for
caches with one owner.
"""

from __future__ import annotations

import hashlib
import operator
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NewType, SupportsIndex, cast

import xxhash

from akvcache.chunking import Chunker
from akvcache.errors import ConfigurationError, UsageError
from akvcache.layout import KVLayout

__all__ = (
    "HASHES",
    "KEY_SCHEMA",
    "CacheNamespace",
    "ChunkKey",
    "ChunkRun",
    "KeySchema",
    "NamespaceId",
    "RequestScope",
    "depth_of",
    "digest_of",
    "namespace_of",
)

ChunkKey = NewType("ChunkKey", bytes)
NamespaceId = NewType("NamespaceId", bytes)
KEY_SCHEMA: Final = 1
NAMESPACE_ID_BYTES: Final = 16
DEPTH_BYTES: Final = 4
MIN_MEDIA_DIGEST_BYTES: Final = 16


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


HASHES: Final = MappingProxyType({"sha256": _sha256, "xxh3_128": xxhash.xxh3_128_digest})


def namespace_of(key: ChunkKey) -> NamespaceId:
    """Return the namespace id inside `key`."""
    return NamespaceId(key[:NAMESPACE_ID_BYTES])


def depth_of(key: ChunkKey) -> int:
    """Return the position of the chunk in its prefix, counted from 0."""
    return int.from_bytes(key[NAMESPACE_ID_BYTES : NAMESPACE_ID_BYTES + DEPTH_BYTES], "big")


def digest_of(key: ChunkKey) -> bytes:
    """Return the chained digest inside `key`."""
    return key[NAMESPACE_ID_BYTES + DEPTH_BYTES :]


def _fields(*pairs: tuple[str, bytes]) -> bytes:
    """Encode tagged fields so that different lists never have one encoding."""
    tagged = ((_text(tag), value) for tag, value in pairs)
    return b"".join(struct.pack("<II", len(tag), len(value)) + tag + value for tag, value in tagged)


def _text(value: str) -> bytes:
    """Encode text one-to-one, lone surrogates too: JSON lets a client send them in a salt."""
    return value.encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheNamespace:
    """Everything fixed for one engine that changes the bytes of a chunk, besides layout and chunking.

    Attributes:
        model: Model id, for example "HuggingFaceTB/SmolLM2-135M-Instruct".
        weights_version: Revision or training step of the weights.
        parallel: Axis name to (rank, size), for example ``{"tp": (0, 4)}``. Leave out an axis whose ranks
            hold the same bytes (tensor parallelism under MLA), so that they share entries.
        extra: Anything else that changes the bytes, such as a quantisation recipe.
    """

    model: str = ""
    weights_version: str = ""
    parallel: Mapping[str, tuple[int, int]] = field(default_factory=lambda: MappingProxyType({}))
    extra: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        texts: list[object] = [self.model, self.weights_version, *self.extra.keys(), *self.extra.values()]
        for text in texts:
            if not isinstance(text, str):
                raise ConfigurationError(f"model, weights_version and extra must be text, got {text!r}")
        for axis, (rank, size) in self.parallel.items():
            if not 0 <= rank < size < 1 << 32:
                raise ConfigurationError(f"parallel axis {axis!r}: rank {rank} is not below size {size}")
        object.__setattr__(self, "parallel", MappingProxyType(dict(self.parallel)))
        object.__setattr__(self, "extra", MappingProxyType(dict(self.extra)))

    def encode(self) -> bytes:
        """Return the canonical encoding that enters the namespace id."""
        pairs = [("model", _text(self.model)), ("weights", _text(self.weights_version))]
        pairs += [(f"parallel.{a}", struct.pack("<II", *self.parallel[a])) for a in sorted(self.parallel)]
        pairs += [(f"extra.{name}", _text(self.extra[name])) for name in sorted(self.extra)]
        return _fields(*pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestScope:
    """Everything of one request besides its tokens that changes the bytes.

    Attributes:
        adapter: LoRA or other adapter name; None is the base model.
        adapter_version: Version of the adapter's weights.
        salt: Isolation salt, set by the trusted layer; entries of different salts are never shared.
        media: (token position, content digest) of each image or clip. A digest enters the chunk that holds
            its position, and through the chain everything after it. At least 16 bytes each.
    """

    adapter: str | None = None
    adapter_version: str | None = None
    salt: str | bytes | None = field(default=None, repr=False)
    media: Sequence[tuple[int, bytes]] = ()

    def __post_init__(self) -> None:
        kinds: dict[str, tuple[type, ...]] = {"adapter": (str,), "adapter_version": (str,), "salt": (str, bytes)}
        for name, kind in kinds.items():
            value: object = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise UsageError(f"{name} must be text, got {type(value).__name__}")

    def encode(self) -> bytes:
        """Return the canonical encoding of all fields but the media."""
        pairs: list[tuple[str, bytes]] = []
        if self.adapter is not None:
            pairs.append(("adapter", _text(self.adapter)))
        if self.adapter_version is not None:
            pairs.append(("adapter_version", _text(self.adapter_version)))
        if isinstance(self.salt, bytes):
            pairs.append(("salt.bytes", self.salt))
        elif self.salt is not None:
            pairs.append(("salt.text", _text(self.salt)))
        return _fields(*pairs)


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """The chunks of one prompt, in order: chunk ``i`` holds tokens ``[stops[i-1], stops[i])``."""

    keys: Sequence[ChunkKey]
    stops: Sequence[int]

    def span(self, index: int) -> tuple[int, int]:
        """Return the half-open token range of one chunk."""
        return (self.stops[index - 1] if index else 0), self.stops[index]

    def tokens_before(self, index: int) -> int:
        """Return the tokens in the first `index` chunks."""
        return self.stops[index - 1] if index else 0


class KeySchema:
    """Turns prompts into chunk keys for one namespace. Immutable; safe from any thread."""

    def __init__(
        self, *, namespace: CacheNamespace, layout: KVLayout, chunker: Chunker, algorithm: str = "sha256"
    ) -> None:
        if algorithm not in HASHES:
            raise ConfigurationError(f"key_hash {algorithm!r} is not known; use one of {', '.join(HASHES)}")
        self.namespace = namespace
        self.layout = layout
        self.chunker = chunker
        self.algorithm = algorithm
        self._hash = HASHES[algorithm]
        identity = _fields(
            ("schema", struct.pack("<I", KEY_SCHEMA)),
            ("namespace", namespace.encode()),
            ("layout", layout.digest),
            ("chunker", chunker.name.encode()),
            ("hash", algorithm.encode()),
        )
        self.namespace_id = NamespaceId(hashlib.sha256(identity).digest()[:NAMESPACE_ID_BYTES])

    def __repr__(self) -> str:
        return f"<KeySchema {self.namespace_id.hex()} {self.namespace.model!r} {self.chunker.name} {self.algorithm}>"

    def describe(self) -> dict[str, object]:
        """Return what a manifest tells an operator about this namespace; no salt, no tokens."""
        return {
            "key_schema": KEY_SCHEMA,
            "namespace_id": self.namespace_id.hex(),
            "model": self.namespace.model,
            "weights_version": self.namespace.weights_version,
            "parallel": {axis: list(value) for axis, value in sorted(self.namespace.parallel.items())},
            "extra": dict(sorted(self.namespace.extra.items())),
            "chunker": self.chunker.name,
            "hash": self.algorithm,
            "layout": self.layout.digest.hex(),
            "layout_tag": self.layout.tag,
            "dtypes": [group.dtype for group in self.layout.groups],
            "token_bytes": self.layout.token_bytes,
        }

    def run(self, tokens: memoryview, scope: RequestScope) -> ChunkRun:
        """Return the chunks of a prompt.

        Args:
            tokens: Canonical tokens (`canonical_tokens`).
            scope: What else changes the bytes.

        Raises:
            UsageError: A media position lies outside the prompt, or its digest is too short.
        """
        stops = self.chunker.stops(tokens)
        media = self._media(scope, len(tokens) // 4)
        digest = self._hash(_fields(("namespace", self.namespace_id), ("scope", scope.encode())))
        keys: list[ChunkKey] = []
        hash_, prefix, start, next_media = self._hash, self.namespace_id, 0, 0
        for depth, stop in enumerate(stops):
            data = digest + (stop - start).to_bytes(4, "little") + tokens[start * 4 : stop * 4]
            if next_media < len(media) and media[next_media][0] < stop:
                first = next_media
                while next_media < len(media) and media[next_media][0] < stop:
                    next_media += 1
                data += _fields(*((f"media.{at}", value) for at, value in media[first:next_media]))
            digest = hash_(data)
            keys.append(ChunkKey(prefix + depth.to_bytes(4, "big") + digest))
            start = stop
        return ChunkRun(keys, stops)

    @staticmethod
    def _media(scope: RequestScope, num_tokens: int) -> list[tuple[int, bytes]]:
        media: list[tuple[int, bytes]] = []
        for at, value in cast("Sequence[tuple[object, object]]", scope.media):
            if not isinstance(at, SupportsIndex) or not 0 <= operator.index(at) < num_tokens:
                raise UsageError(f"media position {at!r} is outside the {num_tokens} tokens of the prompt")
            if not isinstance(value, bytes) or len(value) < MIN_MEDIA_DIGEST_BYTES:
                raise UsageError(f"media digest at {at} is {value!r}; give at least 16 bytes of a content hash")
            media.append((operator.index(at), value))
        return sorted(media)
