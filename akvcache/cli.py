"""The command line: ``akvcache demo``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from typing_extensions import override

from akvcache.demo.options import (
    DEFAULT_CHUNK_TOKENS,
    DEFAULT_NEW_TOKENS,
    DEFAULT_PROMPT_TOKENS,
    DEFAULT_QUESTION,
    DTYPES,
    DemoError,
    DemoOptions,
    default_cache_dir,
)

__all__ = ("main",)

INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line instead of a page of usage."""

    @override
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


def _path(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("'' must be a path")
    return Path(text)


def _whole(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least {low}")
        return value

    return parse


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="akvcache", description="A KV-cache engine for LLM serving.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"akvcache {version('akvcache')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        allow_abbrev=False,
        help="answer one long prompt twice, in two processes, the second time from NVMe",
        description="Let a real model answer one long prompt in two processes. The first computes and stores the "
        "prompt's KV, the second finds it on NVMe. Prints the time to the first token of both.",
    )
    add = demo.add_argument
    add("--document", type=_path, metavar="PATH", help="text to ask about (the shipped lighthouse handbook)")
    add("--question", default=DEFAULT_QUESTION, metavar="TEXT", help="what to ask (%(default)r)")
    add("--model", type=_path, metavar="PATH", help="folder of a Hugging Face model (SmolLM2-135M-Instruct)")
    add("--dtype", choices=DTYPES, default=DTYPES[0], help="what the model computes in (%(default)s)")
    add(
        "--chunk-tokens",
        type=_whole(1),
        default=DEFAULT_CHUNK_TOKENS,
        metavar="N",
        help="tokens per chunk (%(default)s)",
    )
    add("--store", type=_path, metavar="DIR", help="folder of the NVMe tier, kept (a temporary one, removed)")
    add(
        "--prompt-tokens",
        type=_whole(1),
        metavar="N",
        help=f"longest prompt; the document is cut to fit ({DEFAULT_PROMPT_TOKENS})",
    )
    add("--new-tokens", type=_whole(1), default=DEFAULT_NEW_TOKENS, metavar="N", help="longest answer (%(default)s)")
    add("--cache-dir", type=_path, default=default_cache_dir(), metavar="DIR", help="prepared models (%(default)s)")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0 if all went well, 1 if the demo did not show what it should, 2 if it could not run as asked.
    """
    arguments = vars(_parser().parse_args(argv))
    arguments.pop("command")
    as_json = bool(arguments.pop("json"))
    try:
        return _demo_json(DemoOptions(**arguments)) if as_json else _demo_text(DemoOptions(**arguments))
    except DemoError as error:
        return _say(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)


def _demo_json(options: DemoOptions) -> int:
    from akvcache.demo.run import Silent, run_demo  # noqa: PLC0415 - keeps `--help` fast

    result = run_demo(options, Silent())
    print(result.to_json())
    return _verdict(result.problems)


def _demo_text(options: DemoOptions) -> int:
    from akvcache.demo.model import require  # noqa: PLC0415
    from akvcache.demo.run import run_demo  # noqa: PLC0415

    options.check()
    require("rich", "transformers")
    from akvcache.demo.show import Terminal  # noqa: PLC0415 - rich is optional

    terminal = Terminal()
    with terminal:
        result = run_demo(options, terminal)
    terminal.show(result)
    return _verdict(result.problems)


def _verdict(problems: Sequence[str]) -> int:
    return _say("; ".join(problems), DemoError.exit_code) if problems else 0


def _say(message: str, code: int) -> int:
    print(f"akvcache demo: {' '.join(message.split())}", file=sys.stderr)
    return code
