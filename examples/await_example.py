"""Store and retrieve a paged KV cache, bit for bit: 100 chunks through a host pool of 8."""

import asyncio
import tempfile

import torch

from akvcache import CacheEngine, CacheNamespace, EngineConfig, PagedConnector

CHUNK, NUM_CHUNKS, BLOCK = 32, 100, 16


async def main() -> None:
    blocks = CHUNK * NUM_CHUNKS // BLOCK
    layers = [(torch.randn(blocks, BLOCK, 2, 64), torch.randn(blocks, BLOCK, 2, 64)) for _ in range(4)]
    connector = PagedConnector(layers)  # K and V of each layer: [blocks, block_tokens, heads, dim]
    tokens = torch.randint(0, 50_000, (CHUNK * NUM_CHUNKS,))
    slots = connector.slots(torch.randperm(blocks).tolist(), len(tokens))
    before = [plane.clone() for pair in layers for plane in pair]

    slot_bytes = connector.layout.payload_bytes(CHUNK) + 4096  # a slot holds a chunk and its header
    with tempfile.TemporaryDirectory() as folder:
        tier = f"nvme://{folder}?capacity=64MiB"
        config = EngineConfig(chunk_tokens=CHUNK, host_bytes=8 * slot_bytes, tiers=[tier])
        async with CacheEngine.open(config, connector=connector, namespace=CacheNamespace(model="toy")) as engine:
            kept = await engine.store(tokens, slots)  # when it returns, `layers` may be reused
            print("stored", kept.stored_tokens, "on disk", (await kept.durable()).durable_tokens)
            for plane in (plane for pair in layers for plane in pair):
                plane.zero_()
            loaded = await engine.retrieve(tokens, slots, deadline_s=10.0)
            print("loaded", loaded.loaded_tokens, dict(loaded.by_tier))
    print("equal", all(map(torch.equal, before, [plane for pair in layers for plane in pair])))


asyncio.run(main())
