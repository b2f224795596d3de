"""File names: pure mapping between chunk keys and paths below the root.

A path is made of the hexadecimal digits of key bytes and of nothing else, so no model name, salt or adapter can
steer it. The names alone give the key back, which is why a directory needs no side index.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from akvcache.errors import UsageError
from akvcache.keys import ChunkKey, NamespaceId, depth_of, digest_of, namespace_of

__all__ = (
    "LOCK",
    "MANIFEST",
    "SPARE",
    "TMP",
    "USAGE",
    "ChunkPlace",
    "key_of",
    "namespace_in",
    "place_of",
)

MANIFEST: Final = "manifest.json"
SPARE: Final = "spare"
TMP: Final = "tmp"
LOCK: Final = "lock"
USAGE: Final = "usage"

_NAMESPACE: Final = re.compile(r"[0-9a-f]{32}")
_CHUNK: Final = re.compile(r"((?:[0-9a-f]{2})+)-(0|[1-9a-f][0-9a-f]{0,7})\.akv")


class ChunkPlace(NamedTuple):
    """Where a chunk lies: ``<root>/<namespace>/<fan_out>/<name>``."""

    namespace: str
    fan_out: str
    name: str


def place_of(key: ChunkKey) -> ChunkPlace:
    """Return where the chunk of `key` lies.

    Raises:
        UsageError: The key is too short to be a chunk key.
    """
    digest = digest_of(key).hex()
    if not digest:
        raise UsageError(f"{len(key)} bytes are too few for a chunk key")
    return ChunkPlace(namespace_of(key).hex(), digest[:2], f"{digest}-{depth_of(key):x}.akv")


def key_of(place: ChunkPlace) -> ChunkKey | None:
    """Return the key whose chunk belongs at `place`, or None if no chunk does."""
    match = _CHUNK.fullmatch(place.name)
    if match is None or match[1][:2] != place.fan_out:
        return None
    return ChunkKey(bytes.fromhex(place.namespace + match[2].rjust(8, "0") + match[1]))


def namespace_in(name: str) -> NamespaceId | None:
    """Return the namespace whose directory is called `name`, or None if it is none."""
    return NamespaceId(bytes.fromhex(name)) if _NAMESPACE.fullmatch(name) else None
