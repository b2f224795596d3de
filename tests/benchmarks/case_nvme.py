"""The NVMe tier against bare O_DIRECT of the same size and depth, and how well a store and a retrieve overlap."""

from __future__ import annotations

import asyncio
import shutil
import statistics
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from akvcache import CacheEngine, frame
from akvcache.backend import Backend, BackendContext
from akvcache.chunking import FixedChunker
from akvcache.keys import ChunkKey, KeySchema, RequestScope
from akvcache.layout import KVLayout
from akvcache.tokens import canonical_tokens

from .connectors import FlatConnector, connect
from .engine_kit import NAMESPACE, drop_host, make_nvme, opened
from .measure import GB, MIB, Row, Sample, Stopwatch, alternate, median_cpu, speed_ratio, spread
from .memory import random_buffer
from .options import Options
from .raw_disk import RawDisk
from .workload import TOKEN_BYTES, FlatKV, prompt

CHUNK_MIB = (16, 64)
TARGET = 0.9
CPU_TARGET = 0.3
OVERLAP_TARGET = 1.15
SLACK = 64 * MIB


class Frames:
    """Sealed frames of one prompt after another, in huge-page buffers."""

    def __init__(self, layout: KVLayout, chunk_tokens: int, num_chunks: int) -> None:
        self.schema = KeySchema(namespace=NAMESPACE, layout=layout, chunker=FixedChunker(chunk_tokens))
        self.num_tokens = chunk_tokens * num_chunks
        self.parts = layout.part_bytes(chunk_tokens)
        self.frame_bytes = frame.frame_bytes(layout.payload_bytes(chunk_tokens))
        self.buffers = [random_buffer(self.frame_bytes, seed) for seed in range(num_chunks)]
        self.keys: Sequence[ChunkKey] = ()
        self._chunk_tokens = chunk_tokens
        self._generator = np.random.default_rng(12)

    def next_prompt(self) -> None:
        """Seal all frames under new keys."""
        tokens = canonical_tokens(prompt(self.num_tokens, self._generator))
        self.keys = self.schema.run(tokens, RequestScope()).keys
        self.seal()

    def seal(self) -> None:
        """Seal every frame: what the engine does before it writes."""
        for key, buffer in zip(self.keys, self.buffers, strict=True):
            frame.seal(buffer.data, key=key, num_tokens=self._chunk_tokens, part_bytes=self.parts)

    def verify(self) -> None:
        """Verify every frame: what the engine does after it read."""
        for key, buffer in zip(self.keys, self.buffers, strict=True):
            frame.verify(buffer.data, key=key, num_tokens=self._chunk_tokens, part_bytes=self.parts)


async def at_depth(depth: int, calls: Iterable[Callable[[], Awaitable[object]]]) -> None:
    """Make all calls, `depth` at a time."""
    queue = deque(calls)

    async def worker() -> None:
        while queue:
            await queue.popleft()()

    async with asyncio.TaskGroup() as group:
        for _ in range(depth):
            group.create_task(worker())


class BackendCases:
    """The NVMe backend with no engine above it."""

    def __init__(self, backend: Backend, frames: Frames, directory: Path) -> None:
        self._backend = backend
        self._frames = frames
        self._fresh = directory / "fresh"

    async def write_recycled(self) -> Sample:
        """Write a new prompt where the previous one must leave: its files are used again."""
        self._frames.next_prompt()
        return await self._write(self._backend)

    async def write_new(self) -> Sample:
        """Write into an empty directory."""
        self._frames.next_prompt()
        async with open_backend(self._fresh, self._frames) as backend:
            sample = await self._write(backend)
        shutil.rmtree(self._fresh)
        return sample

    async def read(self) -> Sample:
        """Read what the last `write_recycled` wrote."""
        frames, backend = self._frames, self._backend

        async def one(key: ChunkKey, buffer: np.ndarray) -> None:
            assert await backend.read(key, buffer.data) == frames.frame_bytes

        pairs = list(zip(frames.keys, frames.buffers, strict=True))
        with Stopwatch() as watch:
            await at_depth(
                backend.capabilities.max_reads, [lambda key=key, to=buffer: one(key, to) for key, buffer in pairs]
            )
        frames.verify()
        return watch.sample

    async def _write(self, backend: Backend) -> Sample:
        pairs = list(zip(self._frames.keys, self._frames.buffers, strict=True))
        backend.touch(self._frames.keys)  # a new request, so everything before it may leave
        with Stopwatch() as watch:
            await at_depth(
                backend.capabilities.max_writes,
                [lambda key=key, of=buffer: backend.write(key, of.data) for key, buffer in pairs],
            )
        assert all(await backend.contains(self._frames.keys))
        return watch.sample


@asynccontextmanager
async def open_backend(directory: Path, frames: Frames) -> AsyncIterator[Backend]:
    """Open a backend that holds one prompt and has to evict it for the next."""
    backend = make_nvme(directory, len(frames.buffers) * frames.frame_bytes + SLACK)
    await backend.open(BackendContext(frame_bytes=frames.frame_bytes))
    await backend.attach(frames.schema.namespace_id, frames.schema.describe())
    try:
        yield backend
    finally:
        await backend.aclose()


class EngineCases:
    """The whole engine over the NVMe tier, with a flat cache on a CPU device."""

    def __init__(self, engine: CacheEngine[object], num_tokens: int, store_kv: object, retrieve_kv: object) -> None:
        self._engine = engine
        self._num_tokens = num_tokens
        self._store_kv = store_kv
        self._retrieve_kv = retrieve_kv
        self._generator = np.random.default_rng(13)
        self._tokens: list[int] = []

    async def store(self) -> Sample:
        """Store a new prompt until it is durable, into the files that the one before it leaves behind."""
        await self._engine.clear()
        self._tokens = prompt(self._num_tokens, self._generator)
        with Stopwatch() as watch:
            kept = await self._engine.store(self._tokens, self._store_kv)
            durable = await kept.durable()
        assert kept.new_tokens == durable.durable_tokens == self._num_tokens, (kept, durable)
        return watch.sample

    async def retrieve(self) -> Sample:
        """Retrieve the last prompt from the tier alone."""
        await drop_host(self._engine)
        with Stopwatch() as watch:
            loaded = await self._engine.retrieve(self._tokens, self._retrieve_kv)
        assert loaded.by_tier.get("nvme") == self._num_tokens, loaded
        return watch.sample


@asynccontextmanager
async def engine_cases(chunk_tokens: int, num_chunks: int, directory: Path) -> AsyncIterator[EngineCases]:
    """Open an engine whose disk tier keeps the files of one cleared prompt for the next."""
    num_tokens = chunk_tokens * num_chunks
    source, destination = FlatKV(num_tokens, seed=14), FlatKV(num_tokens)
    connector, store_kv, retrieve_kv = connect(source, destination)
    frame_bytes = frame.frame_bytes(connector.layout.payload_bytes(chunk_tokens))
    spares = num_chunks * frame_bytes + SLACK
    tier = make_nvme(directory, 4 * spares, "&recycle=0.25")
    async with opened(connector, chunk_tokens=chunk_tokens, num_chunks=num_chunks, tiers=[tier]) as engine:
        yield EngineCases(engine, num_tokens, store_kv, retrieve_kv)
    assert destination.equals(source)


async def run(options: Options) -> list[Row]:
    """Measure writes and reads of both chunk sizes."""
    return [row for size in CHUNK_MIB for row in await _chunk_size(size, options)]


async def _chunk_size(chunk_mib: int, options: Options) -> list[Row]:
    num_chunks = (256 if options.quick else 512) // chunk_mib
    chunk_tokens = chunk_mib * MIB // TOKEN_BYTES
    frames = Frames(FlatConnector.layout, chunk_tokens, num_chunks)
    async with (
        open_backend(options.directory / f"backend-{chunk_mib}", frames) as backend,
        engine_cases(chunk_tokens, num_chunks, options.directory / f"engine-{chunk_mib}") as engine,
    ):
        depth = backend.capabilities.max_writes
        raw = RawDisk(options.directory / "raw", frames.buffers, depth=depth)
        alone = BackendCases(backend, frames, options.directory)
        cases = {
            "raw new": raw.write_new,
            "backend new": alone.write_new,
            "raw recycled": raw.write_recycled,
            "backend recycled": alone.write_recycled,
            "engine store": engine.store,
            "raw read": raw.read,
            "backend read": alone.read,
            "engine retrieve": engine.retrieve,
        }
        samples = await alternate(options.rounds, cases, rotate=False)
        raw.close()
    size = num_chunks * frames.frame_bytes / GB
    pairs = (
        ("backend new", "raw new", "write, new files"),
        ("backend recycled", "raw recycled", "write, recycled files"),
        ("backend read", "raw read", "read"),
        ("engine store", "raw recycled", "durable store"),
        ("engine retrieve", "raw read", "retrieve"),
    )
    return [
        row
        for name, baseline, what in pairs
        for row in _disk_rows(f"NVMe {name.split()[0]} {what}, {chunk_mib} MiB x{depth}", samples, name, baseline, size)
    ]


def _disk_rows(what: str, samples: Mapping[str, list[Sample]], name: str, baseline: str, size: float) -> list[Row]:
    ratio = speed_ratio(samples[name], samples[baseline])
    cpu = median_cpu(samples[name]) / size
    return [
        Row(
            what=what,
            measured=_rate(samples[name], size),
            baseline=f"{_rate(samples[baseline], size)} raw",
            ratio=ratio,
            target=f">= {TARGET}",
            ok=ratio >= TARGET,
        ),
        Row(
            what="  CPU",
            measured=f"{cpu:.2f} s/GB",
            baseline=f"{median_cpu(samples[baseline]) / size:.2f} s/GB raw",
            target=f"<= {CPU_TARGET} s/GB",
            ok=cpu <= CPU_TARGET,
        ),
    ]


def _rate(samples: Sequence[Sample], size: float) -> str:
    rates = sorted(size / sample.wall_s for sample in samples)
    return f"{statistics.median(rates):.2f} ({rates[0]:.2f}..{rates[-1]:.2f}) GB/s"


async def run_overlap(options: Options) -> list[Row]:
    """Measure the wall time of a durable store and of a retrieve against each of its phases alone."""
    chunk_tokens, num_chunks = 16 * MIB // TOKEN_BYTES, 16 if options.quick else 32
    frames = Frames(FlatConnector.layout, chunk_tokens, num_chunks)
    device = FlatKV(chunk_tokens * num_chunks, seed=15)
    spans = [(at, at + chunk_tokens) for at in range(0, frames.num_tokens, chunk_tokens)]
    payloads = [memoryview(buffer)[frame.HEADER_BYTES :] for buffer in frames.buffers]

    def phase(work: Callable[[], object]) -> Callable[[], Awaitable[Sample]]:
        async def case() -> Sample:
            with Stopwatch() as watch:
                work()
            return watch.sample

        return case

    async with (
        open_backend(options.directory / "backend", frames) as backend,
        engine_cases(chunk_tokens, num_chunks, options.directory / "engine") as engine,
    ):
        alone = BackendCases(backend, frames, options.directory)
        cases = {
            "tier write": alone.write_recycled,
            "store": engine.store,
            "tier read": alone.read,
            "retrieve": engine.retrieve,
            "verify": phase(frames.verify),
            "copy in": phase(lambda: FlatConnector().scatter(device, spans, payloads)),
            "copy out": phase(lambda: FlatConnector().gather(device, spans, payloads)),
            "seal": phase(frames.seal),
        }
        samples = await alternate(options.rounds, cases, rotate=False)
    return [
        _overlap_row("durable store", samples, "store", ("copy out", "seal", "tier write")),
        _overlap_row("retrieve from NVMe", samples, "retrieve", ("tier read", "verify", "copy in")),
    ]


def _overlap_row(what: str, samples: Mapping[str, list[Sample]], name: str, phases: Sequence[str]) -> Row:
    walls = {phase: statistics.median(s.wall_s for s in samples[phase]) for phase in phases}
    slowest = max(walls, key=lambda phase: walls[phase])
    stretch = 1 / speed_ratio(samples[name], samples[slowest])
    parts = " + ".join(f"{phase} {wall * 1e3:.0f}" for phase, wall in walls.items())
    return Row(
        what=f"overlap: {what}, wall / slowest phase",
        measured=spread(samples[name]),
        baseline=f"{parts} = {sum(walls.values()) * 1e3:.0f} ms, max {walls[slowest] * 1e3:.0f}",
        ratio=stretch,
        target=f"<= {OVERLAP_TARGET}",
        ok=stretch <= OVERLAP_TARGET,
    )
