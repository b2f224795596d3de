"""How long the chunk keys of a prompt take, against bare chained SHA-256 over the same bytes."""

from __future__ import annotations

import hashlib

import numpy as np

from akvcache.chunking import FixedChunker
from akvcache.keys import CacheNamespace, KeySchema, RequestScope
from akvcache.tokens import canonical_tokens

from .connectors import FlatConnector
from .measure import Case, Row, Sample, Stopwatch, alternate, median_wall, speed_ratio, spread
from .options import Options
from .workload import CHUNK_TOKENS, prompt

TARGETS_MS = {80_000: 3.0, 1_000_000: 60.0}


async def run(options: Options) -> list[Row]:
    """Measure lists and NumPy arrays of both lengths."""
    schema = KeySchema(
        namespace=CacheNamespace(model="bench"), layout=FlatConnector.layout, chunker=FixedChunker(CHUNK_TOKENS)
    )
    rows = []
    for num_tokens, target in TARGETS_MS.items():
        tokens = prompt(num_tokens, np.random.default_rng(1))
        array = np.asarray(tokens)

        def keys_of(source: list[int] | np.ndarray) -> Case:
            async def case() -> Sample:
                with Stopwatch() as watch:
                    schema.run(canonical_tokens(source), RequestScope())
                return watch.sample

            return case

        cases = {"list": keys_of(tokens), "array": keys_of(array), "bare": _bare(array.astype("<u4").tobytes())}
        samples = await alternate(max(options.rounds, 7), cases)
        for kind in ("list", "array"):
            rows.append(
                Row(
                    what=f"keys of {num_tokens:,} tokens ({kind}, SHA-256)",
                    measured=spread(samples[kind]),
                    baseline=f"{spread(samples['bare'])} bare SHA-256",
                    ratio=speed_ratio(samples[kind], samples["bare"]),
                    target=f"<= {target:g} ms",
                    ok=median_wall(samples[kind]) * 1e3 <= target,
                )
            )
    return rows


def _bare(data: bytes) -> Case:
    async def case() -> Sample:
        size, digest = CHUNK_TOKENS * 4, b""
        with Stopwatch() as watch:
            for start in range(0, len(data) - size + 1, size):
                digest = hashlib.sha256(digest + data[start : start + size]).digest()
        return watch.sample

    return case
