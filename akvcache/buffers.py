"""The host pool: one page-aligned arena, cut into fixed slots, leased in prefixes.

Owned by the engine and touched from its loop only; the memory of a leased slot may be touched from any thread until
the lease gives it back. A slot is in exactly one place: the free list, a lease, or the index.

The arena is a private anonymous mapping with ``MADV_HUGEPAGE``: O_DIRECT from 2 MiB pages ran at twice the speed of
4 KiB pages at a third of the CPU (docs/adr/0006-host-pool.md). A shared mapping, Python's default, gets no huge pages.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol, Self, cast

import torch

from akvcache.errors import ConfigurationError, InvariantError, UsageError

__all__ = ("Arena", "HostPool", "Reclaimer", "Slot", "SlotLease")

HUGE_PAGE: Final = 2 << 20
PREFAULT_STEP: Final = 64 << 20
_MADV_POPULATE_WRITE: Final = 23


class _Cudart(Protocol):
    def cudaHostRegister(self, address: int, size: int, flags: int, /) -> int: ...  # noqa: N802
    def cudaHostUnregister(self, address: int, /) -> int: ...  # noqa: N802


def _cudart() -> _Cudart:  # pragma: no cover - needs a GPU
    return cast("_Cudart", torch.cuda.cudart())  # type: ignore[no-untyped-call]


class Slot:
    """One fixed piece of the arena; holds one frame."""

    __slots__ = ("frame", "index")

    def __init__(self, index: int, frame: memoryview) -> None:
        self.index = index
        self.frame = frame

    def __repr__(self) -> str:
        return f"<Slot {self.index}>"


class Arena:
    """The mapping behind the pool.

    Args:
        num_bytes: Usable size; the mapping is one huge page longer, so that the base can be aligned.
    """

    def __init__(self, num_bytes: int) -> None:
        try:
            physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            if num_bytes > physical:
                raise ConfigurationError(f"host_bytes is {num_bytes}, this machine has {physical} bytes of memory")
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._map = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=flags)
        except OSError as error:
            raise ConfigurationError(f"cannot map a host pool of {num_bytes} bytes: {error}") from error
        self._map.madvise(mmap.MADV_HUGEPAGE)
        raw = memoryview(self._map)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        start = -address % HUGE_PAGE
        self.address = address + start
        self.view = raw[start : start + num_bytes]
        self._stopped = False
        self._pinned = False

    def prefault(self) -> None:
        """Touch all pages, step by step, so that first use does not pay for them. Blocking; run off the loop.

        Harmless beside live use of the memory. Ends early after `stop_prefault`; does nothing on kernels before 5.14.
        """
        libc = ctypes.CDLL(None)
        for start in range(0, len(self.view), PREFAULT_STEP):
            if self._stopped:
                return
            step = min(PREFAULT_STEP, len(self.view) - start)
            address, size = ctypes.c_void_p(self.address + start), ctypes.c_size_t(step)
            if libc.madvise(address, size, _MADV_POPULATE_WRITE):
                return

    def pin(self) -> bool:
        """Register the memory with CUDA if there is a device; return whether it is pinned. Blocking."""
        if torch.cuda.is_available():  # pragma: no cover - needs a GPU
            error = _cudart().cudaHostRegister(self.address, len(self.view), 0)
            self._pinned = int(error) == 0
        return self._pinned

    def stop_prefault(self) -> None:
        """End a running `prefault` at its next step."""
        self._stopped = True

    def unpin(self) -> None:
        """Undo `pin`, when no copy uses the memory any more. Blocking."""
        if self._pinned:  # pragma: no cover - needs a GPU
            _cudart().cudaHostUnregister(self.address)
            self._pinned = False


class Reclaimer(Protocol):
    """Whoever can empty slots for the pool."""

    def reclaimable(self) -> int:
        """Return how many slots could be emptied now."""
        ...

    def reclaim(self, count: int) -> Sequence[Slot]:
        """Empty up to `count` slots and hand them over."""
        ...


class SlotLease:
    """Slots granted to one owner until given back or moved on.

    Invariant: each slot of `slots` is the owner's alone. Using a released lease raises.
    """

    def __init__(self, pool: HostPool, slots: list[Slot]) -> None:
        self._pool = pool
        self._slots = slots
        self._released = False
        pool.num_leases += 1

    def __repr__(self) -> str:
        return f"<SlotLease {len(self._slots)} slots{' released' if self._released else ''}>"

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def slots(self) -> Sequence[Slot]:
        """The slots still held.

        Raises:
            UsageError: The lease was released.
        """
        if self._released:
            raise UsageError("stale lease: its slots were given back")
        return self._slots

    def take(self) -> Slot:
        """Move the first slot out of the lease; its new owner gives it back."""
        if self._released or not self._slots:
            raise UsageError("stale lease: it holds no slot")
        return self._slots.pop(0)

    def release(self) -> None:
        """Give back what is left. Idempotent."""
        if not self._released:
            self._released = True
            self._pool.num_leases -= 1
            self._pool.give(self._slots)
            self._slots = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.release()


class _Waiter:
    __slots__ = ("count", "future", "keep")

    def __init__(self, count: int, keep: int, future: asyncio.Future[SlotLease]) -> None:
        self.count = count
        self.keep = keep
        self.future = future


class HostPool:
    """Fixed slots with awaitable prefix leases.

    Waiters are served first come, first served; those that keep nothing back (loads) go ahead of those that leave a
    reserve (stores), because a load that waits holds up inference.
    """

    def __init__(self, *, num_slots: int, slot_bytes: int) -> None:
        if num_slots < 1:
            raise ConfigurationError(
                f"the host pool holds {num_slots} chunks of {slot_bytes} bytes; give it more memory"
            )
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.num_leases = 0
        self.arena = Arena(num_slots * slot_bytes)
        view = self.arena.view
        self._free = deque(Slot(i, view[i * slot_bytes : (i + 1) * slot_bytes]) for i in range(num_slots))
        self._reclaimer: Reclaimer | None = None
        self._serving = False
        self._unserved = False
        self._waiters: tuple[deque[_Waiter], deque[_Waiter]] = (deque(), deque())

    def __repr__(self) -> str:
        return f"<HostPool {self.num_free}/{self.num_slots} free, {self.num_leases} leases, {self.num_waiters} waiting>"

    @property
    def num_free(self) -> int:
        """Slots in the free list."""
        return len(self._free)

    @property
    def num_waiters(self) -> int:
        """Requests waiting for a slot."""
        return sum(map(len, self._waiters))

    def bind(self, reclaimer: Reclaimer) -> None:
        """Name who empties slots under pressure."""
        self._reclaimer = reclaimer

    def try_lease(self, count: int, *, keep: int = 0) -> SlotLease | None:
        """Grant up to `count` slots now, or None if there is none or others wait for one.

        Args:
            count: Slots wanted.
            keep: Slots that must stay obtainable for others after the grant.
        """
        return None if self._waiters[1 if keep else 0] else self._grant(count, keep)

    def _grant(self, count: int, keep: int) -> SlotLease | None:
        reclaimable = self._reclaimer.reclaimable() if self._reclaimer else 0
        grant = min(count, len(self._free) + reclaimable - keep)
        if grant < 1:
            return None
        if grant > len(self._free) and self._reclaimer:
            self._free.extend(self._reclaimer.reclaim(grant - len(self._free)))
        slots = [self._free.popleft() for _ in range(min(grant, len(self._free)))]
        return SlotLease(self, slots) if slots else None

    async def lease(self, count: int, *, timeout_s: float, keep: int = 0) -> SlotLease | None:
        """Grant a prefix of `count` slots: what is free, then what can be evicted, then what comes back in time.

        Returns:
            A lease of 1 to `count` slots, or None if none came within `timeout_s`.

        Cancellation:
            Nothing is held; a grant that crossed the cancellation goes to the next waiter.
        """
        queue = self._waiters[1 if keep else 0]
        if (lease := self.try_lease(count, keep=keep)) is not None:
            return lease
        waiter = _Waiter(count, keep, asyncio.get_running_loop().create_future())
        queue.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter.future
        except TimeoutError:
            return waiter.future.result() if waiter.future.done() and not waiter.future.cancelled() else None
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled():
                waiter.future.result().release()
            raise
        finally:
            if waiter in queue:
                queue.remove(waiter)

    def give(self, slots: Sequence[Slot]) -> None:
        """Take slots back and serve waiters."""
        self._free.extend(slots)
        if len(self._free) > self.num_slots:
            raise InvariantError(f"pool of {self.num_slots} slots has {len(self._free)} free")
        self.serve()

    def serve(self) -> None:
        """Serve waiters in order; called whenever a slot may have become obtainable.

        Granting may end leases that have expired, which calls this again: the call under way then goes round once
        more.
        """
        self._unserved = True
        if self._serving:
            return
        self._serving = True
        try:
            while self._unserved:
                self._unserved = False
                for queue in self._waiters:
                    self._serve(queue)
        finally:
            self._serving = False

    def _serve(self, queue: deque[_Waiter]) -> None:
        while queue:
            waiter = queue[0]
            if not waiter.future.done():
                lease = self._grant(waiter.count, waiter.keep)
                if lease is None:
                    return
                waiter.future.set_result(lease)
            queue.popleft()

    def close(self) -> None:
        """Let go of the memory; slots still out keep it mapped until they are dropped."""
        self.arena.stop_prefault()
        self._free.clear()
