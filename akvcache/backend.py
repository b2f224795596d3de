"""The contract of a storage backend: what stands behind a lower tier.

Call order:

1. ``open(context)`` once. Probe here; raise `BackendError` if the backend cannot work, `ConfigurationError` if it is
   configured wrongly. Constructors touch nothing.
2. ``attach(namespace_id, manifest)`` once per namespace, before its first key.
3. ``contains``, ``read``, ``write``, ``delete``, ``scan``, ``touch`` in any order and concurrently.
4. ``aclose()`` once, with nothing in flight.

The engine owns deadlines, concurrency limits, retries, circuit breakers and checksums; a backend moves bytes. The
engine never cancels a backend call while it may still touch the buffer it was given: a caller that gives up is
detached, and the buffer stays with the call until the call ends. A backend that offloads to threads therefore needs
no protection of its own against cancellation, except that its calls must end some time.

Errors leave a backend as `BackendError` with ``retryable`` set truthfully (`map_errors`). Absence is a value.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from akvcache.errors import BackendError, BackendTimeout, BackendUnavailable, CapacityExhausted
from akvcache.keys import ChunkKey, NamespaceId

__all__ = ("Backend", "BackendContext", "Capabilities", "StoredChunk", "map_errors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can do; read once after `Backend.open`.

    Attributes:
        persistent: Entries outlive the process.
        max_reads: Reads it serves at once with profit.
        max_writes: Writes it serves at once with profit.
    """

    persistent: bool
    max_reads: int = 4
    max_writes: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendContext:
    """What the engine tells a backend at open.

    Attributes:
        frame_bytes: Size of the largest frame; every frame is a multiple of 4096 and no larger.
        is_protected: Whether a live lease covers a key; such a chunk should not be evicted.
    """

    frame_bytes: int
    is_protected: Callable[[ChunkKey], bool] = lambda _key: False


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """One entry as `Backend.scan` reports it."""

    key: ChunkKey
    stored_bytes: int


class Backend(Protocol):
    """Stores frames by chunk key."""

    @property
    def name(self) -> str:
        """Short lower-case name of the kind, also the tier's name: "nvme", "s3"."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; valid after `open`."""
        ...

    async def open(self, context: BackendContext) -> None:
        """Probe, recover and get ready.

        Raises:
            BackendError: It cannot work now; the tier will be inactive.
            ConfigurationError: It is configured wrongly.
        """
        ...

    async def attach(self, namespace_id: NamespaceId, manifest: Mapping[str, object]) -> None:
        """Announce a namespace and leave its manifest for operators.

        Args:
            namespace_id: First bytes of every key of this namespace.
            manifest: JSON-ready description; no secrets.
        """
        ...

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """Return for each key whether it is stored, without side effects.

        The keys are consecutive chunks of one prefix, first to last. A backend for which each answer costs a
        round trip may answer False for everything after the first absent chunk.
        """
        ...

    async def read(self, key: ChunkKey, into: memoryview) -> int | None:
        """Read a frame into `into`.

        Args:
            key: The chunk.
            into: Writable, page-aligned, as long as the frame should be.

        Returns:
            The size of the stored frame, which may differ from ``len(into)`` if the entry is damaged (the engine
            drops it then), or None if the key is absent.
        """
        ...

    async def write(self, key: ChunkKey, frame: memoryview) -> None:
        """Store a frame; visible to readers only when complete. A key already stored is left as it is.

        Args:
            key: The chunk.
            frame: The sealed frame, page-aligned; unchanged until this returns.

        Raises:
            CapacityExhausted: There is no room and none could be made.
            CommitFailed: The bytes were written but could not be made visible.
        """
        ...

    async def delete(self, key: ChunkKey) -> bool:
        """Remove a key; return whether it was there."""
        ...

    def scan(self, namespace_id: NamespaceId) -> AsyncIterator[StoredChunk]:
        """Yield what is stored of one namespace, in any order; entries may come and go meanwhile."""
        ...

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Note that one request used these chunks of one prefix. Never blocks, ignores unknown keys."""
        ...

    async def aclose(self) -> None:
        """Release everything. Idempotent."""
        ...


_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_RETRYABLE: Final = (errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT)


@contextmanager
def map_errors(backend: str, op: str, key: ChunkKey | None = None) -> Generator[None]:
    """Turn operating system errors into `BackendError`, cause kept: the plug-in edge.

    ENOSPC and EDQUOT become `CapacityExhausted`, time-outs `BackendTimeout`, everything else
    `BackendUnavailable`. Errors that are ours already pass.
    """
    try:
        yield
    except BackendError:
        raise
    except TimeoutError as error:
        raise BackendTimeout(str(error) or None, backend=backend, op=op, key=key, retryable=True) from error
    except OSError as error:
        kind = CapacityExhausted if error.errno in _FULL else BackendUnavailable
        retryable = error.errno in _RETRYABLE
        raise kind(str(error), backend=backend, op=op, key=key, retryable=retryable) from error
