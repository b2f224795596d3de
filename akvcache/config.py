"""One frozen tree of options; the only module that reads the environment.

Strings become numbers here and nowhere else: sizes such as "4GiB", lists of tier URLs, environment variables
(``AKV_HOST_BYTES=4GiB``) and TOML. An unknown key is an error that suggests the nearest known one.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from akvcache.errors import ConfigurationError
from akvcache.tokens import is_token

__all__ = ("EngineConfig", "TierUrl", "parse_bytes", "suggest")

ENV_PREFIX: Final = "AKV_"

_UNITS: Final = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE: Final = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", re.ASCII)
_CHOICES: Final = {"chunker": ("fixed", "segments"), "key_hash": ("sha256", "xxh3_128"), "eviction": ("lru", "slru")}


def parse_bytes(value: str | int) -> int:
    """Return a size in bytes from a number or text such as "4GiB", "500 MB" or "1024".

    Raises:
        ConfigurationError: It is not a size, or not positive.
    """
    if isinstance(value, bool) or not isinstance(cast("object", value), (str, int)):
        raise ConfigurationError(f"size {value!r} must be a number of bytes or text such as '4GiB'")
    if isinstance(value, int):
        size = value
    else:
        match = _SIZE.fullmatch(value)
        unit = match[2].upper() if match else ""
        if match is None or unit not in _UNITS:
            raise ConfigurationError(f"size {value!r} is not understood; write it like '512MiB', '4GiB' or '200GB'")
        size = int(float(match[1]) * _UNITS[unit])
    if size <= 0:
        raise ConfigurationError(f"size {value!r} must be positive")
    return size


def suggest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the nearest known one, or all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names) or 'none'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUrl:
    """A tier URL taken apart: ``scheme://authority/path?option=value``."""

    scheme: str
    authority: str
    path: str
    options: Mapping[str, str]

    @classmethod
    def parse(cls, url: str, *, known: Iterable[str] | None = None) -> TierUrl:
        """Take `url` apart.

        Args:
            url: For example ``nvme:///var/cache/akv?capacity=200GiB``.
            known: Option names the tier reads; None accepts any.

        Raises:
            ConfigurationError: There is no scheme, an option is unknown, empty or given twice.
        """
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise ConfigurationError(f"tier {url!r} is not a URL: {error}") from error
        if not parts.scheme or "://" not in url:
            raise ConfigurationError(f"tier {url!r} is not a URL such as 'nvme:///var/cache/akv?capacity=200GiB'")
        options: dict[str, str] = {}
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            if known is not None and name not in set(known):
                raise ConfigurationError(f"tier {parts.scheme}: unknown option {name!r}; {suggest(name, known)}")
            if not value or name in options:
                raise ConfigurationError(f"tier {parts.scheme}: option {name!r} is empty or given twice")
            options[name] = value
        return cls(scheme=parts.scheme, authority=parts.netloc, path=unquote(parts.path), options=options)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How one engine behaves. Sizes take text such as "4GiB"; every duration is in seconds.

    Attributes:
        chunk_tokens: Tokens per chunk, a multiple of the serving engine's block size.
        chunker: "fixed", or "segments": a chunk also ends after each `separator`.
        separator: Token ids of the separator for "segments".
        key_hash: "sha256", or "xxh3_128" where one tenant owns the cache.
        host_bytes: Size of the host pool.
        prefault: Touch the pool's memory in the background at open, so that first use is fast.
        eviction: "lru", or "slru" (scan-resistant), for the host tier.
        staging_reserve: Host slots that only loads may use, so that a pool full of leases still serves reads.
        tiers: URLs of the lower tiers, fastest first.
        wave_bytes: Bytes per copy between device and host; several chunks share one.
        window_bytes: Host memory one retrieve may have in flight.
        memory_wait_s: Longest wait of a request for the next host slot.
        store_deadline_s: Longest a store may take.
        retrieve_deadline_s: Longest a retrieve or prefetch may take when the call gives no deadline.
        lookup_deadline_s: Longest a lookup may wait for the tiers.
        io_timeout_s: Longest one tier read or write may take before it counts as failed.
        io_retries: Further tries of a tier operation that failed retryably.
        copy_timeout_s: Longest one device copy may take.
        open_timeout_s: Longest a tier may take to open before the engine goes on without it.
        close_timeout_s: Longest `aclose` waits for queued writes.
        max_lease_s: Upper bound of a lookup lease.
        write_queue_bytes: Most bytes queued for writing per tier; None is half the host pool.
        breaker_failures: Failures in a row that take a tier out of use.
        breaker_reset_s: Pause before such a tier is tried again.
        copy_threads: Threads that copy between device and host; they share the chunks of a wave. One is enough for a
            connector that only launches copies on a device.
        min_tokens: Prompts shorter than this are not cached.
        passive: This rank leaves the cache to another one: every call answers empty.
        strict: Raise `InvariantError` instead of degrading; for tests.
    """

    chunk_tokens: int = 256
    chunker: str = "fixed"
    separator: Sequence[int] = ()
    key_hash: str = "sha256"
    host_bytes: int | str = "1GiB"
    prefault: bool = True
    eviction: str = "lru"
    staging_reserve: int = 2
    tiers: Sequence[str] = ()
    wave_bytes: int | str = "32MiB"
    window_bytes: int | str = "256MiB"
    memory_wait_s: float = 1.0
    store_deadline_s: float = 60.0
    retrieve_deadline_s: float = 30.0
    lookup_deadline_s: float = 1.0
    io_timeout_s: float = 10.0
    io_retries: int = 1
    copy_timeout_s: float = 30.0
    open_timeout_s: float = 60.0
    close_timeout_s: float = 30.0
    max_lease_s: float = 300.0
    write_queue_bytes: int | str | None = None
    breaker_failures: int = 5
    breaker_reset_s: float = 5.0
    copy_threads: int = 2
    min_tokens: int = 0
    passive: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        for name in ("host_bytes", "wave_bytes", "window_bytes", "write_queue_bytes"):
            self._size(name)
        self._list("tiers", lambda tier: isinstance(tier, str), "URLs")
        self._list("separator", is_token, "token ids")
        for name in ("chunk_tokens", "breaker_failures", "copy_threads"):
            self._at_least(name, 1)
        for name in ("staging_reserve", "io_retries", "min_tokens"):
            self._at_least(name, 0)
        for name in (f.name for f in fields(self) if f.name.endswith("_s")):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ConfigurationError(f"{name} must be a positive number of seconds, got {value!r}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                known = " or ".join(map(repr, choices))
                raise ConfigurationError(f"{name} must be {known}, got {getattr(self, name)!r}")
        if (self.chunker == "segments") != bool(self.separator):
            raise ConfigurationError("chunker 'segments' needs a separator, and only it takes one")
        for name in ("prefault", "passive", "strict"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"{name} must be true or false, got {getattr(self, name)!r}")

    def _size(self, name: str) -> None:
        value = cast("int | str | None", getattr(self, name))
        if value is None and name == "write_queue_bytes":
            return
        try:
            object.__setattr__(self, name, parse_bytes(cast("int | str", value)))
        except ConfigurationError as error:
            raise ConfigurationError(f"{name}: {error}") from None

    def _list(self, name: str, valid: Callable[[object], bool], items: str) -> None:
        value = getattr(self, name)
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise ConfigurationError(f"{name} must be a list of {items}, got {value!r}")
        values = tuple(cast("Sequence[object]", value))
        if not all(map(valid, values)):
            raise ConfigurationError(f"{name} must be a list of {items}, got {value!r}")
        object.__setattr__(self, name, values)

    def _at_least(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ConfigurationError(f"{name} must be a whole number of at least {low}, got {value!r}")

    @property
    def host_size(self) -> int:
        """`host_bytes` as a number."""
        return parse_bytes(self.host_bytes)

    @property
    def wave_size(self) -> int:
        """`wave_bytes` as a number."""
        return parse_bytes(self.wave_bytes)

    @property
    def window_size(self) -> int:
        """`window_bytes` as a number."""
        return parse_bytes(self.window_bytes)

    @property
    def write_queue_size(self) -> int:
        """`write_queue_bytes` as a number, its default resolved."""
        return self.host_size // 2 if self.write_queue_bytes is None else parse_bytes(self.write_queue_bytes)

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> EngineConfig:
        """Build a configuration from plain values.

        Raises:
            ConfigurationError: A key is unknown (the nearest known one is named) or a value is not valid.
        """
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise ConfigurationError(f"unknown option {name!r}; {suggest(name, known)}")
        return cls(**cast("dict[str, Any]", dict(values)))  # __post_init__ checks every value

    @classmethod
    def load(cls, path: str | Path | None = None, *, environ: Mapping[str, str] | None = None) -> EngineConfig:
        """Build a configuration from a TOML file and the environment; the environment wins.

        Args:
            path: TOML file whose ``[akvcache]`` table (or top level, without one) holds options.
            environ: Environment to read ``AKV_*`` from; None is the process's own.

        Raises:
            ConfigurationError: The file cannot be read, or a key or value is not valid.
        """
        values: dict[str, object] = {}
        if path is not None:
            try:
                parsed = tomllib.loads(Path(path).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ConfigurationError(f"cannot read configuration {str(path)!r}: {error}") from error
            table = parsed.get("akvcache", parsed)
            if not isinstance(table, dict):
                raise ConfigurationError(f"[akvcache] in {str(path)!r} must be a table, got {table!r}")
            values.update(cast("dict[str, object]", table))
        for name, text in (os.environ if environ is None else environ).items():
            if name.startswith(ENV_PREFIX):
                option = name.removeprefix(ENV_PREFIX).lower()
                values[option] = _from_text(option, text)
        return cls.from_mapping(values)


def _from_text(option: str, text: str) -> object:
    """Turn an environment value into the type of its option."""
    kinds = {f.name: str(f.type) for f in fields(EngineConfig)}
    kind = kinds.get(option)
    try:
        if kind is None or "str" in kind.split(" | ") or kind == "str":
            return text
        if kind == "bool":
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]
        if kind.startswith("Sequence"):
            items = [item for item in re.split(r"[,\s]+", text) if item]
            return [int(item) for item in items] if kind == "Sequence[int]" else items
        return int(text) if kind == "int" else float(text)
    except (KeyError, ValueError):
        raise ConfigurationError(f"{ENV_PREFIX}{option.upper()}={text!r} is not a valid {kind}") from None
