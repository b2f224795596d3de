"""The exception tree, its messages, and the edge that turns system errors into it."""

from __future__ import annotations

import asyncio
import errno
import pickle

import pytest

from akvcache import errors
from akvcache.backend import map_errors
from akvcache.errors import (
    AkvError,
    BackendError,
    BackendTimeout,
    BackendUnavailable,
    CapacityExhausted,
    ChunkCorrupt,
    CommitFailed,
    ConfigurationError,
    InvariantError,
    TransferError,
    UsageError,
)
from akvcache.testing import make_keys

KEY = make_keys(1)[0]


@pytest.mark.parametrize("name", errors.__all__)
def test_a_class_says_what_happened_by_itself(name: str) -> None:
    kind: type[AkvError] = getattr(errors, name)
    assert issubclass(kind, AkvError)
    assert str(kind()) == (kind.__doc__ or "").strip().splitlines()[0]
    assert str(kind()).endswith(".")
    assert str(kind("in other words")) == "in other words"
    assert name in (errors.__doc__ or ""), "the tree in the docstring is complete"


def test_the_tree() -> None:
    for kind in (BackendUnavailable, BackendTimeout, CapacityExhausted, ChunkCorrupt, CommitFailed):
        assert issubclass(kind, BackendError)
    for kind in (ConfigurationError, UsageError, TransferError, InvariantError):
        assert not issubclass(kind, BackendError)
    assert issubclass(ConfigurationError, ValueError)
    assert not issubclass(UsageError, ValueError)


def test_a_backend_error_says_where() -> None:
    error = BackendTimeout("too slow", backend="nvme", op="read", key=KEY, retryable=True)
    assert str(error) == f"too slow [nvme read {KEY.hex()[-16:]}]"
    assert (error.backend, error.op, error.key, error.retryable) == ("nvme", "read", KEY, True)
    assert str(BackendError("broken", op="open")) == "broken [open]"
    assert not BackendError().retryable


def test_a_backend_error_can_be_sent_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(CapacityExhausted("full", backend="nvme", op="write", key=KEY)))
    assert isinstance(error, CapacityExhausted)
    assert str(error) == f"full [nvme write {KEY.hex()[-16:]}]"


@pytest.mark.parametrize(
    ("raised", "kind", "retryable"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), CapacityExhausted, False),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), CapacityExhausted, False),
        (OSError(errno.EIO, "Input/output error"), BackendUnavailable, False),
        (PermissionError(errno.EACCES, "Permission denied"), BackendUnavailable, False),
        (OSError(errno.EROFS, "Read-only file system"), BackendUnavailable, False),
        (OSError(errno.EAGAIN, "Try again"), BackendUnavailable, True),
        (OSError(errno.EBUSY, "Device or resource busy"), BackendUnavailable, True),
        (OSError(errno.EINTR, "Interrupted"), BackendUnavailable, True),
        (OSError(errno.ETIMEDOUT, "Connection timed out"), BackendTimeout, True),
        (TimeoutError(), BackendTimeout, True),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset"), BackendUnavailable, False),
        (OSError("no number"), BackendUnavailable, False),
    ],
)
def test_system_errors_become_backend_errors(raised: OSError, kind: type[BackendError], retryable: bool) -> None:
    with pytest.raises(BackendError) as caught, map_errors("nvme", "write", KEY):
        raise raised
    assert type(caught.value) is kind
    assert caught.value.retryable is retryable
    assert caught.value.__cause__ is raised
    assert (caught.value.backend, caught.value.op, caught.value.key) == ("nvme", "write", KEY)
    assert "[nvme write" in str(caught.value)


@pytest.mark.parametrize("raised", [ChunkCorrupt("bad"), ValueError("a bug"), asyncio.CancelledError()])
def test_everything_else_passes_as_it_is(raised: BaseException) -> None:
    with pytest.raises(type(raised)) as caught, map_errors("nvme", "read"):
        raise raised
    assert caught.value is raised
