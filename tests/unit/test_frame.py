"""Frames: what is sealed verifies, and any single difference is noticed."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
import xxhash

from akvcache.errors import ChunkCorrupt
from akvcache.frame import FORMAT_VERSION, HEADER_BYTES, MAX_PARTS, frame_bytes, parse, seal, verify
from akvcache.layout import PAGE_BYTES
from akvcache.testing import aligned_buffer, make_keys, make_payload

KEY, OTHER = make_keys(2)
PARTS = (3000, 2000, 1)


def sealed(parts: tuple[int, ...] = PARTS, num_tokens: int = 7) -> memoryview:
    frame = aligned_buffer(frame_bytes(sum(parts)))
    frame[HEADER_BYTES : HEADER_BYTES + sum(parts)] = make_payload(sum(parts))
    seal(frame, key=KEY, num_tokens=num_tokens, part_bytes=parts)
    return frame


def rechecksummed(frame: memoryview, change: Callable[[bytearray], None]) -> bytes:
    """Return the header with a change and a checksum that agrees with it."""
    block = bytearray(frame[:HEADER_BYTES])
    change(block)
    block[8:16] = bytes(8)
    block[8:16] = struct.pack("<Q", xxhash.xxh3_64_intdigest(block))
    return bytes(block)


@pytest.mark.parametrize(
    ("payload", "size"), [(0, 4096), (1, 8192), (4096, 8192), (4097, 12288), (1 << 20, 4096 + (1 << 20))]
)
def test_the_size_of_a_frame(payload: int, size: int) -> None:
    assert frame_bytes(payload) == size


@pytest.mark.parametrize("parts", [PARTS, (1,), (PAGE_BYTES,), (0,), (), (1,) * MAX_PARTS])
def test_what_is_sealed_verifies(parts: tuple[int, ...]) -> None:
    frame = sealed(parts)
    verify(frame, key=KEY, num_tokens=7, part_bytes=parts)
    header = parse(frame)
    assert (header.key, header.num_tokens, header.payload_bytes) == (KEY, 7, sum(parts))
    assert header.part_bytes == parts
    assert header.payload_digest == xxhash.xxh3_128_digest(make_payload(sum(parts)))
    assert bytes(frame[HEADER_BYTES : HEADER_BYTES + sum(parts)]) == make_payload(sum(parts))


def test_the_header_is_where_the_docstring_says() -> None:
    frame = bytes(sealed())
    assert frame[:4] == b"AKVF"
    assert struct.unpack_from("<HH", frame, 4) == (FORMAT_VERSION, 0)
    assert frame[16:32] == xxhash.xxh3_128_digest(frame[HEADER_BYTES : HEADER_BYTES + 5001])
    assert struct.unpack_from("<QIHH", frame, 32) == (5001, 7, len(KEY), 3)
    assert frame[48 : 48 + len(KEY)] == KEY
    assert struct.unpack_from("<3Q", frame, 112) == PARTS
    assert not any(frame[112 + 24 : HEADER_BYTES])
    assert struct.unpack_from("<Q", frame, 8)[0] == xxhash.xxh3_64_intdigest(frame[:8] + bytes(8) + frame[16:4096])


def test_a_released_format_never_changes() -> None:
    assert xxhash.xxh3_128_hexdigest(sealed()) == "b78917a29fdfdf80b85394977a121f32"


def test_sealing_clears_what_an_older_chunk_left_behind() -> None:
    frame = aligned_buffer(frame_bytes(5001))
    frame[:] = b"\xff" * len(frame)
    seal(frame, key=KEY, num_tokens=7, part_bytes=PARTS)
    assert not any(frame[HEADER_BYTES + 5001 :])
    assert not any(frame[112 + 24 : HEADER_BYTES])


def test_the_header_alone_can_be_parsed() -> None:
    assert parse(bytes(sealed()[:HEADER_BYTES])) == parse(sealed())


def test_any_flipped_bit_of_the_header_is_noticed() -> None:
    frame = sealed()
    for at in range(HEADER_BYTES):
        frame[at] ^= 1 << at % 8
        with pytest.raises(ChunkCorrupt):
            parse(frame)
        frame[at] ^= 1 << at % 8
    verify(frame, key=KEY, num_tokens=7, part_bytes=PARTS)


@pytest.mark.parametrize("at", [0, 1, 2999, 3000, 5000])
def test_any_flipped_bit_of_the_payload_is_noticed(at: int) -> None:
    frame = sealed()
    frame[HEADER_BYTES + at] ^= 1
    assert parse(frame).payload_bytes == 5001
    with pytest.raises(ChunkCorrupt, match="payload does not match its checksum") as caught:
        verify(frame, key=KEY, num_tokens=7, part_bytes=PARTS)
    assert caught.value.key == KEY


@pytest.mark.parametrize("size", [0, 1, 112, HEADER_BYTES - 1])
def test_less_than_a_header_is_noticed(size: int) -> None:
    with pytest.raises(ChunkCorrupt, match=f"frame has {size} bytes, shorter than its header"):
        parse(sealed()[:size])


@pytest.mark.parametrize("size", [HEADER_BYTES, frame_bytes(5001) - 1, frame_bytes(5001) + PAGE_BYTES])
def test_another_length_is_noticed(size: int) -> None:
    frame = (bytes(sealed()) + bytes(PAGE_BYTES))[:size]
    with pytest.raises(ChunkCorrupt, match=f"frame has {size} bytes, expected {frame_bytes(5001)}"):
        verify(memoryview(frame), key=KEY, num_tokens=7, part_bytes=PARTS)


def test_the_frame_of_another_key_is_noticed() -> None:
    with pytest.raises(ChunkCorrupt, match="another key"):
        verify(sealed(), key=OTHER, num_tokens=7, part_bytes=PARTS)


@pytest.mark.parametrize(
    ("num_tokens", "parts"), [(8, PARTS), (7, (3000, 2001)), (7, (2000, 3000, 1)), (7, (*PARTS, 0)), (7, (5001,))]
)
def test_other_sizes_than_expected_are_noticed(num_tokens: int, parts: tuple[int, ...]) -> None:
    with pytest.raises(ChunkCorrupt, match="frame holds 7 tokens in parts"):
        verify(sealed(), key=KEY, num_tokens=num_tokens, part_bytes=parts)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda block: struct.pack_into("<4s", block, 0, b"AKVG"), "magic"),
        (lambda block: struct.pack_into("<H", block, 4, 2), "format version 2, this build reads 1"),
        (lambda block: struct.pack_into("<Q", block, 32, 5002), "parts sum to 5001 bytes, payload is 5002"),
        (lambda block: struct.pack_into("<Q", block, 112, 2**63), "parts sum to"),
        (lambda block: struct.pack_into("<H", block, 44, 65), "a key of 65 bytes"),
        (lambda block: struct.pack_into("<H", block, 46, MAX_PARTS + 1), f"{MAX_PARTS + 1} parts"),
        (lambda block: struct.pack_into("<H", block, 46, 65535), "65535 parts"),
    ],
)
def test_a_header_that_lies_with_a_right_checksum_is_noticed(change: Callable[[bytearray], None], named: str) -> None:
    with pytest.raises(ChunkCorrupt, match=named):
        parse(rechecksummed(sealed(), change))


def test_a_foreign_file_is_noticed() -> None:
    with pytest.raises(ChunkCorrupt, match="magic"):
        parse(bytes(HEADER_BYTES))
