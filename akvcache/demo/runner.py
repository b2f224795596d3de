"""Runs the model: prefill and greedy decoding over a cache whose memory the caller owns. Blocking; one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from transformers import AutoModelForCausalLM

from akvcache.connector import TensorKV
from akvcache.integrations.transformers import cache_from_kv, last_logits

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

__all__ = ("ModelRunner",)

Step = Callable[[], None]
WARM_UP_TOKENS = 8


class ModelRunner:
    """A loaded model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        decoder = cast("Callable[[], object]", model.get_decoder)()
        self._layers = list(cast("Iterable[torch.nn.Module]", getattr(decoder, "layers", ())))

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype) -> ModelRunner:
        """Load a model folder."""
        load = cast("Callable[..., PreTrainedModel]", AutoModelForCausalLM.from_pretrained)  # pyright: ignore[reportUnknownMemberType]
        return cls(load(str(folder), dtype=dtype, local_files_only=True))

    @property
    def config(self) -> PreTrainedConfig:
        """The configuration of the loaded model."""
        return self._model.config

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self._model.dtype

    @property
    def num_layers(self) -> int:
        """Steps that `prefill` reports."""
        return len(self._layers)

    def warm_up(self, kv: TensorKV) -> None:
        """Pay what only a process's first call pays: threads, kernels, and the pages of `kv`."""
        for keys, values in kv:
            keys.zero_()
            values.zero_()
        last_logits(self._model, [0] * WARM_UP_TOKENS, cache_from_kv(self.config, kv, 0))

    def prefill(self, tokens: Sequence[int], cache: DynamicCache, step: Step) -> int:
        """Compute the prompt's remaining tokens and return the answer's first one.

        Args:
            tokens: The tokens behind what `cache` holds.
            cache: Grows by them.
            step: Called after every layer.
        """

        def layer_done(_layer: torch.nn.Module, _inputs: object, _output: object) -> None:
            step()

        hooks = [layer.register_forward_hook(layer_done) for layer in self._layers]
        try:
            return self._next(tokens, cache)
        finally:
            for hook in hooks:
                hook.remove()

    def generate(self, first: int, num_tokens: int, cache: DynamicCache, step: Step) -> list[int]:
        """Return the greedy answer that begins with `first`: at most `num_tokens`, up to the end-of-text token."""
        ends = self._ends()
        answer = [first]
        while len(answer) < num_tokens and answer[-1] not in ends:
            answer.append(self._next(answer[-1:], cache))
            step()
        return answer

    def _next(self, tokens: Sequence[int], cache: DynamicCache) -> int:
        return int(last_logits(self._model, tokens, cache).argmax())

    def _ends(self) -> set[int]:
        end = cast("int | list[int] | None", getattr(self._model.generation_config, "eos_token_id", None))
        return set() if end is None else {end} if isinstance(end, int) else set(end)
