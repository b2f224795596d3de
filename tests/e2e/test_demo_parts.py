"""The seam to transformers and the spans of the demo, in one process."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
)

from akvcache import CacheEngine, ConfigurationError, EngineConfig, UsageError
from akvcache.demo.spans import SpanCollector, SystemIdGenerator
from akvcache.integrations import transformers as seam
from tests.tiny_model import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, make_tiny_model

TOKENS = [(7 * i) % 251 for i in range(100)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(str(folder))


def test_connector_has_the_shape_of_the_cache(model: LlamaForCausalLM) -> None:
    connector = seam.connector_for(model.config, model.dtype)
    cache = DynamicCache(config=model.config)
    seam.last_logits(model, TOKENS, cache)
    kv = seam.kv_from_cache(cache)
    connector.check(kv, len(TOKENS))
    assert connector.layout.token_bytes == NUM_LAYERS * 2 * NUM_KV_HEADS * HEAD_DIM * 4
    assert kv[0][0].data_ptr() == cache.layers[0].keys.data_ptr(), "no copy"


def test_head_dim_is_derived_when_the_configuration_has_none(model: LlamaForCausalLM) -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=8, num_hidden_layers=3, num_key_value_heads=4)
    del config.head_dim
    kv = seam.connector_for(config, torch.float16).empty(5)
    assert (len(kv), kv[0][0].shape, kv[0][0].dtype) == (3, (1, 4, 5, 8), torch.float16)


@pytest.mark.parametrize(
    ("kind", "more"),
    [(Qwen3Config, {"num_key_value_heads": 2}), (Phi3Config, {"num_key_value_heads": 1}), (GPTNeoXConfig, {})],
)
def test_other_architectures_continue_behind_a_loaded_prefix(
    kind: type[PreTrainedConfig], more: dict[str, int]
) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4} | more
    model = AutoModelForCausalLM.from_config(kind(**sizes, vocab_size=257, pad_token_id=0))
    kv = seam.connector_for(model.config, model.dtype).empty(len(TOKENS))
    expected = seam.last_logits(model, TOKENS, seam.cache_from_kv(model.config, kv, 0))
    again = seam.last_logits(model, TOKENS[96:], seam.cache_from_kv(model.config, kv, 96))
    torch.testing.assert_close(again, expected)


def test_sliding_window_is_refused() -> None:
    config = MistralConfig(num_hidden_layers=2, sliding_window=128)
    with pytest.raises(ConfigurationError, match="layer 0 of 'mistral'"):
        seam.connector_for(config, torch.float32)


def test_preallocated_cache_computes_what_the_plain_one_does(model: LlamaForCausalLM) -> None:
    plain = DynamicCache(config=model.config)
    expected = seam.last_logits(model, TOKENS, plain)
    kv = seam.connector_for(model.config, model.dtype).empty(len(TOKENS) + 1)
    cache = seam.cache_from_kv(model.config, kv, 0)
    seam.last_logits(model, TOKENS[:64], cache)
    torch.testing.assert_close(seam.last_logits(model, TOKENS[64:], cache), expected)
    assert cache.get_seq_length() == len(TOKENS)
    for (keys, values), (own_keys, own_values) in zip(seam.kv_from_cache(plain), kv, strict=True):
        torch.testing.assert_close(own_keys[:, :, : len(TOKENS)], keys)
        torch.testing.assert_close(own_values[:, :, : len(TOKENS)], values)
    seam.last_logits(model, [1], cache)
    with pytest.raises(UsageError, match="room for 101 tokens, 102 are needed"):
        seam.last_logits(model, [1], cache)


@pytest.mark.asyncio
async def test_readme_order_of_calls_gives_the_same_logits(folder: Path, model: LlamaForCausalLM) -> None:
    connector = seam.connector_for(model.config, model.dtype)
    namespace = seam.namespace_for(model.config, model="tiny", dtype=model.dtype, weights="w1")
    config = EngineConfig(chunk_tokens=16, host_bytes="4MiB", strict=True)
    async with CacheEngine.open(config, connector=connector, namespace=namespace) as engine:
        first = seam.cache_from_kv(model.config, connector.empty(len(TOKENS)), 0)
        expected = seam.last_logits(model, TOKENS, first)
        await engine.store(TOKENS, seam.kv_from_cache(first))
        kv = connector.empty(len(TOKENS))
        done = (await engine.retrieve(TOKENS, kv)).loaded_tokens
    assert done == 96
    cache = seam.cache_from_kv(model.config, kv, done)
    torch.testing.assert_close(seam.last_logits(model, TOKENS[done:], cache), expected)


def test_namespace_differs_with_whatever_changes_the_bytes(folder: Path, model: LlamaForCausalLM) -> None:
    def encoded(**changes: object) -> bytes:
        values = {"model": "m", "dtype": torch.float32, "weights": "w"} | changes
        return seam.namespace_for(model.config, **values).encode()

    eager = AutoModelForCausalLM.from_pretrained(str(folder), attn_implementation="eager").config
    every = [
        encoded(),
        encoded(model="n"),
        encoded(dtype=torch.bfloat16),
        encoded(weights="x"),
        seam.namespace_for(eager, model="m", dtype=torch.float32, weights="w").encode(),
    ]
    assert len(set(every)) == len(every)
    assert encoded() == encoded()


def test_weights_digest_sees_every_byte(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    before = seam.weights_digest(folder)
    assert seam.weights_digest(copy) == before
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    flipped = seam.weights_digest(copy)
    assert flipped != before
    (copy / "config.json").write_text((copy / "config.json").read_text().replace("10000.0", "20000.0"))
    assert seam.weights_digest(copy) not in (before, flipped)
    weights.unlink()
    with pytest.raises(ConfigurationError, match=r"no \*\.safetensors"):
        seam.weights_digest(copy)


def test_seeding_python_does_not_repeat_ids() -> None:
    ids = SystemIdGenerator()
    seen = set()
    for _ in range(3):
        random.seed(0)
        seen |= {ids.generate_span_id(), ids.generate_trace_id()}
    assert len(seen) == 6
    assert all(0 < one < 1 << 128 for one in seen)


def test_collected_spans_keep_parents_links_and_attributes() -> None:
    collector = SpanCollector()
    with collector.tracer.start_as_current_span("outer", attributes={"n": 1, "list": ["a"]}):
        collector.tracer.start_span("inner").end()
    outer, inner = collector.records()
    assert (outer.name, outer.parent_id, outer.attributes) == ("outer", None, {"n": 1})
    assert inner.parent_id == outer.span_id
    assert inner.trace_id == outer.trace_id
    assert 0 <= inner.duration_s <= outer.duration_s
