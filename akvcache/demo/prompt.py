"""From a document and a question to the tokens of a prompt of a given length."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, cast

from akvcache.demo.options import DEFAULT_PROMPT_TOKENS, BadValue, DemoOptions, one_line

__all__ = (
    "Prompt",
    "Tokenizer",
    "build_prompt",
    "check_chunks",
    "context_tokens",
    "load_tokenizer",
    "prompt_limit",
    "read_document",
)

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
        raise BadValue(
            f"config.json in {str(folder)!r} must give max_position_embeddings: {one_line(error)}"
        ) from error


def prompt_limit(options: DemoOptions, context: int) -> int:
    """Return the longest prompt for a model with `context` positions.

    Raises:
        BadValue: Prompt and answer do not fit.
    """
    room = context - options.new_tokens
    if room < options.chunk_tokens + 1:
        raise BadValue(
            f"--new-tokens {options.new_tokens} and --chunk-tokens {options.chunk_tokens} must together be less than "
            f"the model's context of {context} tokens"
        )
    limit = options.prompt_tokens or min(DEFAULT_PROMPT_TOKENS, room)
    if limit > room:
        raise BadValue(
            f"--prompt-tokens {limit} must be at most {room}: the model's context of {context} tokens "
            f"less --new-tokens {options.new_tokens}"
        )
    return limit


def check_chunks(options: DemoOptions, prompt: Prompt) -> None:
    """Check that the prompt has a whole chunk and a token to compute behind it.

    Raises:
        BadValue: It has not.
    """
    if len(prompt.tokens) <= options.chunk_tokens:
        raise BadValue(
            f"--chunk-tokens {options.chunk_tokens} must be less than the {len(prompt.tokens)} tokens of the prompt"
        )


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
