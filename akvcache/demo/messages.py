"""What the two processes of the demo are told and what they report: plain data, one JSON object a line.

A worker reads one `Job` from its standard input and writes events to its standard output::

    {"event": "phase", "name": "prefill", "total": 30}     a phase begins
    {"event": "step"}                                      one of its steps is done
    {"event": "report", "report": {...}}                   the last line: a `Report`
    {"event": "error", "message": "...", "exit_code": 1}   the last line: it could not
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, cast

from akvcache.demo.spans import SpanRecord

__all__ = ("Event", "Job", "Report", "Role")

Role = Literal["first", "second"]
"""The first process computes and stores the prompt, the second one loads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request.

    Attributes:
        role: Which of the two processes this is.
        model_folder: Folder of the model.
        model_name: Its name, for the namespace.
        dtype: What it computes in.
        tokens: The prompt.
        chunk_tokens: Tokens per chunk.
        new_tokens: Longest answer.
        store: Folder of the NVMe tier.
        salt: Isolation salt of this run of the demo.
    """

    role: Role
    model_folder: str
    model_name: str
    dtype: str
    tokens: list[int]
    chunk_tokens: int
    new_tokens: int
    store: str
    salt: str

    @property
    def whole_chunk_tokens(self) -> int:
        """Tokens of the prompt that a cache can give back: whole chunks, leaving the model a token to compute."""
        return (len(self.tokens) - 1) // self.chunk_tokens * self.chunk_tokens

    def to_json(self) -> str:
        """Return the job as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Job:
        """Read what `to_json` wrote."""
        return cls(**json.loads(line))


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one process did.

    Attributes:
        pid: Its process id.
        hit_tokens: Tokens that lookup found.
        hit_by_tier: The same by tier.
        loaded_tokens: Tokens that retrieve brought.
        loaded_by_tier: The same by tier.
        loaded_bytes: Bytes of KV that it brought.
        computed_tokens: Tokens of the prompt that the model computed.
        ttft_s: From the tokens being ready to the first token of the answer.
        lookup_s: The part of `ttft_s` spent in lookup.
        retrieve_s: The part spent in retrieve.
        prefill_s: The part spent in the model.
        generated: The answer's token ids.
        kv_digest: Digest of the KV of the whole chunks, as the model used it.
        stored_tokens: Tokens kept by store; 0 in the second process.
        durable_tokens: Tokens of them that the NVMe tier holds.
        trouble: Why something fell short, or None.
        spans: Everything that was traced.
    """

    pid: int
    hit_tokens: int
    hit_by_tier: dict[str, int]
    loaded_tokens: int
    loaded_by_tier: dict[str, int]
    loaded_bytes: int
    computed_tokens: int
    ttft_s: float
    lookup_s: float
    retrieve_s: float
    prefill_s: float
    generated: list[int]
    kv_digest: str
    stored_tokens: int
    durable_tokens: int
    trouble: str | None
    spans: list[SpanRecord]

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> Report:
        """Read what `dataclasses.asdict` made."""
        spans = [SpanRecord(**span) for span in cast("list[dict[str, str]]", values["spans"])]  # type: ignore[arg-type]
        return cls(**{**values, "spans": spans})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of a worker.

    Attributes:
        kind: "phase", "step", "report" or "error".
        name: Name of the phase.
        total: Steps of the phase.
        message: What went wrong.
        exit_code: The exit code it stands for.
        report: The report, as plain values.
    """

    kind: str
    name: str = ""
    total: int = 1
    message: str = ""
    exit_code: int = 1
    report: Mapping[str, object] | None = None

    def to_json(self) -> str:
        """Return the event as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Event:
        """Read what `to_json` wrote."""
        return cls(**json.loads(line))
