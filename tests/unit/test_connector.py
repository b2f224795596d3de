"""CPU connectors: what is gathered is scattered back, and nothing else is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from akvcache.connector import KVConnector, NullConnector, PagedConnector, Span, TensorConnector
from akvcache.errors import ConfigurationError, UsageError
from akvcache.layout import KVLayout

BLOCKS, BLOCK, LAYERS, HEADS, DIM = 12, 4, 3, 2, 8
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.float8_e4m3fn]


def random_bits(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return every bit pattern, NaNs too: a cache moves bytes, not numbers."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def paged(
    dtype: torch.dtype, seed: int = 0, *, block: int = BLOCK, heads: int = HEADS
) -> list[tuple[torch.Tensor, ...]]:
    shape = (BLOCKS * BLOCK // block, block, heads, DIM)
    return [tuple(random_bits(shape, dtype, seed + 2 * layer + plane) for plane in (0, 1)) for layer in range(LAYERS)]


def contiguous(dtype: torch.dtype, num_tokens: int, seed: int = 0) -> list[tuple[torch.Tensor, ...]]:
    shape = (1, HEADS, num_tokens, DIM)
    return [tuple(random_bits(shape, dtype, seed + 2 * layer + plane) for plane in (0, 1)) for layer in range(LAYERS)]


def payloads(connector: KVConnector[torch.Tensor], spans: Sequence[Span]) -> list[memoryview]:
    return [memoryview(bytearray(connector.layout.payload_bytes(stop - start))) for start, stop in spans]


def rows(plane: torch.Tensor) -> torch.Tensor:
    return bits(plane.reshape(-1, *plane.shape[2:]))


SCRAMBLED = torch.randperm(BLOCKS * BLOCK, generator=torch.Generator().manual_seed(5))
SLOTS = {
    "blocks in order": torch.arange(24),
    "blocks shuffled": torch.tensor(
        [slot for block in (7, 2, 9, 0, 11, 4) for slot in range(4 * block, 4 * block + 4)]
    ),
    "starts inside a block": torch.arange(2, 26),
    "every other slot": torch.arange(0, 48, 2),
    "backwards": torch.arange(23, -1, -1),
    "scrambled": SCRAMBLED[:24],
    "a view with strides": SCRAMBLED[:48].reshape(24, 2)[:, 0],
}
SPANS = {
    "one chunk": [(0, 24)],
    "chunks of blocks": [(0, 8), (8, 16), (16, 24)],
    "not all": [(8, 16)],
    "out of order": [(16, 24), (0, 8)],
    "ragged": [(0, 7), (7, 8), (8, 21)],
}


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
def test_paged_chunks_come_back_and_nothing_else_is_written(slots: torch.Tensor, spans: list[Span]) -> None:
    source, target = paged(torch.bfloat16, seed=1), paged(torch.bfloat16, seed=50)
    before = [[rows(plane).clone() for plane in layer] for layer in target]
    gathering, scattering = PagedConnector(source), PagedConnector(target)
    gathering.check(slots, 24)
    chunks = payloads(gathering, spans)
    gathering.gather(slots, spans, chunks)
    scattering.scatter(slots, spans, [chunk.toreadonly() for chunk in chunks])
    moved = torch.cat([slots[start:stop] for start, stop in spans])
    untouched = torch.ones(BLOCKS * BLOCK, dtype=torch.bool)
    untouched[moved] = False
    for layer in range(LAYERS):
        for plane in (0, 1):
            assert torch.equal(rows(target[layer][plane])[moved], rows(source[layer][plane])[moved])
            assert torch.equal(rows(target[layer][plane])[untouched], before[layer][plane][untouched])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("block", "heads"), [(4, 2), (1, 1), (16, 8)])
def test_paged_chunks_of_any_dtype_and_head_count(dtype: torch.dtype, block: int, heads: int) -> None:
    source = paged(dtype, seed=1, block=block, heads=heads)
    target = paged(dtype, seed=50, block=block, heads=heads)
    slots, spans = torch.arange(48), [(0, 32), (32, 48)]
    chunks = payloads(PagedConnector(source), spans)
    PagedConnector(source).gather(slots, spans, chunks)
    PagedConnector(target).scatter(slots, spans, chunks)
    for mine, theirs in zip(target, source, strict=True):
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
def test_a_paged_chunk_lies_as_its_layout_says(slots: torch.Tensor) -> None:
    source = paged(torch.float16)
    connector = PagedConnector(source)
    [chunk] = payloads(connector, [(3, 19)])
    connector.gather(slots, [(3, 19)], [chunk])
    for layer in range(LAYERS):
        for plane in (0, 1):
            start, stop = connector.layout.run(0, layer, plane, 16)
            assert bytes(chunk[start:stop]) == rows(source[layer][plane])[slots[3:19]].numpy().tobytes()


def test_a_chunk_can_go_to_other_blocks() -> None:
    source, target = paged(torch.float32, seed=1), paged(torch.float32, seed=9)
    there, back = SLOTS["blocks shuffled"], SLOTS["every other slot"]
    [chunk] = payloads(PagedConnector(source), [(0, 24)])
    PagedConnector(source).gather(there, [(0, 24)], [chunk])
    PagedConnector(target).scatter(back, [(0, 24)], [chunk])
    assert torch.equal(rows(target[2][1])[back], rows(source[2][1])[there])


def test_the_slots_of_a_block_table() -> None:
    connector = PagedConnector(paged(torch.float16))
    assert connector.slots([3, 0], 7).tolist() == [12, 13, 14, 15, 0, 1, 2]
    assert connector.slots([3, 0], 8).dtype == torch.int64


def test_the_layout_of_a_paged_cache() -> None:
    expected = KVLayout.mha(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype="bfloat16", block_tokens=BLOCK)
    assert PagedConnector(paged(torch.bfloat16)).layout == expected


@pytest.mark.parametrize(
    ("kv", "num_tokens", "named"),
    [
        ([0, 1, 2, 3], 4, "kv must be a slot mapping .* got list"),
        (torch.arange(4, dtype=torch.int32), 4, "int64 slot mapping on the CPU, got torch.int32"),
        (torch.arange(4).reshape(2, 2), 4, r"got torch.int64 of \(2, 2\)"),
        (torch.zeros(4, dtype=torch.int64, device="meta"), 4, "on meta"),
        (torch.arange(4), 5, "slot mapping has 4 slots, the request has 5 tokens"),
        (torch.tensor([0, 48]), 2, r"slots outside 0\.\.47"),
        (torch.tensor([-1, 0]), 2, r"slots outside 0\.\.47"),
    ],
)
def test_a_wrong_slot_mapping_is_named(kv: torch.Tensor, num_tokens: int, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        PagedConnector(paged(torch.float16)).check(kv, num_tokens)


def test_a_slot_mapping_may_be_longer_or_empty() -> None:
    connector = PagedConnector(paged(torch.float16))
    connector.check(torch.arange(40), 24)
    connector.check(torch.arange(0), 0)


def with_layer(layer: tuple[torch.Tensor, ...]) -> list[tuple[torch.Tensor, ...]]:
    return [paged(torch.float16)[0], layer]


SHAPE = (BLOCKS, BLOCK, HEADS, DIM)
GOOD = torch.zeros(SHAPE, dtype=torch.float16)


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        ([], "at least one layer"),
        ([(torch.zeros(12, 4, 16),) * 2], r"layer 0 has shape \(12, 4, 16\), expected \[blocks"),
        ([(torch.zeros(0, 4, 2, 8),) * 2], r"layer 0 has shape \(0, 4, 2, 8\), expected \[blocks"),
        (with_layer((GOOD, torch.zeros(12, 4, 2, 9, dtype=torch.float16))), r"layer 1 is \(12, 4, 2, 9\)"),
        (with_layer((GOOD.bfloat16(), GOOD)), "layer 1 is .* of torch.bfloat16, layer 0 is .* of torch.float16"),
        (with_layer((GOOD, GOOD.transpose(1, 2).contiguous().transpose(1, 2))), "layer 1 must be a contiguous CPU"),
        ([(GOOD.to("meta"), GOOD)], "layer 0 must be a contiguous CPU tensor, it is on meta"),
        ([(torch.zeros(SHAPE, dtype=torch.int64),) * 2], "KV dtype torch.int64 is not supported; use one of float64"),
    ],
)
def test_a_wrong_paged_cache_is_named(layers: list[tuple[torch.Tensor, torch.Tensor]], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        PagedConnector(layers)


def tensor_connector(dtype: torch.dtype = torch.float16) -> TensorConnector:
    return TensorConnector(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_tensor_chunks_come_back_and_nothing_else_is_written(dtype: torch.dtype, spans: list[Span]) -> None:
    connector = tensor_connector(dtype)
    source, target = contiguous(dtype, 24, seed=1), contiguous(dtype, 30, seed=50)
    before = [[bits(plane).clone() for plane in layer] for layer in target]
    connector.check(source, 24)
    connector.check(target, 24)
    chunks = payloads(connector, spans)
    connector.gather(source, spans, chunks)
    connector.scatter(target, spans, [chunk.toreadonly() for chunk in chunks])
    moved = torch.zeros(30, dtype=torch.bool)
    for start, stop in spans:
        moved[start:stop] = True
    for layer in range(LAYERS):
        for plane in (0, 1):
            now = bits(target[layer][plane])
            assert torch.equal(now[:, :, moved], bits(source[layer][plane])[:, :, moved[:24]])
            assert torch.equal(now[:, :, ~moved], before[layer][plane][:, :, ~moved])


def test_a_tensor_chunk_keeps_heads_outermost() -> None:
    connector, source = tensor_connector(), contiguous(torch.float16, 24)
    [chunk] = payloads(connector, [(5, 9)])
    connector.gather(source, [(5, 9)], [chunk])
    start, stop = connector.layout.run(0, 1, 1, 4)
    assert bytes(chunk[start:stop]) == bits(source[1][1][0, :, 5:9]).numpy().tobytes()
    assert connector.layout.digest != PagedConnector(paged(torch.float16, block=1)).layout.digest


def test_transposed_tensors_as_models_keep_them() -> None:
    connector = tensor_connector()
    source = [
        tuple(plane.transpose(1, 2).contiguous().transpose(1, 2) for plane in layer)
        for layer in contiguous(torch.float16, 24)
    ]
    target = connector.empty(24)
    connector.check(source, 24)
    [chunk] = payloads(connector, [(0, 24)])
    connector.gather(source, [(0, 24)], [chunk])
    connector.scatter(target, [(0, 24)], [chunk])
    assert all(
        torch.equal(bits(a), bits(b))
        for mine, theirs in zip(target, source, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


def test_empty_kv_has_room() -> None:
    connector = tensor_connector()
    connector.check(connector.empty(7), 7)
    connector.check(connector.empty(0), 0)


def both(tensor: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(tensor, tensor)] * LAYERS


RIGHT = torch.zeros(1, HEADS, 24, DIM, dtype=torch.float16)


@pytest.mark.parametrize(
    ("kv", "named"),
    [
        (both(RIGHT)[:2], "kv has 2 layers, the layout has 3"),
        (both(RIGHT.bfloat16()), "layer 0 is .* of torch.bfloat16, expected .* of torch.float16"),
        (both(RIGHT[0]), r"layer 0 is \(2, 24, 8\)"),
        (both(RIGHT[None]), r"layer 0 is \(1, 1, 2, 24, 8\)"),
        (both(torch.zeros(2, HEADS, 24, DIM, dtype=torch.float16)), r"expected \(1, 2, tokens, 8\)"),
        (both(torch.zeros(1, 4, 24, DIM, dtype=torch.float16)), r"layer 0 is \(1, 4, 24, 8\)"),
        (both(torch.zeros(1, HEADS, 24, 9, dtype=torch.float16)), r"layer 0 is \(1, 2, 24, 9\)"),
        (both(RIGHT[:, :, :23]), "layer 0 has room for 23 tokens, the request has 24"),
        ([*both(RIGHT)[:2], (RIGHT, RIGHT[:, :, :5])], "layer 2 has room for 5 tokens"),
        (both(RIGHT.to("meta")), "layer 0 is on meta"),
        (both(torch.zeros(1, HEADS, 24, 2 * DIM, dtype=torch.float16)[..., ::2]), "last dimension contiguous"),
    ],
)
def test_wrong_tensors_are_named(kv: list[tuple[torch.Tensor, torch.Tensor]], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        tensor_connector().check(kv, 24)


@pytest.mark.parametrize("move", ["gather", "scatter"])
def test_spans_and_chunks_come_in_pairs(move: str) -> None:
    connector, kv = tensor_connector(), contiguous(torch.float16, 24)
    pages = PagedConnector(paged(torch.float16))
    moves: list[Callable[[], None]] = [
        lambda: getattr(connector, move)(kv, [(0, 8)], []),
        lambda: getattr(pages, move)(torch.arange(24), [(0, 8)], []),
    ]
    for call in moves:
        with pytest.raises(ValueError, match="shorter"):
            call()


def test_the_null_connector_moves_nothing() -> None:
    connector = NullConnector(PagedConnector(paged(torch.float16)).layout)
    chunk = memoryview(bytearray(b"\x07" * 64))
    connector.check(None, 10**9)
    connector.gather(None, [(0, 1)], [chunk])
    connector.scatter(None, [(0, 1)], [chunk])
    assert bytes(chunk) == b"\x07" * 64
    assert "192 bytes per token" in repr(connector)
