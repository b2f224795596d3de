"""The local NVMe tier of akvcache."""

from __future__ import annotations

from .backend import NvmeBackend
from .options import DirectMode
from .stats import NvmeStatistics

__all__ = ("DirectMode", "NvmeBackend", "NvmeStatistics")
