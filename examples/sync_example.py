"""The same engine without a running loop: blocking calls, and a ticket to poll."""

import torch

from akvcache import CacheNamespace, EngineConfig, SyncCacheEngine, TensorConnector

connector = TensorConnector(num_layers=2, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
tokens = list(range(1000))
kv = [(torch.randn(1, 2, 1000, 64).bfloat16(), torch.randn(1, 2, 1000, 64).bfloat16()) for _ in range(2)]

config = EngineConfig(chunk_tokens=64, host_bytes="64MiB")
with SyncCacheEngine(config, connector=connector, namespace=CacheNamespace(model="toy")) as engine:
    kept = engine.store(tokens, kv)
    print(f"stored {kept.stored_tokens} of {kept.total_tokens}")  # whole chunks only: 15 x 64 = 960

    room = connector.empty(len(tokens))
    ticket = engine.submit(lambda inner: inner.retrieve(tokens, room))  # returns at once
    while (loaded := ticket.poll()) is None:
        pass  # a scheduler does a step of its own work here
    print(f"loaded {loaded.loaded_tokens} from {dict(loaded.by_tier)}")

    same = [torch.equal(old[:, :, :960], new[:, :, :960]) for old, new in zip(sum(kv, ()), sum(room, ()), strict=True)]
    print("equal", all(same))
