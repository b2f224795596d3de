"""From a document and a question to the tokens of a prompt of a given length."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, cast

from akvcache.demo.options import DEFAULT_PROMPT_TOKENS, BadValue, DemoOptions, default_document, one_line

__all__ = ("Prompt", "Tokenizer", "build_prompt", "load_tokenizer", "make_prompt", "read_document")

INSTRUCTION: Final = "Read this document and answer the question at its end."


class Tokenizer(Protocol):
    """What the demo needs of a transformers tokenizer."""

    chat_template: object

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        ...

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, str]], *, add_generation_prompt: bool, return_dict: bool
    ) -> Mapping[str, list[int]]:
        """Return ``input_ids`` of a conversation."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt ready for the model.

    Attributes:
        tokens: Its token ids.
        kept_tokens: Tokens of the document that are in it.
        document_tokens: Tokens of the whole document.
    """

    tokens: Sequence[int]
    kept_tokens: int
    document_tokens: int


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a model folder.

    Raises:
        BadValue: It cannot be loaded.
    """
    factory = importlib.import_module("transformers").AutoTokenizer
    try:
        return cast("Tokenizer", factory.from_pretrained(str(folder), local_files_only=True))
    except (OSError, ValueError, KeyError) as error:
        raise BadValue(f"model folder {str(folder)!r} has no usable tokenizer: {one_line(error)}") from error


def read_document(path: Path) -> str:
    """Return the text of a document.

    Raises:
        BadValue: It cannot be read, is not UTF-8, or is empty.
    """
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadValue(f"--document {str(path)!r} must be readable UTF-8 text: {one_line(error)}") from error
    if not text:
        raise BadValue(f"--document {str(path)!r} must not be empty")
    return text


def context_tokens(folder: Path) -> int:
    """Return the positions a model has, from its config.json.

    Raises:
        BadValue: The file does not say.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadValue(f"config.json in {str(folder)!r} must give max_position_embeddings: {one_line(error)}") from error


def make_prompt(options: DemoOptions, folder: Path, tokenizer: Tokenizer) -> Prompt:
    """Build the prompt that was asked for.

    Raises:
        BadValue: It does not fit into the model's context, or not one chunk of it could be kept.
    """
    room = context_tokens(folder) - options.new_tokens
    limit = options.prompt_tokens or max(1, min(DEFAULT_PROMPT_TOKENS, room))
    if limit > room:
        raise BadValue(
            f"--prompt-tokens {limit} with --new-tokens {options.new_tokens} must fit into the model's context "
            f"of {room + options.new_tokens} tokens"
        )
    text = read_document(options.document or default_document())
    prompt = build_prompt(tokenizer, text, options.question, limit)
    if (len(prompt.tokens) - 1) // options.chunk_tokens < 1:
        raise BadValue(
            f"--chunk-tokens {options.chunk_tokens} must be less than the {len(prompt.tokens)} tokens of the prompt, "
            "so that there is a whole chunk to keep"
        )
    return prompt


def build_prompt(tokenizer: Tokenizer, document: str, question: str, limit: int) -> Prompt:
    """Build a prompt of at most `limit` tokens; the end of the document is cut off if it must be.

    Raises:
        BadValue: The question alone is too long.
    """
    whole = tokenizer.encode(document, add_special_tokens=False)
    tokens = _render(tokenizer, document, question)
    kept = len(whole)
    while len(tokens) > limit:
        # Where the cut falls inside a word the pieces may join anew, so this may take a second turn.
        kept -= len(tokens) - limit
        if kept < 1:
            overhead = len(_render(tokenizer, "", question))
            raise BadValue(
                f"--question takes {overhead} tokens with the chat template, --prompt-tokens is {limit}: "
                "ask a shorter question or allow a longer prompt"
            )
        tokens = _render(tokenizer, tokenizer.decode(whole[:kept]).rstrip("\ufffd"), question)
    return Prompt(tokens=tokens, kept_tokens=kept, document_tokens=len(whole))


def _render(tokenizer: Tokenizer, document: str, question: str) -> list[int]:
    text = f"{INSTRUCTION}\n\n{document}\n\n---\n\n{question}"
    if not tokenizer.chat_template:
        return list(tokenizer.encode(f"{text}\n\nAnswer:"))
    conversation = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)
    return list(rendered["input_ids"])
