"""Everything akvcache raises.

::

    AkvError
    ├── ConfigurationError (ValueError)   only while opening
    ├── UsageError                        the caller's bug
    ├── BackendError                      a tier's storage failed; never leaves the engine
    │   ├── BackendUnavailable
    │   ├── BackendTimeout
    │   ├── CapacityExhausted
    │   ├── ChunkCorrupt
    │   └── CommitFailed
    ├── TransferError                     a device copy failed; never leaves the engine
    └── InvariantError                    our bug

Out of `lookup`, `retrieve`, `store` and `prefetch` come only `UsageError` and cancellation. Absence is a
value, not an error. The docstring of each class is its default message.
"""

from __future__ import annotations

__all__ = (
    "AkvError",
    "BackendError",
    "BackendTimeout",
    "BackendUnavailable",
    "CapacityExhausted",
    "ChunkCorrupt",
    "CommitFailed",
    "ConfigurationError",
    "InvariantError",
    "TransferError",
    "UsageError",
)


class AkvError(Exception):
    """akvcache failed."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip().splitlines()[0])


class ConfigurationError(AkvError, ValueError):
    """The configuration is not usable."""


class UsageError(AkvError):
    """The call is not valid."""


class BackendError(AkvError):
    """The backend failed."""

    def __init__(
        self,
        message: str | None = None,
        *,
        backend: str = "",
        op: str = "",
        key: bytes | None = None,
        retryable: bool = False,
    ) -> None:
        super().__init__(message)
        self.backend = backend
        self.op = op
        self.key = key
        self.retryable = retryable

    def __str__(self) -> str:
        where = " ".join(part for part in (self.backend, self.op, self.key.hex()[-16:] if self.key else "") if part)
        return f"{super().__str__()} [{where}]" if where else super().__str__()


class BackendUnavailable(BackendError):
    """The backend cannot be reached or used."""


class BackendTimeout(BackendError):
    """The backend did not answer in time."""


class CapacityExhausted(BackendError):
    """The backend has no room and could not make any."""


class ChunkCorrupt(BackendError):
    """The stored bytes are not the bytes that were written."""


class CommitFailed(BackendError):
    """The chunk could not be made visible."""


class TransferError(AkvError):
    """A copy between device and host failed."""


class InvariantError(AkvError):
    """akvcache has a bug: an invariant does not hold."""
