"""Layout arithmetic: sizes add up, runs tile the payload, digests tell layouts apart."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from akvcache.errors import ConfigurationError
from akvcache.layout import DTYPE_BYTES, KVLayout, LayerGroup, round_up

GQA = KVLayout.mha(num_layers=3, num_kv_heads=2, head_dim=16, dtype="bfloat16", block_tokens=16)
MLA = KVLayout.mla(num_layers=4, latent_dim=512, rope_dim=64, dtype="float16")
MIXED = KVLayout(
    groups=(
        LayerGroup(num_layers=2, plane_bytes=(64, 32), dtype="float16"),
        LayerGroup(num_layers=1, plane_bytes=(8,), dtype="float32"),
        LayerGroup(num_layers=3, plane_bytes=(4, 4, 4), dtype="uint8"),
    ),
    tag="mixed",
)


@pytest.mark.parametrize(("value", "rounded"), [(0, 0), (1, 8), (7, 8), (8, 8), (9, 16)])
def test_round_up(value: int, rounded: int) -> None:
    assert round_up(value, 8) == rounded


def test_bytes_of_a_token() -> None:
    assert GQA.token_bytes == 3 * 2 * 2 * 16 * 2
    assert MLA.token_bytes == 4 * 576 * 2
    assert MIXED.token_bytes == 2 * 96 + 8 + 3 * 12


def test_bytes_of_a_chunk_and_of_its_parts() -> None:
    assert MIXED.payload_bytes(10) == 10 * MIXED.token_bytes
    assert MIXED.part_bytes(10) == (1920, 80, 360)
    assert sum(MIXED.part_bytes(7)) == MIXED.payload_bytes(7)
    assert GQA.payload_bytes(0) == 0


@pytest.mark.parametrize("layout", [GQA, MLA, MIXED])
@pytest.mark.parametrize("num_tokens", [1, 16, 33])
def test_runs_tile_the_payload_in_order(layout: KVLayout, num_tokens: int) -> None:
    runs = [
        layout.run(group, layer, plane, num_tokens)
        for group, shape in enumerate(layout.groups)
        for layer in range(shape.num_layers)
        for plane in range(len(shape.plane_bytes))
    ]
    assert runs[0][0] == 0
    assert runs[-1][1] == layout.payload_bytes(num_tokens)
    assert all(before[1] == after[0] for before, after in pairwise(runs))
    assert all(stop > start for start, stop in runs)


def test_a_run_is_as_long_as_its_plane() -> None:
    start, stop = MIXED.run(0, 1, 1, 5)
    assert (start, stop) == (96 * 5 + 64 * 5, 96 * 5 + 96 * 5)


def test_digests_tell_layouts_apart() -> None:
    base = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "dtype": "float16"}
    layouts = [
        KVLayout.mha(**base),
        KVLayout.mha(**base | {"num_layers": 3}),
        KVLayout.mha(**base | {"num_kv_heads": 4, "head_dim": 4}),
        KVLayout.mha(**base | {"head_dim": 16}),
        KVLayout.mha(**base, block_tokens=2),
        KVLayout.mha(**base, tag="HND"),
        KVLayout.mla(num_layers=2, latent_dim=8, rope_dim=8, dtype="float16"),
        KVLayout.mla(num_layers=2, latent_dim=10, rope_dim=6, dtype="float16"),
        *(KVLayout.mha(**base | {"dtype": dtype}) for dtype in DTYPE_BYTES if dtype != "float16"),
        KVLayout(groups=MIXED.groups, tag="other"),
        KVLayout(groups=MIXED.groups[::-1], tag="mixed"),
        KVLayout(groups=MIXED.groups[:2], tag="mixed"),
        KVLayout(groups=MIXED.groups, tag="mixed|1"),
        KVLayout(groups=MIXED.groups, tag="mixed\n2|64,32|float16"),
        MIXED,
    ]
    assert len({layout.digest for layout in layouts}) == len(layouts)


def test_a_layer_group_split_in_two_is_another_layout() -> None:
    one = LayerGroup(num_layers=2, plane_bytes=(4,), dtype="uint8")
    two = LayerGroup(num_layers=1, plane_bytes=(4,), dtype="uint8")
    assert KVLayout(groups=(one,)).payload_bytes(3) == KVLayout(groups=(two, two)).payload_bytes(3)
    assert KVLayout(groups=(one,)).digest != KVLayout(groups=(two, two)).digest


def test_a_digest_never_changes() -> None:
    assert GQA.digest.hex() == "61346daed7abff5a695d24640b4deda3b50e4e808f8601de107b6b3270b8f810"


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: LayerGroup(num_layers=0, plane_bytes=(4,), dtype="uint8"), "num_layers must be at least 1, got 0"),
        (lambda: LayerGroup(num_layers=1, plane_bytes=(), dtype="uint8"), "plane_bytes must be positive"),
        (lambda: LayerGroup(num_layers=1, plane_bytes=(4, 0), dtype="uint8"), "plane_bytes must be positive"),
        (lambda: LayerGroup(num_layers=1, plane_bytes=(4,), dtype="int4"), "dtype 'int4' is not known"),
        (lambda: KVLayout(groups=()), "at least one layer group"),
        (lambda: KVLayout(groups=MIXED.groups, block_tokens=0), "block_tokens must be at least 1, got 0"),
        (lambda: KVLayout.mha(num_layers=1, num_kv_heads=1, head_dim=8, dtype="half"), "dtype 'half' is not known"),
        (lambda: KVLayout.mla(num_layers=1, latent_dim=1, rope_dim=8, dtype="half"), "dtype 'half' is not known"),
        (lambda: KVLayout.mha(num_layers=1, num_kv_heads=0, head_dim=8, dtype="uint8"), "plane_bytes must be positive"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(make: Callable[[], object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        make()
