"""Hugging Face transformers: keep the ``DynamicCache`` of a prompt.

Call order per request::

    connector = connector_for(model.config, model.dtype)        # once
    namespace = namespace_for(model.config, model=..., dtype=model.dtype, weights=weights_digest(folder))
    kv    = connector.empty(room)                               # memory for prompt and answer
    done  = (await engine.retrieve(tokens, kv)).loaded_tokens
    cache = cache_from_kv(model.config, kv, done)               # no copy
    logits = last_logits(model, tokens[done:], cache)           # computes the rest, fills kv
    await engine.store(tokens, kv_from_cache(cache))
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import torch
import transformers
import xxhash
from transformers.cache_utils import DynamicCache, DynamicLayer
from typing_extensions import override

from akvcache.connector import TensorConnector, TensorKV
from akvcache.errors import ConfigurationError, UsageError
from akvcache.keys import CacheNamespace

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = (
    "PreallocatedLayer",
    "cache_from_kv",
    "connector_for",
    "kv_from_cache",
    "last_logits",
    "namespace_for",
    "weights_digest",
)

READ_BYTES: Final = 4 << 20


class PreallocatedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer of a ``DynamicCache`` that fills memory it was given.

    The plain layer copies everything it holds whenever a token is added; this one writes the new tokens behind
    the old ones, so that retrieved bytes are used where they were put.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, num_tokens: int) -> None:
        """Wrap memory.

        Args:
            keys: ``[1, num_kv_heads, room, head_dim]``, the first `num_tokens` tokens valid.
            values: The same for the values.
            num_tokens: Tokens that are there already.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # pyright: ignore[reportUnknownMemberType]
        self._room = (keys, values)
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self.keys, self.values = keys[:, :, :num_tokens], values[:, :, :num_tokens]

    @override
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens; the further arguments are the base class's and differ between its versions."""
        keys, values = self._room
        start = self.get_seq_length()
        stop = start + key_states.shape[-2]
        if stop > keys.shape[-2]:
            raise UsageError(f"the cache has room for {keys.shape[-2]} tokens, {stop} are needed")
        keys[:, :, start:stop] = key_states
        values[:, :, start:stop] = value_states
        self.keys, self.values = keys[:, :, :stop], values[:, :, :stop]
        return self.keys, self.values


def connector_for(config: PreTrainedConfig, dtype: torch.dtype) -> TensorConnector:
    """Return the connector for a model's ``DynamicCache`` on the CPU.

    Args:
        config: The model's configuration.
        dtype: What the model computes in.

    Raises:
        ConfigurationError: A layer is not plain full attention (a sliding window or a recurrent state cannot be
            cut into chunks of tokens), or the dtype is not supported.
    """
    decoder = config.get_text_config(decoder=True)  # pyright: ignore[reportUnknownMemberType]
    layers = DynamicCache(config=config).layers
    for index, layer in enumerate(layers):
        if type(layer) is not DynamicLayer:
            raise ConfigurationError(f"layer {index} of {config.model_type!r} is a {layer!r}, not full attention")
    heads = cast("int", decoder.num_attention_heads)
    return TensorConnector(
        num_layers=len(layers),
        num_kv_heads=cast("int | None", getattr(decoder, "num_key_value_heads", None)) or heads,
        head_dim=cast("int | None", getattr(decoder, "head_dim", None)) or cast("int", decoder.hidden_size) // heads,
        dtype=dtype,
    )


def kv_from_cache(cache: DynamicCache) -> TensorKV:
    """Return the tensors of `cache`, layer by layer, without a copy."""
    layers = cast("Sequence[DynamicLayer]", cache.layers)
    return [(cast("torch.Tensor", layer.keys), cast("torch.Tensor", layer.values)) for layer in layers]


def cache_from_kv(config: PreTrainedConfig, kv: TensorKV, num_tokens: int) -> DynamicCache:
    """Return a cache that holds the first `num_tokens` tokens of `kv` and grows into the rest of its memory.

    Args:
        config: The model's configuration.
        kv: Memory for every layer, as `TensorConnector.empty` makes it; shared with the cache, not copied.
        num_tokens: Tokens of `kv` that are valid, for example `RetrieveResult.loaded_tokens`.
    """
    cache = DynamicCache(config=config)
    cache.layers[:] = [PreallocatedLayer(keys, values, num_tokens) for keys, values in kv]
    return cache


def last_logits(model: PreTrainedModel, token_ids: Sequence[int], cache: DynamicCache) -> torch.Tensor:
    """Run the model over `token_ids` behind what `cache` holds.

    Returns:
        The logits that follow the last token: ``[vocabulary]``.
    """
    # The parameter was renamed in transformers 5.2x and the old name warns from then on.
    renamed = "cache" in inspect.signature(model.forward).parameters
    ids = torch.tensor([list(token_ids)], device=model.device)
    with torch.inference_mode():
        output = model(
            input_ids=ids, use_cache=True, logits_to_keep=1, **{"cache" if renamed else "past_key_values": cache}
        )
    return cast("torch.Tensor", output.logits)[0, -1]


def namespace_for(config: PreTrainedConfig, *, model: str, dtype: torch.dtype, weights: str) -> CacheNamespace:
    """Return the namespace of a model: what changes the bytes of its KV besides tokens and layout.

    Args:
        config: The configuration of the loaded model.
        model: Its name, for people.
        dtype: What it computes in.
        weights: What identifies the weights: `weights_digest`, or a revision you vouch for.
    """
    return CacheNamespace(
        model=model,
        weights_version=weights,
        extra={
            "library": f"transformers-{transformers.__version__.split('.')[0]}",
            "dtype": str(dtype).removeprefix("torch."),
            # Kernels round differently; an entry is used only by the one that made it.
            "attention": str(getattr(config, "_attn_implementation", "unknown")),
        },
    )


def weights_digest(folder: Path) -> str:
    """Return a digest that changes whenever the weights or the configuration in `folder` change.

    Every byte is read. A sample would be faster and would miss a change to a few rows of an embedding; at the speed
    of XXH3 the reading costs no more than loading the model does, which the page cache then serves. It guards
    against mistakes, not against an attacker who can write the weights.

    Raises:
        ConfigurationError: There are no ``*.safetensors`` files.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigurationError(f"{str(folder)!r} holds no *.safetensors files")
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(READ_BYTES))
    for path in (folder / "config.json", *files):
        digest.update(f"{path.name}|{path.stat().st_size}|".encode())
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
    return digest.hexdigest()
