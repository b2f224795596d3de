"""What ``nvme:///var/cache/akv?capacity=200GiB&direct=auto&threads=4&recycle=0.25`` means."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from akvcache.config import TierUrl, parse_bytes, suggest
from akvcache.errors import ConfigurationError

__all__ = ("DirectMode", "NvmeOptions")

_KNOWN: Final = ("capacity", "direct", "threads", "recycle")


class DirectMode(Enum):
    """Whether to bypass the page cache."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeOptions:
    """The options of one tier; see `NvmeBackend`."""

    root: str
    capacity_bytes: int
    direct: DirectMode
    threads: int
    recycle_share: float

    @classmethod
    def parse(cls, url: str) -> NvmeOptions:
        """Take a tier URL apart.

        Raises:
            ConfigurationError: An option is unknown, missing or malformed, or the path is not absolute.
        """
        parts = TierUrl.parse(url, known=_KNOWN)
        if parts.authority or len(parts.path) < 2:
            raise ConfigurationError(f"tier nvme: {url!r} needs an absolute path after three slashes: nvme:///path")
        options = parts.options
        if "capacity" not in options:
            raise ConfigurationError("tier nvme: option 'capacity' is required, for example capacity=200GiB")
        modes = {mode.value: mode for mode in DirectMode}
        mode = options.get("direct", "auto")
        if mode not in modes:
            raise ConfigurationError(f"tier nvme: direct={mode!r} is not a mode; {suggest(mode, modes)}")
        try:
            threads, recycle = int(options.get("threads", "4")), float(options.get("recycle", "0.25"))
        except ValueError as error:
            raise ConfigurationError(f"tier nvme: threads and recycle are numbers: {error}") from None
        return cls(
            root=parts.path,
            capacity_bytes=parse_bytes(options["capacity"]),
            direct=modes[mode],
            threads=threads,
            recycle_share=recycle,
        )
