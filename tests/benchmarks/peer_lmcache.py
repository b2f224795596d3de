"""LMCache 0.5.6 behind the `Engine` protocol: its in-process engine, and its own tool for the C++ disk adapter.

Runs in the environment of scripts/lmcache_env.sh. Defaults are LMCache's own where not said otherwise.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Read when LMCache is imported. Its usage tracking is on by default, its built-in hash needs a fixed seed.
os.environ.update(
    LMCACHE_TRACK_USAGE="false", DO_NOT_TRACK="1", LMCACHE_LOG_LEVEL="CRITICAL", LMCACHE_DISABLE_BANNER="1"
)

import torch
from lmcache.utils import mock_up_broadcast_fn, mock_up_broadcast_object_fn
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata

from .engines import CHUNK_SHAPE, Setup
from .workload import CHUNK_BYTES, CHUNK_TOKENS, HEAD_DIM, HEADS, KV, NullKV

_numbers = itertools.count()


class _Connector(GPUConnectorInterface):  # type: ignore[misc]
    """Moves chunks with the workload's own copy functions, or not at all."""

    def __init__(self, layers: int) -> None:
        self._layers = layers

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        kwargs["kv"].write(start, end, _bytes(memory_obj))

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        kwargs["kv"].read(start, end, _bytes(memory_obj))

    def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True) if _copies(kwargs) else ():
            self.to_gpu(memory_obj, start, end, **kwargs)

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True) if _copies(kwargs) else ():
            self.from_gpu(memory_obj, start, end, **kwargs)

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, self._layers, num_tokens, HEADS * HEAD_DIM])


def _copies(kwargs: dict[str, Any]) -> bool:
    return not isinstance(kwargs["kv"], NullKV)


def _bytes(memory_obj: Any) -> Any:
    return memory_obj.tensor.view(torch.uint8).numpy().reshape(CHUNK_SHAPE)


class LMCache:
    """The in-process engine with the CPU tier, and its disk tier below where the setup says so."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._tokens: Sequence[int] = ()
        self._id = f"side-by-side-{next(_numbers)}"
        setup.directory.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {
            "chunk_size": CHUNK_TOKENS,
            "local_cpu": True,
            "max_local_cpu_size": 2.5 * setup.size / 2**30,
        }
        if setup.tier == "disk":
            options["local_disk"] = str(setup.directory)
            options["max_local_disk_size"] = 8.0
            options["extra_config"] = {"use_odirect": setup.direct}
        metadata = LMCacheMetadata(
            model_name="llama-8-layers",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(setup.layers, 2, CHUNK_TOKENS, HEADS, HEAD_DIM),
            chunk_size=CHUNK_TOKENS,
            role="worker",
        )
        self._engine = LMCacheEngineBuilder.get_or_create(
            self._id,
            LMCacheEngineConfig.from_defaults(**options),
            metadata,
            _Connector(setup.layers),
            mock_up_broadcast_fn,
            mock_up_broadcast_object_fn,
        )
        self._engine.post_init()

    def warm(self) -> None:
        """See `Engine.warm`. The uncounted first round does it."""

    def store(self, tokens: Sequence[int], kv: KV) -> None:
        """See `Engine.store`."""
        self._tokens = tokens
        self._engine.store(tokens, kv=kv)

    def persist(self) -> None:
        """See `Engine.persist`. LMCache has no call for it: its list of running writes is polled."""
        if self._setup.tier != "disk":
            return
        backends = self._engine.storage_manager.storage_backends
        backend = next(value for name, value in backends.items() if name != "LocalCPUBackend")
        keys = [key for _, _, key in self._engine.token_database.process_tokens(self._tokens)]
        limit = time.perf_counter() + 120
        while any(backend.exists_in_put_tasks(key) for key in keys):
            if time.perf_counter() > limit:
                raise TimeoutError("LMCache did not write everything")
            time.sleep(0.001)

    def lookup(self, tokens: Sequence[int]) -> int:
        """See `Engine.lookup`."""
        return int(self._engine.lookup(tokens))

    def drop_host(self) -> None:
        """See `Engine.drop_host`."""
        self._engine.clear(locations=["LocalCPUBackend"])

    def retrieve(self, tokens: Sequence[int], kv: KV) -> int:
        """See `Engine.retrieve`."""
        return int(self._engine.retrieve(tokens, kv=kv).sum())

    def clear(self) -> None:
        """See `Engine.clear`."""
        self._engine.clear()

    def close(self) -> None:
        """See `Engine.close`."""
        LMCacheEngineBuilder.destroy(self._id)
        shutil.rmtree(self._setup.directory, ignore_errors=True)


def native_adapter(directory: Path, num_tokens: int, direct: bool) -> tuple[float, float]:
    """Run ``lmcache bench l2`` on the C++ file adapter of the multiprocess server.

    The tool has no keys, no device copy and no host tier: it is the adapter alone.

    Returns:
        Seconds to store and to load as many chunks as the prompt has.
    """
    chunks = num_tokens // CHUNK_TOKENS
    adapter = {"type": "fs_native", "base_path": str(directory), "use_odirect": direct}
    report = directory.with_suffix(".json")
    directory.mkdir(parents=True, exist_ok=True)
    command = [str(Path(sys.executable).with_name("lmcache")), "bench", "l2", "--l2-adapter", json.dumps(adapter)]
    command += ["--data-size-kb", str(CHUNK_BYTES >> 10), "--num-keys", str(chunks), "--in-flight", "1"]
    command += ["--rounds", "1", "--warmup-rounds", "1", "--l1-align-bytes", "4096"]
    command += ["--format", "json", "--output", str(report), "--quiet"]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        operations = json.loads(report.read_text())["metrics"].values()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        report.unlink(missing_ok=True)
    seconds = {}
    for operation in operations:
        if operation.get("operation") in ("Store", "Load"):
            assert operation["total_success"] == operation["total_keys"], operation
            seconds[operation["operation"]] = operation["duration_avg_ms"] / 1e3
    return seconds["Store"], seconds["Load"]
