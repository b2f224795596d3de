"""akvcache: an asyncio-native KV-cache engine for LLM serving."""

from akvcache.config import EngineConfig
from akvcache.connector import KVConnector, PagedConnector, TensorConnector
from akvcache.engine import CacheEngine
from akvcache.errors import AkvError, ConfigurationError, UsageError
from akvcache.facade import SyncCacheEngine
from akvcache.keys import CacheNamespace, RequestScope
from akvcache.layout import KVLayout
from akvcache.results import (
    DurableResult,
    LookupResult,
    PrefetchResult,
    RetrieveResult,
    StopReason,
    StoreResult,
)

__all__ = (
    "CacheEngine",
    "SyncCacheEngine",
    "EngineConfig",
    "KVLayout",
    "CacheNamespace",
    "RequestScope",
    "KVConnector",
    "PagedConnector",
    "TensorConnector",
    "LookupResult",
    "RetrieveResult",
    "StoreResult",
    "DurableResult",
    "PrefetchResult",
    "StopReason",
    "AkvError",
    "ConfigurationError",
    "UsageError",
)
