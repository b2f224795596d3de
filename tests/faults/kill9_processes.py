"""An engine that is killed while it stores, twenty times. Run by test_kill9.py: ROOT SEED, exit status 0 if all holds.

A process of its own, because it forks: it imports everything once and never runs a loop or a thread itself. Each round
forks a writer, kills it at a random instant after its first chunk is on disk, and forks a reader that opens the same
directory, retrieves whatever a lookup promises and compares every byte with what the prompt's name implies.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import torch

from akvcache import CacheEngine, CacheNamespace, EngineConfig, StopReason
from akvcache.testing import RegionKV, make_rows
from tests.forking import spawn

CHUNK = 128
MAX_CHUNKS = 6
PROMPTS = 40
ROUNDS = 20
TIMEOUT_S = 50
REMEMBERED = 2


def prompts(seed: int, round_: int) -> list[tuple[str, int]]:
    """Return the names and lengths of what the writer of a round stores."""
    rng = random.Random(seed * 1000 + round_)
    return [(f"{seed}/{round_}/{number}", rng.randrange(1, MAX_CHUNKS + 1)) for number in range(PROMPTS)]


def tokens(name: str, chunks: int) -> list[int]:
    return random.Random(name).choices(range(50_000), k=MAX_CHUNKS * CHUNK)[: chunks * CHUNK]


@asynccontextmanager
async def opened(root: Path) -> AsyncGenerator[tuple[CacheEngine[torch.Tensor], RegionKV]]:
    """Open an engine with a pool of 16 chunks of 128 KiB over 64 MiB of disk."""
    kv = RegionKV(num_regions=1, region_tokens=MAX_CHUNKS * CHUNK, num_layers=64)
    config = EngineConfig(
        chunk_tokens=CHUNK,
        host_bytes=16 * (kv.token_bytes * CHUNK + 4096),
        tiers=[f"nvme://{root}?capacity=64MiB"],
        prefault=False,
        strict=True,
    )
    async with CacheEngine.open(config, connector=kv.connector, namespace=CacheNamespace(model="kill9")) as engine:
        yield engine, kv


async def write(root: Path, seed: int, round_: int, ready: int) -> None:
    async with opened(root) as (engine, kv):
        for number, (name, chunks) in enumerate(prompts(seed, round_)):
            kv.write(0, make_rows(name, chunks * CHUNK, kv.token_bytes))
            kept = await engine.store(tokens(name, chunks), kv.slots(0))
            if number == 0:
                await kept.durable()
                os.write(ready, b"!")
        await asyncio.Event().wait()  # until killed


async def read(root: Path, seed: int, rounds: range, report: int) -> None:
    found = 0
    async with opened(root) as (engine, kv):
        assert all(tier.inactive is None for tier in engine.health().tiers.values())
        for name, chunks in [prompt for round_ in rounds for prompt in prompts(seed, round_)]:
            hit = (await engine.lookup(tokens(name, chunks))).hit_tokens
            if not hit:
                continue
            kv.write(0, np.zeros((kv.region_tokens, kv.token_bytes), dtype=np.uint8))
            loaded = await engine.retrieve(tokens(name, chunks), kv.slots(0))
            assert loaded.loaded_tokens == hit, f"{name}: {hit} tokens promised, got {loaded}"
            assert loaded.stopped in (None, StopReason.MISSING), loaded
            assert np.array_equal(kv.read(0)[:hit], make_rows(name, chunks * CHUNK, kv.token_bytes)[:hit]), name
            found += hit // CHUNK
    os.write(report, found.to_bytes(4, "little"))


def ended_well(pid: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def main(root: Path, seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    survived = 0
    for round_ in range(ROUNDS):
        here, there = os.pipe()
        writer = spawn(lambda round_=round_, there=there: write(root, seed, round_, there))
        os.close(there)
        assert os.read(here, 1) == b"!", "the writer ended before it wrote"
        time.sleep(rng.random() * 0.08)
        os.kill(writer, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]) == -signal.SIGKILL
        os.close(here)
        here, there = os.pipe()
        since = 0 if round_ == ROUNDS - 1 else max(0, round_ - REMEMBERED + 1)
        rounds = range(since, round_ + 1)
        reader = spawn(lambda rounds=rounds, there=there: read(root, seed, rounds, there))
        os.close(there)
        found = int.from_bytes(os.read(here, 4), "little")
        os.close(here)
        assert ended_well(reader), f"round {round_}: a visible chunk is not what was stored"
        assert found, f"round {round_}: nothing survived, not even what was durable"
        survived += found
    print(f"{survived} chunks read back in {ROUNDS} rounds")


if __name__ == "__main__":
    signal.alarm(TIMEOUT_S)  # a child that fails may leave us waiting for its word
    main(Path(sys.argv[1]), int(sys.argv[2]))
