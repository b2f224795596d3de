"""Several processes on one cache directory. Run by test_nvme_processes.py: MODE ROOT, exit status 0 if all holds.

A process of its own, because it forks: `share` has four writers put three times the cap through the directory, `kill`
kills one of two writers at a random instant twenty times. The children are forked from here, where everything is
imported, so a round takes milliseconds.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

from akvcache.testing import make_namespace_id
from tests.forking import spawn
from tests.nvme_kit import FRAME, allocated_below, chunk_files, get, opened, prompt, put, sample_under_lock, temp_files

CAPACITY = 48 * FRAME
WRITERS = 4
ROUNDS = 20
TIMEOUT_S = 40


def ended(pid: int) -> bool:
    """Return whether a child has ended; fail if it ended badly."""
    done, status = os.waitpid(pid, os.WNOHANG)
    assert not done or os.waitstatus_to_exitcode(status) == 0, f"child {pid} failed"
    return done != 0


def check(root: Path) -> None:
    """Open in a child: every visible chunk verifies, usage is what the disk says, nothing is left unfinished."""

    async def verify_all() -> None:
        async with opened(root, capacity_bytes=CAPACITY) as backend:
            assert temp_files(root) == []
            keys = [chunk.key async for chunk in backend.scan(make_namespace_id())]
            assert len(keys) == len(chunk_files(root)) == backend.statistics().entries
            for key in keys:
                assert await get(backend, key)
            assert backend.statistics().used_bytes == allocated_below(root) <= CAPACITY

    pid = spawn(verify_all)
    while not ended(pid):
        time.sleep(0.002)


def share(root: Path) -> None:
    """Four writers, three times the cap, one of them leaving and coming back."""

    def writer(number: int) -> Callable[[], Coroutine[object, object, None]]:
        async def write() -> None:
            for visit in range(3):
                async with opened(root, capacity_bytes=CAPACITY) as backend:
                    for label in range(CAPACITY // FRAME // WRITERS):
                        async with asyncio.TaskGroup() as group:
                            for kind in ("own", "shared"):
                                keys = prompt((kind, visit, label, number if kind == "own" else 0), 1)
                                group.create_task(put(backend, keys))
                        assert backend.statistics().used_bytes <= CAPACITY
                        if label % 5 == 0:
                            await backend.delete(keys[0])

        return write

    left = {spawn(writer(number)) for number in range(WRITERS)}
    highest, samples = 0, 0
    while left:
        left = {pid for pid in left if not ended(pid)}
        if (root / "usage").exists():
            highest, samples = max(highest, sample_under_lock(root)), samples + 1
    print(f"highest {highest} of {CAPACITY} in {samples} samples")
    assert samples > 20
    assert CAPACITY * 0.8 < highest <= CAPACITY
    check(root)


def kill(root: Path) -> None:
    """Kill one writer again and again while another goes on."""
    clock = random.Random(7)

    def writer(name: str, ready: int) -> Callable[[], Coroutine[object, object, None]]:
        async def write() -> None:
            async with opened(root, capacity_bytes=CAPACITY) as backend:
                label = 0
                while True:
                    async with asyncio.TaskGroup() as group:
                        for part in range(3):
                            group.create_task(put(backend, prompt((name, label, part), 2)))
                    if label % 3 == 0:
                        await backend.delete(prompt((name, label, 0), 2)[1])
                    if label == 1:
                        os.write(ready, b".")
                    label += 1

        return write

    read_end, ready = os.pipe()
    survivor = spawn(writer("survivor", ready))
    os.read(read_end, 1)
    for round_ in range(ROUNDS):
        victim = spawn(writer(f"victim {round_}", ready))
        os.read(read_end, 1)
        time.sleep(clock.uniform(0, 0.04))
        assert sample_under_lock(root) <= CAPACITY
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        assert not ended(survivor)
        if round_ % 4 == 3:  # now everybody dies
            os.kill(survivor, signal.SIGKILL)
            os.waitpid(survivor, 0)
            assert allocated_below(root) <= CAPACITY
            check(root)
            survivor = spawn(writer(f"survivor {round_}", ready))
            os.read(read_end, 1)
    os.kill(survivor, signal.SIGKILL)
    os.waitpid(survivor, 0)
    check(root)


if __name__ == "__main__":
    signal.alarm(TIMEOUT_S)  # a child that fails may leave us waiting for its word
    {"share": share, "kill": kill}[sys.argv[1]](Path(sys.argv[2]))
