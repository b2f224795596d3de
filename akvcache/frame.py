"""What a tier stores for one chunk: a 4 KiB header block, then the payload, padded to 4 KiB.

::

    0      4   6     8        16           32            40          44       46        48
    | AKVF | v | pad | header | payload    | payload     | number of | key    | number  | key, zero padded
    |      |   |     | xxh3   | xxh3-128   | bytes       | tokens    | length | of parts| to 64 bytes
    112                                                  4096
    | part lengths, 8 bytes each, zeros                  | payload, zeros to the next 4 KiB ...

A frame describes itself: key, length and checksum are inside, so a tier can be rebuilt, verified and
garbage-collected with no side index, and the header, not the name of the file or object, is authoritative. A host
slot holds a whole frame, so a tier reads and writes it with no copy. All integers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from akvcache.errors import ChunkCorrupt
from akvcache.keys import ChunkKey
from akvcache.layout import PAGE_BYTES, round_up

__all__ = (
    "FORMAT_VERSION",
    "HEADER_BYTES",
    "MAX_PARTS",
    "FrameHeader",
    "frame_bytes",
    "parse",
    "seal",
    "verify",
)

HEADER_BYTES: Final = PAGE_BYTES
FORMAT_VERSION: Final = 1
MAX_KEY_BYTES: Final = 64
MAX_PARTS: Final = 64
_MAGIC: Final = b"AKVF"
_FIXED: Final = struct.Struct("<4sHHQ16sQIHH64s")
_CHECKSUM: Final = slice(8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameHeader:
    """The parsed header of one frame."""

    key: ChunkKey
    num_tokens: int
    payload_bytes: int
    part_bytes: tuple[int, ...]
    payload_digest: bytes


def frame_bytes(payload_bytes: int) -> int:
    """Return the size of a frame with such a payload: header, payload and padding."""
    return HEADER_BYTES + round_up(payload_bytes, PAGE_BYTES)


def seal(frame: memoryview, *, key: ChunkKey, num_tokens: int, part_bytes: Sequence[int]) -> None:
    """Write header and padding around the payload that already lies in `frame`.

    Blocking: hashes the payload (about 0.1 s per GB). Run it off the loop.

    Args:
        frame: Exactly `frame_bytes` of the payload, writable.
        key: The key the payload belongs to.
        num_tokens: Tokens in the chunk.
        part_bytes: Lengths of the parts; their sum is the payload.
    """
    payload_bytes = sum(part_bytes)
    end = HEADER_BYTES + payload_bytes
    frame[end:] = bytes(len(frame) - end)
    digest = xxhash.xxh3_128_digest(frame[HEADER_BYTES:end])
    fixed = _FIXED.pack(_MAGIC, FORMAT_VERSION, 0, 0, digest, payload_bytes, num_tokens, len(key), len(part_bytes), key)
    block = bytearray(HEADER_BYTES)
    block[: len(fixed)] = fixed
    struct.pack_into(f"<{len(part_bytes)}Q", block, len(fixed), *part_bytes)
    block[_CHECKSUM] = struct.pack("<Q", xxhash.xxh3_64_intdigest(block))
    frame[:HEADER_BYTES] = block


def parse(block: bytes | memoryview) -> FrameHeader:
    """Return the header in the first `HEADER_BYTES` of `block`.

    Sizes are checked against each other here, before anything is allocated by them.

    Raises:
        ChunkCorrupt: The block is not a valid header of this format version.
    """
    if len(block) < HEADER_BYTES:
        raise ChunkCorrupt(f"frame has {len(block)} bytes, shorter than its header")
    raw = bytearray(block[:HEADER_BYTES])
    magic, version, _, checksum, digest, payload, tokens, key_len, parts, key = _FIXED.unpack_from(raw)
    raw[_CHECKSUM] = bytes(8)
    if magic != _MAGIC:
        raise ChunkCorrupt("frame does not begin with the magic of akvcache")
    if version != FORMAT_VERSION:
        raise ChunkCorrupt(f"frame has format version {version}, this build reads {FORMAT_VERSION}")
    if xxhash.xxh3_64_intdigest(raw) != checksum:
        raise ChunkCorrupt("frame header does not match its checksum")
    if key_len > MAX_KEY_BYTES or parts > MAX_PARTS:
        raise ChunkCorrupt(f"frame header claims a key of {key_len} bytes and {parts} parts")
    lengths: tuple[int, ...] = struct.unpack_from(f"<{parts}Q", raw, _FIXED.size)
    if sum(lengths) != payload:
        raise ChunkCorrupt(f"frame parts sum to {sum(lengths)} bytes, payload is {payload}")
    return FrameHeader(
        key=ChunkKey(key[:key_len]),
        num_tokens=tokens,
        payload_bytes=payload,
        part_bytes=lengths,
        payload_digest=digest,
    )


def verify(frame: memoryview, *, key: ChunkKey, num_tokens: int, part_bytes: Sequence[int]) -> None:
    """Prove that `frame` is what was sealed under `key`.

    Blocking: hashes the payload. Run it off the loop.

    Raises:
        ChunkCorrupt: Any field or the payload differs from what is expected.
    """
    header = parse(frame)
    if header.key != key:
        raise ChunkCorrupt("frame belongs to another key", key=key)
    if header.num_tokens != num_tokens or header.part_bytes != tuple(part_bytes):
        raise ChunkCorrupt(
            f"frame holds {header.num_tokens} tokens in parts {header.part_bytes}, "
            f"expected {num_tokens} in {tuple(part_bytes)}",
            key=key,
        )
    if len(frame) != frame_bytes(header.payload_bytes):
        raise ChunkCorrupt(f"frame has {len(frame)} bytes, expected {frame_bytes(header.payload_bytes)}", key=key)
    if xxhash.xxh3_128_digest(frame[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]) != header.payload_digest:
        raise ChunkCorrupt("payload does not match its checksum", key=key)
