"""The local NVMe tier of akvcache."""

from __future__ import annotations

from .backend import NvmeBackend, NvmeStatistics
from .options import DirectMode

__all__ = ("DirectMode", "NvmeBackend", "NvmeStatistics")
