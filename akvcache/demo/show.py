"""What the demo prints: bars while it runs, then a table, the verdict, the answer and the spans of both requests."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Table
from rich.text import Text
from rich.tree import Tree
from typing_extensions import override

from akvcache.demo.messages import Report
from akvcache.demo.run import DemoResult
from akvcache.demo.spans import SpanRecord, Value

__all__ = ("Terminal",)

KEY_ATTRIBUTES = (
    "process",
    "tier",
    "tokens",
    "tokens.hit",
    "tokens.loaded",
    "tokens.stored",
    "chunks",
    "bytes",
    "stopped",
)
"""Attributes that the tree shows, in order; ``--json`` has them all."""


class _Seconds(ProgressColumn):
    @override
    def render(self, task: Task) -> Text:
        seconds = task.finished_time if task.finished_time is not None else task.elapsed or 0.0
        return Text(f"{seconds:7.2f} s")


class Terminal:
    """Prints the demo with rich. Use it as a context manager, so that the cursor comes back whatever happens."""

    def __init__(self) -> None:
        self._console = Console()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        self._stop()

    def process(self, title: str) -> None:
        """See `akvcache.demo.run.Progress.process`."""
        self._stop()
        self._console.print(f"\n[bold]{escape(title)}[/bold]")
        self._progress = Progress(
            TextColumn("  {task.description:<15}"), BarColumn(), MofNCompleteColumn(), _Seconds(), console=self._console
        )
        self._progress.start()

    def phase(self, name: str, total: int) -> None:
        """See `akvcache.demo.run.Progress.phase`."""
        self._complete()
        assert self._progress is not None
        self._task = self._progress.add_task(name, total=total)

    def step(self) -> None:
        """See `akvcache.demo.run.Progress.step`."""
        assert self._progress is not None
        assert self._task is not None
        self._progress.advance(self._task)

    def finish(self) -> None:
        """See `akvcache.demo.run.Progress.finish`."""
        self._complete()
        self._stop()

    def _complete(self) -> None:
        if self._progress is not None and self._task is not None:
            total = next(task.total for task in self._progress.tasks if task.id == self._task)
            self._progress.update(self._task, completed=total)
            self._task = None

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            self._task = None

    def show(self, result: DemoResult) -> None:
        """Print the outcome."""
        out = self._console
        out.print()
        out.print(_table(result))
        for note in result.notes:
            out.print(f"note: {note}", style="dim", markup=False, highlight=False, soft_wrap=True)
        first, second = result.first, result.second
        times = f"{first.ttft_s:.2f} s -> {second.ttft_s:.3f} s"
        out.print(f"[bold]first token {result.speedup:.1f} times sooner[/bold] ({times})", highlight=False)
        out.print(f"tokens identical: {_same(first.generated, second.generated)} ({len(second.generated)} generated)")
        out.print(f"KV identical:     {_same(first.kv_digest, second.kv_digest)} (every byte of the whole chunks)")
        out.print("\n[bold]answer[/bold]")
        out.print(f"  {result.answer}", markup=False, highlight=False, soft_wrap=True)
        for title, report in (("first request", first), ("second request", second)):
            out.print(f"\n[bold]spans of the {title}[/bold] (process {report.pid})", highlight=False)
            for tree in _trees(report.spans):
                out.print(tree, highlight=False, soft_wrap=True)


def _table(result: DemoResult) -> Table:
    first, second = result.first, result.second
    table = Table(title=f"{result.model}, {result.dtype}, chunks of {result.chunk_tokens} tokens", title_justify="left")
    table.add_column("")
    table.add_column("first process", justify="right")
    table.add_column("second process", justify="right")

    def row(name: str, *values: str) -> None:
        table.add_row(name, *values)

    row("prompt tokens", *(str(result.prompt_tokens),) * 2)
    row("hit", _tiers(first), _tiers(second))
    row("loaded", _megabytes(first.loaded_bytes), _megabytes(second.loaded_bytes))
    row("prompt tokens computed", str(first.computed_tokens), str(second.computed_tokens))
    for name, one, two in (
        ("  lookup", first.lookup_s, second.lookup_s),
        ("  retrieve", first.retrieve_s, second.retrieve_s),
        ("  prefill", first.prefill_s, second.prefill_s),
        ("time to first token", first.ttft_s, second.ttft_s),
    ):
        row(name, f"{one:.3f} s", f"{two:.3f} s")
    row("speed-up", "", f"{result.speedup:.1f} x")
    row("stored, durable", f"{first.stored_tokens}, {first.durable_tokens} tokens", "")
    return table


def _tiers(report: Report) -> str:
    return ", ".join(f"{tier}: {tokens} tokens" for tier, tokens in report.hit_by_tier.items()) or "0 tokens"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


def _same(one: object, other: object) -> str:
    return "[green]yes[/green]" if one == other else "[red]no[/red]"


def _trees(spans: Sequence[SpanRecord]) -> list[Tree]:
    """Return a tree per root; a span that is only linked hangs under its cause."""
    known = {span.span_id for span in spans}
    nodes = {span.span_id: Tree(_label(span)) for span in spans}
    roots: list[Tree] = []
    for span in spans:
        causes = [cause for cause in (span.parent_id, *span.links) if cause in known]
        if causes:
            nodes[causes[0]].children.append(nodes[span.span_id])
        else:
            roots.append(nodes[span.span_id])
    return roots


def _label(span: SpanRecord) -> str:
    attributes = {name.removeprefix("akv.").removeprefix("demo."): value for name, value in span.attributes.items()}
    shown = [f"{name}={_value(name, attributes[name])}" for name in KEY_ATTRIBUTES if attributes.get(name)]
    name = f"[cyan]{span.name}[/cyan]{' (linked)' if span.links else ''}"
    return "  ".join((name, f"[bold]{span.duration_s * 1e3:.1f} ms[/bold]", *map(escape, shown)))


def _value(name: str, value: Value) -> str:
    return _megabytes(int(value)) if name == "bytes" else str(value)
