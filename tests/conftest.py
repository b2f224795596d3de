"""Gates that hold for every test: nothing blocks the loop, nothing leaks, no error goes unseen."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from blockbuster import BlockBuster

CORE = Path(__file__).resolve().parent.parent / "akvcache"


@pytest.fixture(scope="session", autouse=True)
def imports_are_not_garbage() -> None:
    """Keep the objects of all imports out of later collections, which would cost most of the suite's time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_blocks_the_loop() -> Iterator[None]:
    """Fail any test in which our code makes a blocking call on a running loop."""
    blocker = BlockBuster(scanned_modules=["akvcache", "akvcache_nvme"])
    blocker.activate()
    yield
    blocker.deactivate()


def _descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the listing's own descriptor
    return found


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("akv-")}


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Fail any test after which descriptors, threads or tasks of ours are left."""
    before = _descriptors()
    threads = _threads()
    yield
    end = time.monotonic() + 2.0
    while (left := _threads() - threads) and time.monotonic() < end:
        time.sleep(0.005)  # a thread that was told to end needs a moment to be gone
    assert not left, f"threads left: {left}"
    after = {fd: path for fd, path in _descriptors().items() if fd not in before and path.startswith("/")}
    assert not after, f"descriptors left: {after}"


@pytest.fixture(autouse=True)
def stray_errors_fail(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail any test whose loop reports an error that nobody waited for."""
    seen: list[dict[str, object]] = []

    def note(_loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        seen.append(context)

    monkeypatch.setattr(asyncio.BaseEventLoop, "default_exception_handler", note)
    yield
    gc.collect()
    assert not seen, f"unhandled errors on the loop: {seen}"
