"""Tokens and masks: every container and width gives one form, everything else is refused by name."""

from __future__ import annotations

import array
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from akvcache.errors import UsageError
from akvcache.tokens import TokenSequence, canonical_tokens, masked_head

TOKENS = list(range(100, 164))


@pytest.mark.parametrize(
    "tokens",
    [
        tuple(TOKENS),
        range(100, 164),
        array.array("H", TOKENS),
        array.array("I", TOKENS),
        array.array("q", TOKENS),
        *(np.array(TOKENS, dtype=dtype) for dtype in ("u1", "i2", "u2", "<i4", ">i4", "<u4", ">u4", "<i8", ">u8")),
        *(torch.tensor(TOKENS, dtype=dtype) for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64)),
        *(torch.tensor(TOKENS, dtype=dtype) for dtype in (torch.uint16, torch.uint32, torch.uint64)),
        np.repeat(np.array(TOKENS), 2)[::2],
        torch.tensor(TOKENS).repeat_interleave(2)[::2],
        [np.int64(token) for token in TOKENS],
        [torch.tensor(token) for token in TOKENS],
    ],
    ids=lambda tokens: f"{type(tokens).__name__}-{getattr(tokens, 'dtype', getattr(tokens, 'typecode', ''))}",
)
def test_container_and_width_do_not_change_a_token(tokens: TokenSequence) -> None:
    assert canonical_tokens(tokens) == canonical_tokens(TOKENS)


def test_the_canonical_form_is_little_endian_uint32() -> None:
    assert bytes(canonical_tokens([1, 0x01020304, 2**32 - 1])) == b"\x01\0\0\0\x04\x03\x02\x01\xff\xff\xff\xff"
    assert bytes(canonical_tokens(np.array([2**32 - 1], dtype=np.int64))) == b"\xff\xff\xff\xff"


@pytest.mark.parametrize("empty", [[], (), range(0), array.array("i"), np.zeros(0, np.int64), torch.zeros(0).long()])
def test_no_tokens_are_no_chunks(empty: TokenSequence) -> None:
    assert len(canonical_tokens(empty)) == 0


def test_a_list_longer_than_one_conversion_step() -> None:
    tokens = np.arange(200_001)
    assert canonical_tokens(tokens.tolist()) == canonical_tokens(tokens)


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        ([1, -1, 2], "token -1 "),
        ([1, 2**32], "token 4294967296 "),
        ([2**80], f"token {2**80} "),
        ([1, 2.0], "token 2.0 "),
        ([1.5], "token 1.5 "),
        ([1, True], "token True "),
        ([False, 5], "token False "),
        ([1, None], "token None "),
        (["7"], "token '7' "),
        ([[1, 2], [3, 4]], r"token \[1, 2\] "),
        ([np.array([1, 2])], r"token array\(\[1, 2\]\) "),
        ([torch.tensor([1, 2])], r"token tensor\(\[1, 2\]\) "),
        ([np.float64(1)], r"token np.float64\(1.0\) "),
        ([np.True_], "token np.True_ "),
        (range(-2, 3), "token -2 "),
        ("abc", "got str"),
        (b"abc", "got bytes"),
        (bytearray(b"abc"), "got bytearray"),
        (memoryview(b"abc"), "got memoryview"),
        (5, "got int"),
        (None, "got NoneType"),
        ({1, 2}, "got set"),
        ({1: 2}, "got dict"),
        (iter([1, 2]), "got list_iterator"),
        (deque([1, 2]), "got deque"),
        (array.array("d", [1.0]), "an array of float64"),
        (np.array([1.0]), "an array of float64"),
        (np.array([True]), "an array of bool"),
        (np.array(["1"]), "an array of <U1"),
        (np.array([1, None]), "an array of object"),
        (np.array([[1, 2]]), r"shape \(1, 2\)"),
        (np.array(1), r"shape \(\)"),
        (np.array([1, -5, 3]), "token -5 "),
        (np.array([2**32]), "token 4294967296 "),
        (np.array([2**63], dtype=np.uint64), "token 9223372036854775808 "),
        (torch.tensor([1.0]), "a tensor of torch.float32"),
        (torch.tensor([1.0], dtype=torch.bfloat16), "a tensor of torch.bfloat16"),
        (torch.tensor([1j]), "a tensor of torch.complex64"),
        (torch.tensor([True]), "a tensor of torch.bool"),
        (torch.tensor([[1, 2]]), r"shape \(1, 2\)"),
        (torch.tensor(1), r"shape \(\)"),
        (torch.tensor([3, -9]), "token -9 "),
        (torch.tensor([2**40]), f"token {2**40} "),
    ],
    ids=repr,
)
def test_wrong_tokens_are_named(tokens: TokenSequence, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        canonical_tokens(tokens)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
@pytest.mark.parametrize("head", [0, 1, 4, 7, 8])
def test_a_mask_says_how_long_its_head_is(kind: Callable[[list[bool]], Sequence[bool]], head: int) -> None:
    assert masked_head(kind([False] * head + [True] * (8 - head)), 8) == head


def test_no_mask_and_an_empty_one() -> None:
    assert masked_head(None, 5) == 0
    assert masked_head([], 0) == 0
    assert masked_head(np.zeros(0, dtype=bool), 0) == 0
    assert masked_head(torch.zeros(0, dtype=torch.bool), 0) == 0
    assert masked_head([np.True_, np.True_], 2) == 0


@pytest.mark.parametrize(
    ("mask", "named"),
    [
        ([True, False, True], "mask is False at 1 after True at 0"),
        ([True, True, False], "mask is False at 2 after True at 0"),
        ([False, True, False], "mask is False at 2 after True at 1"),
        (torch.tensor([False, True, False]), "mask is False at 2 after True at 1"),
        ([True, True], "mask has length 2, tokens have length 3"),
        ([True] * 4, "mask has length 4, tokens have length 3"),
        ([], "mask has length 0, tokens have length 3"),
        ([0, 1, 1], "booleans"),
        ([True, 1, True], "booleans"),
        ([0.0, 1.0, 1.0], "booleans"),
        ([True, None, True], "booleans"),
        (["F", "T", "T"], "booleans"),
        ([[True, True, True]], "booleans"),
        ([[True], [True, True]], "nested sequences"),
        (np.ones(3, dtype=np.int8), "booleans, got int8"),
        (np.ones((3, 1), dtype=bool), "booleans"),
        (np.ones(3, dtype=object), "booleans"),
        (torch.ones(3), "booleans, got a tensor of torch.float32"),
        (torch.ones(3, dtype=torch.bfloat16), "booleans, got a tensor of torch.bfloat16"),
        (torch.ones(3, dtype=torch.uint8), "booleans, got a tensor of torch.uint8"),
        (torch.ones(1, 3, dtype=torch.bool), "booleans"),
        ("FTT", "booleans"),
        (True, "booleans"),
        (3, "booleans"),
    ],
    ids=repr,
)
def test_a_malformed_mask_is_refused(mask: Sequence[bool], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        masked_head(mask, 3)
