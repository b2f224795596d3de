"""Token ids and masks as callers give them, made canonical or refused."""

from __future__ import annotations

import array
import operator
from collections.abc import Sequence
from typing import Final, SupportsIndex, cast

import numpy as np
import torch

from akvcache.errors import UsageError

__all__ = ("MAX_TOKEN", "Mask", "TokenSequence", "canonical_tokens", "is_token", "masked_head")

TokenSequence = Sequence[int] | np.ndarray | torch.Tensor
"""Token ids as a list, tuple, range, `array.array`, NumPy array or torch tensor of any integer width."""

Mask = Sequence[bool] | np.ndarray | torch.Tensor
"""One bool per token, ``F...FT...T``."""

MAX_TOKEN: Final = 2**32 - 1
CONVERT_TOKENS: Final = 1 << 16
"""Tokens converted per step, so that a long list in a worker thread leaves the GIL to the loop in between."""


def canonical_tokens(tokens: TokenSequence) -> memoryview:
    """Return `tokens` as a contiguous little-endian uint32 buffer.

    Raises:
        UsageError: A token is negative, above 2**32 - 1 or not an integer, or the container is not a
            one-dimensional sequence of integers.
    """
    if isinstance(tokens, torch.Tensor):
        if tokens.dtype.is_floating_point or tokens.dtype.is_complex or tokens.dtype == torch.bool:
            raise UsageError(f"tokens must be integers, got a tensor of {tokens.dtype}")
        tokens = tokens.detach().cpu().numpy()
    elif isinstance(tokens, array.array):
        tokens = np.asarray(tokens)
    if isinstance(tokens, np.ndarray):
        return _from_ndarray(tokens)
    if isinstance(tokens, (str, bytes, bytearray, memoryview)) or not isinstance(cast("object", tokens), Sequence):
        raise UsageError(f"tokens must be a sequence of integers, got {type(tokens).__name__}")
    try:
        out = array.array("I")
        for start in range(0, len(tokens), CONVERT_TOKENS):
            out.extend(array.array("I", tokens[start : start + CONVERT_TOKENS]))
    except (OverflowError, TypeError, ValueError):
        for token in tokens:
            if not is_token(token):
                raise _bad_token(token) from None
        raise UsageError(f"tokens must be a sequence of integers, got {type(tokens).__name__}") from None
    ids = np.frombuffer(out, dtype="=u4")
    for at in np.flatnonzero(ids <= 1).tolist():  # a mask passed as tokens: bool is an int to `array`
        if isinstance(tokens[at], bool):
            raise _bad_token(tokens[at])
    return ids.astype("<u4", copy=False).data.cast("B")


def is_token(value: object) -> bool:
    """Return whether `value` is an integer in the range of token ids."""
    if isinstance(value, bool):
        return False
    try:
        return 0 <= operator.index(cast("SupportsIndex", value)) <= MAX_TOKEN
    except (TypeError, ValueError, RuntimeError):  # what NumPy and torch raise for values of several elements
        return False


def _bad_token(token: object) -> UsageError:
    return UsageError(f"token {token!r} is not an integer between 0 and {MAX_TOKEN}")


def _from_ndarray(tokens: np.ndarray) -> memoryview:
    if tokens.ndim != 1:
        raise UsageError(f"tokens must have one dimension, got shape {tokens.shape}")
    if tokens.dtype.kind not in "iu":
        raise UsageError(f"tokens must be integers, got an array of {tokens.dtype}")
    if tokens.size and (tokens.dtype.kind == "i" or tokens.dtype.itemsize > 4):
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high > MAX_TOKEN:
            raise _bad_token(low if low < 0 else high)
    return np.ascontiguousarray(tokens, dtype="<u4").data.cast("B")


def masked_head(mask: Mask | None, num_tokens: int) -> int:
    """Return how many leading tokens `mask` excludes; the mask must read ``F...FT...T``.

    Raises:
        UsageError: The mask is not boolean, has another length, or holds a False after a True.
    """
    if mask is None:
        return 0
    if isinstance(mask, torch.Tensor):
        if mask.dtype != torch.bool:
            raise UsageError(f"mask must be one dimension of booleans, got a tensor of {mask.dtype}")
        mask = mask.detach().cpu().numpy()
    try:
        values = np.asarray(mask)
    except ValueError:
        raise UsageError("mask must be one dimension of booleans, got nested sequences") from None
    if values.ndim != 1 or (values.dtype != np.bool_ and values.size):
        raise UsageError(f"mask must be one dimension of booleans, got {values.dtype} of shape {values.shape}")
    if values.size != num_tokens:
        raise UsageError(f"mask has length {values.size}, tokens have length {num_tokens}")
    head = int(values.argmax()) if values.any() else num_tokens
    if not values[head:].all():
        hole = head + int(values[head:].argmin())
        raise UsageError(f"mask is False at {hole} after True at {head}; it must read F...FT...T")
    return head
