"""A Hugging Face model folder small enough for tests: two layers, seeded weights, one token per byte."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

gc.freeze()  # the collection after every test need not walk all of torch and transformers (0.6 s)

CONTEXT = 4096
NUM_LAYERS = 2
NUM_KV_HEADS = 2
HEAD_DIM = 16
TEMPLATE = "{% for m in messages %}<user>{{ m['content'] }}</user>{% endfor %}<answer>"


def make_tiny_model(folder: Path) -> Path:
    """Write the model into `folder`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    end = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=TEMPLATE)
    fast.save_pretrained(str(folder))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=end + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(str(folder))
    return folder
