"""What `NvmeBackend.statistics` returns."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("NvmeStatistics",)


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeStatistics:
    """What one backend sees and did.

    Attributes:
        entries: Chunks it knows of.
        used_bytes: Allocated below the root by all processes, as of its last write or eviction.
        spare_bytes: The part of it in files that wait to be written again.
        capacity_bytes: The cap.
        direct: Whether it bypasses the page cache.
        evictions: Chunks it evicted.
        recycled: Chunks it wrote into the blocks of an older file.
        leftovers_reclaimed: Unfinished files it took over from dead processes.
    """

    entries: int
    used_bytes: int
    spare_bytes: int
    capacity_bytes: int
    direct: bool
    evictions: int
    recycled: int
    leftovers_reclaimed: int
