"""The parent: prepares model and prompt, runs the two processes one after the other, compares what they report."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from akvcache.demo.messages import Event, Job, Report
from akvcache.demo.model import MODEL_CONTEXT, MODEL_NAME, prepare_model, require, set_up_transformers
from akvcache.demo.options import BadValue, DemoError, DemoOptions, default_document
from akvcache.demo.prompt import (
    Prompt,
    build_prompt,
    check_chunks,
    context_tokens,
    load_tokenizer,
    prompt_limit,
    read_document,
)

__all__ = ("DemoResult", "Progress", "Silent", "run_demo")

NVME: Final = "nvme"
STOP_S: Final = 10.0


class Progress(Protocol):
    """Where the demo says what it is doing. Called in order: `process`, then its phases and their steps."""

    def process(self, title: str) -> None:
        """Another process begins."""
        ...

    def phase(self, name: str, total: int) -> None:
        """Another phase of it begins; the one before is done."""
        ...

    def step(self) -> None:
        """One step of the phase is done."""
        ...

    def finish(self) -> None:
        """The last phase of the process is done."""
        ...


class Silent:
    """Says nothing."""

    def process(self, title: str) -> None:
        """See `Progress.process`."""

    def phase(self, name: str, total: int) -> None:
        """See `Progress.phase`."""

    def step(self) -> None:
        """See `Progress.step`."""

    def finish(self) -> None:
        """See `Progress.finish`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """What the demo showed.

    Attributes:
        model: Name of the model.
        dtype: What it computed in.
        prompt_tokens: Tokens of the prompt.
        chunk_tokens: Tokens per chunk.
        full_chunks: Whole chunks a cache can give back.
        first: What the first process reported.
        second: What the second process reported.
        answer: Text of the second process's answer.
        notes: What the reader should know about how the run was set up.
        problems: What did not come out as it should; empty if all is well.
    """

    model: str
    dtype: str
    prompt_tokens: int
    chunk_tokens: int
    full_chunks: int
    first: Report
    second: Report
    answer: str
    notes: Sequence[str]
    problems: Sequence[str]

    @property
    def speedup(self) -> float:
        """How many times sooner the second process had its first token."""
        return self.first.ttft_s / self.second.ttft_s

    def to_json(self) -> str:
        """Return everything as one JSON object."""
        first, second = self.first, self.second
        return json.dumps(
            {
                "model": self.model,
                "dtype": self.dtype,
                "prompt_tokens": self.prompt_tokens,
                "chunk_tokens": self.chunk_tokens,
                "full_chunks": self.full_chunks,
                "hit_tokens": second.hit_tokens,
                "hit_by_tier": second.loaded_by_tier,
                "bytes": second.loaded_bytes,
                "ttft_cold_s": first.ttft_s,
                "ttft_warm_s": second.ttft_s,
                "speedup": self.speedup,
                "tokens_identical": first.generated == second.generated,
                "kv_identical": first.kv_digest == second.kv_digest,
                "generated_cold": first.generated,
                "generated_warm": second.generated,
                "answer": self.answer,
                "notes": list(self.notes),
                "problems": list(self.problems),
                "cold": asdict(first),
                "warm": asdict(second),
            }
        )


def run_demo(options: DemoOptions, progress: Progress) -> DemoResult:
    """Run the demo.

    Raises:
        BadValue: It cannot run as asked.
        DemoError: A process failed.
    """
    options.check()
    require("transformers")
    set_up_transformers()
    limit = prompt_limit(options, context_tokens(options.model) if options.model else MODEL_CONTEXT)
    document = read_document(options.document or default_document())
    with _store_folder(options.store) as store:
        folder = options.model or _prepare(options, progress)
        tokenizer = load_tokenizer(folder)
        prompt = build_prompt(tokenizer, document, options.question, limit)
        check_chunks(options, prompt)
        job = Job(
            role="first",
            model_folder=str(folder),
            model_name=folder.resolve().name if options.model else MODEL_NAME,
            dtype=options.dtype,
            tokens=list(prompt.tokens),
            chunk_tokens=options.chunk_tokens,
            new_tokens=options.new_tokens,
            store=str(store),
            salt=secrets.token_hex(8),
        )
        progress.process("first process: nothing is cached")
        first = _run_process(job, progress)
        progress.process("second process: the prompt is on NVMe")
        second = _run_process(replace(job, role="second"), progress)
    return DemoResult(
        model=job.model_name,
        dtype=options.dtype,
        prompt_tokens=len(prompt.tokens),
        chunk_tokens=options.chunk_tokens,
        full_chunks=job.whole_chunk_tokens // options.chunk_tokens,
        first=first,
        second=second,
        answer=tokenizer.decode(second.generated, skip_special_tokens=True).strip(),
        notes=_notes(options, prompt),
        problems=_problems(job.whole_chunk_tokens, first, second),
    )


def _prepare(options: DemoOptions, progress: Progress) -> Path:
    def converting() -> None:
        progress.process("once: the model")
        progress.phase("convert to a plain folder", 1)

    folder = prepare_model(options.cache_dir, converting)
    progress.finish()
    return folder


def _notes(options: DemoOptions, prompt: Prompt) -> list[str]:
    notes: list[str] = []
    if prompt.kept_tokens < prompt.document_tokens:
        notes.append(f"the document was cut to its first {prompt.kept_tokens} of {prompt.document_tokens} tokens")
    elif options.prompt_tokens and len(prompt.tokens) < options.prompt_tokens:
        notes.append(f"the whole document makes a prompt of {len(prompt.tokens)} tokens")
    if options.store is not None:
        notes.append(f"entries stay in {str(options.store)!r}; every run has its own salt, so the next one is cold too")
    return notes


def _problems(whole: int, first: Report, second: Report) -> list[str]:
    """Return what did not come out as it should."""
    problems: list[str] = []
    if first.hit_tokens:
        problems.append(f"the first process was not cold: it hit {first.hit_tokens} tokens")
    if first.durable_tokens < whole:
        problems.append(f"{first.durable_tokens} of {whole} tokens reached NVMe ({first.trouble})")
    elif second.loaded_by_tier != {NVME: whole}:
        problems.append(f"the second process loaded {second.loaded_by_tier}, not {whole} from nvme ({second.trouble})")
    elif first.kv_digest != second.kv_digest:
        problems.append("the KV that came back is not the KV that was stored")
    if first.generated != second.generated:
        problems.append(f"the answers differ: token ids {first.generated} and {second.generated}")
    return problems


@contextmanager
def _store_folder(store: Path | None) -> Generator[Path]:
    if store is None:
        with tempfile.TemporaryDirectory(prefix="akvcache-demo-") as temporary:
            yield Path(temporary)
        return
    try:
        store.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=store):
            pass
    except OSError as error:
        raise BadValue(f"--store {str(store)!r} must be a folder that can be written: {error}") from error
    yield store


def _run_process(job: Job, progress: Progress) -> Report:
    """Run one worker to its end.

    Raises:
        BadValue: It could not use what it was given.
        DemoError: It failed.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        worker = subprocess.Popen(
            [sys.executable, "-m", "akvcache.demo.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
        )
        try:
            report = _converse(worker, job, progress)
            with suppress(subprocess.TimeoutExpired):  # it has reported: what is left of it is the interpreter's end
                worker.wait(STOP_S)
        finally:
            worker.kill()
            worker.communicate()
        if report is None:
            errors.seek(0)
            last = [line.strip() for line in errors if line.strip()][-1:]
            raise DemoError(f"the {job.role} process ended early, exit code {worker.returncode}: {' '.join(last)}")
    return report


def _converse(worker: subprocess.Popen[str], job: Job, progress: Progress) -> Report | None:
    assert worker.stdin is not None
    assert worker.stdout is not None
    with suppress(BrokenPipeError):  # it died already: the missing report says so
        worker.stdin.write(job.to_json() + "\n")
        worker.stdin.flush()
    for line in worker.stdout:
        event = Event.from_json(line)
        if event.kind == "phase":
            progress.phase(event.name, event.total)
        elif event.kind == "step":
            progress.step()
        elif event.report is not None:
            progress.finish()
            return Report.from_mapping(event.report)
        else:
            kind = BadValue if event.exit_code == BadValue.exit_code else DemoError
            raise kind(event.message if kind is BadValue else f"the {job.role} process failed: {event.message}")
    return None
