"""Page-aligned buffers on 2 MiB pages: what O_DIRECT runs fastest from."""

from __future__ import annotations

import mmap

import numpy as np

HUGE_PAGE = 2 << 20


def huge_buffer(num_bytes: int) -> np.ndarray:
    """Return zeroed, touched bytes that begin on a 2 MiB page."""
    area = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(area, dtype=np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE
    buffer = whole[start : start + num_bytes]
    buffer.fill(0)
    return buffer


def random_buffer(num_bytes: int, seed: int) -> np.ndarray:
    """Return a huge buffer of random bytes."""
    buffer = huge_buffer(num_bytes)
    noise = np.random.default_rng(seed).bytes(min(num_bytes, 1 << 20))
    step = len(noise)
    for start in range(0, num_bytes, step):
        part = buffer[start : start + step]
        part[:] = np.frombuffer(noise, dtype=np.uint8)[: part.size]
        part[:8] = np.frombuffer(start.to_bytes(8, "little"), dtype=np.uint8)[: part.size]
    return buffer
