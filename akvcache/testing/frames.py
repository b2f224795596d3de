"""Keys, buffers and sealed frames to test with."""

from __future__ import annotations

import hashlib
import mmap
from typing import Final

from akvcache.frame import HEADER_BYTES, frame_bytes, seal
from akvcache.keys import ChunkKey, NamespaceId, namespace_of
from akvcache.layout import PAGE_BYTES

__all__ = ("aligned_buffer", "make_frame", "make_keys", "make_namespace_id", "make_payload")

_NAMESPACE_ID_BYTES: Final = len(namespace_of(ChunkKey(bytes(64))))


def aligned_buffer(nbytes: int) -> memoryview:
    """Return `nbytes` writable, page-aligned, zeroed bytes: what a host slot looks like to a backend."""
    return memoryview(mmap.mmap(-1, nbytes))[:nbytes]


def make_namespace_id(label: str = "test") -> NamespaceId:
    """Return a namespace id that depends on `label` only."""
    return NamespaceId(hashlib.sha256(label.encode()).digest()[:_NAMESPACE_ID_BYTES])


def make_keys(count: int, *, label: str = "", namespace: str = "test", digest_bytes: int = 32) -> list[ChunkKey]:
    """Return the keys of one prefix of `count` chunks, depth 0 first.

    Args:
        count: How many.
        label: Names the prompt; other labels give other keys.
        namespace: Label of the namespace id.
        digest_bytes: Length of the chained digest: 32 as SHA-256 gives, 16 as xxh3-128 gives.
    """
    prefix = make_namespace_id(namespace)
    digests = (hashlib.sha256(f"{label}/{depth}".encode()).digest()[:digest_bytes] for depth in range(count))
    return [ChunkKey(prefix + depth.to_bytes(4, "big") + digest) for depth, digest in enumerate(digests)]


def make_payload(nbytes: int, seed: int = 0) -> bytes:
    """Return bytes that differ from page to page and from seed to seed."""
    pages = (f"{seed}/{page}|".encode() * PAGE_BYTES for page in range(-(-nbytes // PAGE_BYTES)))
    return b"".join(page[:PAGE_BYTES] for page in pages)[:nbytes]


def make_frame(key: ChunkKey, payload: bytes, num_tokens: int = 1) -> memoryview:
    """Return a sealed frame with one part in a page-aligned buffer of its own."""
    frame = aligned_buffer(frame_bytes(len(payload)))
    frame[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
    seal(frame, key=key, num_tokens=num_tokens, part_bytes=(len(payload),))
    return frame
