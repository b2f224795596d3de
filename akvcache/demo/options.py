"""What the demo was asked for, and how it says no."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = (
    "DEFAULT_CHUNK_TOKENS",
    "DEFAULT_NEW_TOKENS",
    "DEFAULT_PROMPT_TOKENS",
    "DEFAULT_QUESTION",
    "DTYPES",
    "MIN_PROMPT_TOKENS",
    "BadValue",
    "DemoError",
    "DemoOptions",
    "default_cache_dir",
    "default_document",
    "one_line",
)

DTYPES: Final = ("float32", "bfloat16", "float16")
DEFAULT_QUESTION: Final = "When was Skerrow Light first lit?"
DEFAULT_PROMPT_TOKENS: Final = 4000
MIN_PROMPT_TOKENS: Final = 2000
"""Shortest prompt made from the shipped document: below it there is little to save."""
DEFAULT_NEW_TOKENS: Final = 32
DEFAULT_CHUNK_TOKENS: Final = 64


class DemoError(Exception):
    """The demo ran and did not show what it should."""

    exit_code = 1


class BadValue(DemoError):
    """The demo cannot run as asked: the message names the value and what would be right."""

    exit_code = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """One run of the demo.

    Attributes:
        document: Text to ask about; None is the shipped handbook.
        question: What to ask.
        model: Folder of a Hugging Face model; None is SmolLM2, prepared in `cache_dir`.
        dtype: What the model computes in, one of `DTYPES`.
        chunk_tokens: Tokens per chunk.
        store: Folder of the NVMe tier, kept afterwards; None is a temporary one.
        prompt_tokens: Longest prompt; the document is cut to fit. None is `DEFAULT_PROMPT_TOKENS`, or less if the
            model's context is shorter.
        new_tokens: Longest answer.
        cache_dir: Where prepared models are kept.
    """

    document: Path | None
    question: str
    model: Path | None
    dtype: str
    chunk_tokens: int
    store: Path | None
    prompt_tokens: int | None
    new_tokens: int
    cache_dir: Path

    def check(self) -> None:
        """Check what can be checked without loading anything.

        Raises:
            BadValue: A value is not usable.
        """
        if self.document is None and self.prompt_tokens is not None and self.prompt_tokens < MIN_PROMPT_TOKENS:
            raise BadValue(
                f"--prompt-tokens {self.prompt_tokens} must be at least {MIN_PROMPT_TOKENS} with the shipped document; "
                "give --document to ask about something shorter"
            )
        if not self.question.strip():
            raise BadValue(f"--question {self.question!r} must not be empty")
        if self.document is not None and not self.document.is_file():
            raise BadValue(f"--document {str(self.document)!r} must be a text file that exists")
        if self.model is not None and not (self.model / "config.json").is_file():
            raise BadValue(f"--model {str(self.model)!r} must be a folder of a Hugging Face model (with config.json)")
        for option, folder in (("--store", self.store), ("--cache-dir", self.cache_dir)):
            if folder is not None and folder.exists() and not folder.is_dir():
                raise BadValue(f"{option} {str(folder)!r} must be a folder, or not exist yet")


def default_cache_dir() -> Path:
    """Return where prepared models are kept unless told otherwise."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "akvcache" / "models"


def default_document() -> Path:
    """Return the shipped handbook: beside this module in a wheel, under ``examples/data`` in a checkout."""
    name = "lighthouse-handbook.md"
    packed = Path(__file__).with_name(name)
    return packed if packed.exists() else Path(__file__).parents[2] / "examples" / "data" / name


def one_line(error: BaseException) -> str:
    """Return the first line of an exception's text, or its type if it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
