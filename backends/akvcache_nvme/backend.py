"""The local NVMe tier: one file per chunk, moved with O_DIRECT between the device and the host slot.

Owned by one engine and touched from its loop only. Chunk bytes move through aiofiles on the backend's own threads,
straight from and to the memoryview given. Other blocking steps (`directory.py`, `queries.py`) take one hop each:
those of a read or write on the same threads, lookups on a thread of their own, so that they never queue behind data.

Nothing is synced: the frame's checksum, verified by the engine, decides what survived a power cut. What a killed
process leaves is complete, because a chunk appears by a rename after its last byte was written.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, TypeVar

import aiofiles

from akvcache.backend import BackendContext, Capabilities, StoredChunk, map_errors
from akvcache.config import TierUrl, parse_bytes, suggest
from akvcache.errors import BackendError, BackendUnavailable, CapacityExhausted, CommitFailed, ConfigurationError, UsageError
from akvcache.keys import ChunkKey, NamespaceId
from akvcache.supervision import run_blocking, shielded

from . import queries
from .directory import HEADROOM_BYTES, CacheDirectory, Found, Reservation
from .files import ABSENT, ChunkOpener, directory, probe_direct
from .index import ChunkIndex
from .manifest import difference, other_manifests
from .names import TMP, place_of
from .recovery import Census, temp_charge

__all__ = ("DirectMode", "NvmeBackend", "NvmeStatistics")

T = TypeVar("T")
_log = logging.getLogger("akvcache.nvme")
