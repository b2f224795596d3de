"""What the demo prints: bars while it runs, then a table, the verdict, the answer and the spans of both requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.tree import Tree

from akvcache.demo.messages import Report
from akvcache.demo.run import DemoResult
from akvcache.demo.spans import SpanRecord

__all__ = ("Silent", "Terminal", "show")
