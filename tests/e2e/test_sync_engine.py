"""The engine for callers without a loop: blocking calls, tickets, many threads, wrong threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from akvcache import CacheEngine, ConfigurationError, SyncCacheEngine, UsageError
from akvcache.facade import Ticket
from akvcache.testing import MemoryBackend, MemoryStore
from tests.doubles import WatchedConnector
from tests.support import CHUNK, MODEL, PagedKV, config_for

T = CHUNK


def sync_engine(
    kv: PagedKV, num_slots: int = 32, tiers: list[Any] | None = None, **options: object
) -> SyncCacheEngine[Any]:
    return SyncCacheEngine(
        config_for(kv, num_slots, **options), connector=kv.connector, namespace=MODEL, tiers=tiers or []
    )


class Gate:
    """A coroutine on the engine's loop that waits until the test lets it go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._go: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, _engine: object) -> str:
        self._loop, self._go = asyncio.get_running_loop(), asyncio.Event()
        self.entered.set()
        await self._go.wait()
        return "passed"

    def open(self) -> None:
        assert self._loop is not None
        assert self._go is not None
        self._loop.call_soon_threadsafe(self._go.set)


class TestCalls:
    def test_every_blocking_call(self) -> None:
        kv = PagedKV(6 * T + 2)
        before = kv.rows(0, 6 * T)
        store = MemoryStore()
        with sync_engine(kv, 4, [MemoryBackend(store)]) as engine:
            kept = engine.store(kv.tokens, kv.slots)
            assert (kept.stored_tokens, kept.stopped) == (6 * T, None)
            assert engine.flush().pending_chunks == 0
            assert len(store.frames) == 6
            kv.wipe()
            found = engine.lookup(kv.tokens, lease_s=30)
            assert found.hit_tokens == 6 * T
            assert found.lease is not None
            loaded = engine.retrieve(kv.tokens, kv.slots, lease=found.lease, deadline_s=5)
            assert loaded.loaded_tokens == 6 * T
            assert torch.equal(kv.rows(0, 6 * T), before)
            engine.release(found.lease)
            engine.release(found.lease)
            assert engine.health().degraded is None
            assert engine.clear().failed_tiers == []
            assert engine.lookup(kv.tokens).hit_tokens == 0
            assert found.lease.released
        engine.release(found.lease)

    def test_the_lease_of_a_lookup_that_was_turned_away_is_released_too(self) -> None:
        kv = PagedKV(4 * T)
        with sync_engine(kv) as engine:
            found = engine.lookup(kv.tokens[:3], lease_s=5)
            assert found.lease is None
            engine.retrieve(kv.tokens[:3], kv.slots, lease=found.lease)
            engine.release(found.lease)

    def test_durability_and_prefetch_through_submit(self) -> None:
        kv = PagedKV(4 * T)
        store = MemoryStore()
        with sync_engine(kv, 16, [MemoryBackend(store)]) as engine:
            kept = engine.store(kv.tokens, kv.slots)
            assert engine.submit(lambda _: kept.durable()).wait(5).durable_tokens == 4 * T
        with sync_engine(kv, 16, [MemoryBackend(store)]) as engine:
            assert engine.submit(lambda e: e.prefetch(kv.tokens)).wait(5).ready_tokens == 4 * T
            assert engine.lookup(kv.tokens).by_tier == {"host": 4 * T}

    def test_a_wrong_argument_reaches_the_caller(self) -> None:
        kv = PagedKV(4 * T)
        with sync_engine(kv) as engine:
            with pytest.raises(UsageError, match="token -1"):
                engine.lookup([-1])
            with pytest.raises(UsageError, match="mask"):
                engine.store(kv.tokens, kv.slots, mask=[True])
            with pytest.raises(UsageError, match="deadline_s"):
                engine.retrieve(kv.tokens, kv.slots, deadline_s=-1)
            assert engine.store(kv.tokens, kv.slots).stored_tokens == 4 * T

    def test_many_threads_at_once(self) -> None:
        kv = PagedKV(40 * T)
        before = kv.rows()
        with sync_engine(kv, 8, [MemoryBackend()], memory_wait_s=10) as engine:
            with concurrent.futures.ThreadPoolExecutor(8) as threads:
                kept = list(threads.map(lambda i: engine.store(*kv.part(i, i + 4)), range(0, 40, 4)))
                assert [result.stored_tokens for result in kept] == [4 * T] * 10
                kv.wipe()
                loaded = list(threads.map(lambda i: engine.retrieve(*kv.part(i, i + 4)), range(0, 40, 4)))
            assert [result.loaded_tokens for result in loaded] == [4 * T] * 10
        assert torch.equal(kv.rows(), before)


class TestTickets:
    def test_poll_never_waits(self) -> None:
        kv = PagedKV(2 * T)
        gate = Gate()
        with sync_engine(kv) as engine:
            ticket = engine.submit(gate)
            assert gate.entered.wait(5)
            assert ticket.poll() is None
            assert repr(ticket) == "<Ticket running>"
            with pytest.raises(TimeoutError):
                ticket.wait(0.01)
            gate.open()
            assert ticket.wait(5) == "passed"
            assert ticket.poll() == "passed"
            assert repr(ticket) == "<Ticket done>"

    def test_a_cancelled_call_ends(self) -> None:
        kv = PagedKV(2 * T)
        gate = Gate()
        with sync_engine(kv) as engine:
            ticket = engine.submit(gate)
            assert gate.entered.wait(5)
            ticket.cancel()
            with pytest.raises(concurrent.futures.CancelledError):
                ticket.wait(5)
            assert engine.store(kv.tokens, kv.slots).stored_tokens == 2 * T

    def test_poll_raises_what_the_call_raised(self) -> None:
        kv = PagedKV(2 * T)
        with sync_engine(kv) as engine:
            ticket = engine.submit(lambda e: e.lookup("text"))  # type: ignore[arg-type]
            with pytest.raises(UsageError):
                ticket.wait(5)
            with pytest.raises(UsageError):
                ticket.poll()


class TestLifecycle:
    def test_before_opening_and_after_closing_every_call_is_refused(self) -> None:
        kv = PagedKV(2 * T)
        engine = sync_engine(kv)
        calls: list[Callable[[], object]] = [
            lambda: engine.lookup(kv.tokens),
            lambda: engine.retrieve(kv.tokens, kv.slots),
            lambda: engine.store(kv.tokens, kv.slots),
            engine.flush,
            engine.clear,
            engine.health,
            lambda: engine.submit(lambda e: e.flush()),
        ]
        engine.close()
        for call in calls:
            with pytest.raises(UsageError, match="closed"):
                call()
        engine.open()
        engine.close()
        engine.close()
        for call in calls:
            with pytest.raises(UsageError, match="closed"):
                call()

    def test_open_twice_is_refused_and_open_again_after_closing_works(self) -> None:
        kv = PagedKV(2 * T)
        engine = sync_engine(kv)
        with engine:
            with pytest.raises(UsageError, match="open already"):
                engine.open()
            engine.store(kv.tokens, kv.slots)
        with engine:
            assert engine.lookup(kv.tokens).hit_tokens == 0

    def test_a_wrong_configuration_is_raised_and_leaves_no_thread(self) -> None:
        kv = PagedKV(2 * T)
        engine = sync_engine(kv, chunk_tokens=6)
        with pytest.raises(ConfigurationError):
            engine.open()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("akv-")]
        engine.close()

    def test_its_own_thread_is_refused_instead_of_hanging(self) -> None:
        kv = PagedKV(2 * T)
        with sync_engine(kv) as engine:

            async def misuse(call: Callable[[], object]) -> None:
                call()

            for call in (
                lambda: engine.lookup(kv.tokens),
                lambda: engine.submit(lambda e: e.flush()),
                engine.flush,
                engine.close,
            ):
                with pytest.raises(UsageError, match="own loop thread"):
                    engine.submit(lambda _, call=call: misuse(call)).wait(5)  # type: ignore[misc]
            assert engine.store(kv.tokens, kv.slots).stored_tokens == 2 * T

    def test_closing_drains(self) -> None:
        kv = PagedKV(20 * T)
        store = MemoryStore()
        with sync_engine(kv, 32, [MemoryBackend(store)]) as engine:
            engine.store(kv.tokens, kv.slots)
        assert len(store.frames) == 20

    def test_closing_from_many_threads_at_once_ends(self) -> None:
        kv = PagedKV(2 * T)
        for _ in range(20):
            engine = sync_engine(kv).open()
            threads = [threading.Thread(target=engine.close, daemon=True) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(5)
                assert not thread.is_alive(), "close hangs"

    def test_submitting_while_it_closes_gives_a_result_or_a_refusal(self) -> None:
        kv = PagedKV(2 * T)
        for _ in range(20):
            engine = sync_engine(kv).open()
            tickets: list[Ticket[Any]] = []
            started = threading.Event()
            thread = threading.Thread(target=submit_until_refused, args=(engine, kv, tickets, started), daemon=True)
            thread.start()
            assert started.wait(5)
            engine.close()
            thread.join(5)
            assert not thread.is_alive()
            for ticket in tickets:
                with contextlib.suppress(UsageError, concurrent.futures.CancelledError):
                    ticket.wait(5)

    def test_a_call_that_never_ends_does_not_outlive_the_engine(self) -> None:
        kv = PagedKV(2 * T)
        gate = Gate()
        with sync_engine(kv) as engine:
            ticket = engine.submit(gate)
            assert gate.entered.wait(5)
        with pytest.raises(concurrent.futures.CancelledError):
            ticket.wait(5)

    def test_two_engines_each_on_a_thread_of_its_own(self) -> None:
        kv = PagedKV(4 * T)
        store = MemoryStore()
        with sync_engine(kv, 8, [MemoryBackend(store)]) as one, sync_engine(kv, 8, [MemoryBackend(store)]) as two:
            one.store(kv.tokens, kv.slots)
            one.flush()
            assert two.lookup(kv.tokens).hit_tokens == 4 * T

    def test_the_engine_itself_refuses_a_foreign_loop(self) -> None:
        kv = PagedKV(2 * T)
        inner: list[CacheEngine[Any]] = []

        async def note(engine: CacheEngine[Any]) -> None:
            inner.append(engine)

        with sync_engine(kv) as engine:
            engine.submit(note).wait(5)
            with pytest.raises(UsageError, match="another event loop"):
                asyncio.run(inner[0].lookup(kv.tokens))

    def test_copies_run_beside_the_caller(self) -> None:
        kv = PagedKV(4 * T)
        kv.connector = watched = WatchedConnector(kv.connector)  # type: ignore[assignment]
        threads: set[str] = set()
        watched.on_copy = lambda _name: threads.add(threading.current_thread().name)
        with sync_engine(kv) as engine:
            engine.store(kv.tokens, kv.slots)
        assert all(name.startswith("akv-copy") for name in threads)


def submit_until_refused(
    engine: SyncCacheEngine[Any], kv: PagedKV, tickets: list[Ticket[Any]], started: threading.Event
) -> None:
    with contextlib.suppress(UsageError):
        while True:
            tickets.append(engine.submit(lambda e: e.lookup(kv.tokens)))
            started.set()


FORGETFUL = """
import torch
from akvcache import CacheNamespace, EngineConfig, SyncCacheEngine, TensorConnector
connector = TensorConnector(num_layers=1, num_kv_heads=1, head_dim=8, dtype=torch.float32)
engine = SyncCacheEngine(EngineConfig(chunk_tokens=16, host_bytes="1MiB"), connector=connector, tiers=[])
engine.open()
print(engine.store(list(range(64)), connector.empty(64)).stored_tokens)
"""


def test_a_program_that_forgets_to_close_still_ends() -> None:
    """SH-01."""
    done = subprocess.run([sys.executable, "-c", FORGETFUL], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "64"), done.stderr
