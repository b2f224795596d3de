"""Reading a frame that anyone may have written: the answer is right, or it is ChunkCorrupt."""

from __future__ import annotations

import contextlib
import struct

import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from akvcache.errors import ChunkCorrupt
from akvcache.frame import HEADER_BYTES, MAX_PARTS, frame_bytes, parse, seal, verify
from akvcache.keys import ChunkKey
from akvcache.layout import PAGE_BYTES
from akvcache.testing import aligned_buffer, make_keys, make_payload

KEY = make_keys(1)[0]
PARTS = (2000, 3001)

part_lists = st.lists(st.integers(0, 3000), max_size=MAX_PARTS).map(tuple)
key_bytes = st.binary(min_size=1, max_size=64).map(ChunkKey)


def sealed(parts: tuple[int, ...] = PARTS, key: ChunkKey = KEY, num_tokens: int = 5) -> memoryview:
    frame = aligned_buffer(frame_bytes(sum(parts)))
    frame[HEADER_BYTES : HEADER_BYTES + sum(parts)] = make_payload(sum(parts), len(parts))
    seal(frame, key=key, num_tokens=num_tokens, part_bytes=parts)
    return frame


def accepted(frame: bytes | bytearray) -> bool:
    """Return whether `frame` passes as what was sealed; anything but ChunkCorrupt fails the test."""
    try:
        verify(memoryview(frame), key=KEY, num_tokens=5, part_bytes=PARTS)
    except ChunkCorrupt:
        return False
    return True


@given(part_lists, key_bytes, st.integers(0, 2**32 - 1))
def test_whatever_is_sealed_is_read_back(parts: tuple[int, ...], key: ChunkKey, num_tokens: int) -> None:
    frame = sealed(parts, key, num_tokens)
    verify(frame, key=key, num_tokens=num_tokens, part_bytes=parts)
    header = parse(frame[:HEADER_BYTES])
    assert (header.key, header.num_tokens, header.part_bytes) == (key, num_tokens, parts)
    assert len(frame) == frame_bytes(header.payload_bytes)


@given(st.binary(max_size=200), st.integers(0, 3 * PAGE_BYTES))
@example(b"AKVF", HEADER_BYTES)
@example(b"", 0)
def test_arbitrary_bytes_are_corrupt(start: bytes, size: int) -> None:
    assert not accepted(start.ljust(size, b"\0"))
    assert not accepted((start * (1 + size // max(1, len(start))))[:size])


@settings(max_examples=300)
@given(st.integers(0, HEADER_BYTES + sum(PARTS) - 1), st.integers(1, 255))
def test_any_changed_byte_is_noticed(at: int, change: int) -> None:
    frame = bytearray(sealed())
    frame[at] ^= change
    assert not accepted(frame)


@given(st.integers(0, frame_bytes(sum(PARTS)) + 2 * PAGE_BYTES))
def test_any_other_length_is_noticed(size: int) -> None:
    frame = bytes(sealed())
    assert accepted(frame[:size].ljust(size, b"\0")) is (size == len(frame))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=4))
def test_pages_of_frames_never_mix(moves: list[tuple[int, int]]) -> None:
    original = bytes(sealed())
    frame = bytearray(original)
    for source, target in moves:
        frame[target * PAGE_BYTES : (target + 1) * PAGE_BYTES] = original[
            source * PAGE_BYTES : (source + 1) * PAGE_BYTES
        ]
    end = HEADER_BYTES + sum(PARTS)
    assert accepted(frame) is (frame[:end] == original[:end])


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 700), st.binary(min_size=1, max_size=8)), min_size=1, max_size=6))
def test_a_lying_header_with_a_right_checksum_never_gets_past(changes: list[tuple[int, bytes]]) -> None:
    """Its author knows the format: only what agrees with itself may be parsed, and only the sealed chunk verifies."""
    original = bytes(sealed())
    frame = bytearray(original)
    for at, data in changes:
        frame[at : at + len(data)] = data
    frame[8:16] = bytes(8)
    frame[8:16] = struct.pack("<Q", xxhash.xxh3_64_intdigest(frame[:HEADER_BYTES]))
    with contextlib.suppress(ChunkCorrupt):
        header = parse(frame)
        assert sum(header.part_bytes) == header.payload_bytes
        assert len(header.part_bytes) <= MAX_PARTS
        assert len(header.key) <= 64
    if accepted(frame):
        assert frame[HEADER_BYTES:] == original[HEADER_BYTES:]
        assert parse(frame) == parse(original)
