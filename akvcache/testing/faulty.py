"""A backend that misbehaves on purpose, and stops where the test tells it to.

What goes wrong depends on the seed and on the number of the call within its operation only, never on timing: a failing
run is repeated by its seed. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from akvcache.backend import Backend, BackendContext, Capabilities, StoredChunk
from akvcache.errors import BackendError, BackendUnavailable, ChunkCorrupt, ConfigurationError
from akvcache.frame import HEADER_BYTES, parse
from akvcache.keys import ChunkKey, NamespaceId
from akvcache.layout import PAGE_BYTES
from akvcache.testing.frames import aligned_buffer

__all__ = ("Fault", "FaultKind", "FaultyBackend", "Op", "Stop")


class Op(enum.StrEnum):
    """An operation of a backend that can fail; the value is the method's name."""

    OPEN = "open"
    ATTACH = "attach"
    CONTAINS = "contains"
    READ = "read"
    WRITE = "write"
    DELETE = "delete"
    SCAN = "scan"
    ACLOSE = "aclose"


class FaultKind(enum.StrEnum):
    """What goes wrong."""

    SLOW = "slow"
    """The call takes `Fault.delay_s` longer."""
    HANG = "hang"
    """The call waits until `FaultyBackend.release`."""
    NEVER = "never"
    """The call waits until it is cancelled."""
    FAIL = "fail"
    """The call raises and has done nothing."""
    FAIL_AFTER = "fail_after"
    """The call raises although it took effect."""
    LOSE = "lose"
    """`contains` and `read` find nothing; `write` stores nothing and says nothing."""
    TRUNCATE = "truncate"
    """`read` delivers half of the frame, `write` stores half of it, in whole pages."""
    CORRUPT = "corrupt"
    """One byte of header or payload is flipped: by `read` in the caller's buffer, by `write` in the stored copy."""


_KINDS_OF_DATA: Final = {
    FaultKind.LOSE: (Op.CONTAINS, Op.READ, Op.WRITE),
    FaultKind.TRUNCATE: (Op.READ, Op.WRITE),
    FaultKind.CORRUPT: (Op.READ, Op.WRITE),
}


class Stop(enum.Enum):
    """Where `FaultyBackend.hold` stops a call."""

    BEFORE = "before the inner backend sees it"
    AFTER = "after the inner backend has done it, before the caller is told"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One line of a plan: when an operation goes wrong, and how.

    Attributes:
        op: The operation.
        kind: What goes wrong.
        calls: Which calls of that operation, counted from 0; None is any.
        probability: Share of those calls, decided by the seed.
        error: What FAIL and FAIL_AFTER raise.
        retryable: What that error says of itself.
        delay_s: What SLOW adds.
    """

    op: Op
    kind: FaultKind
    calls: Collection[int] | None = None
    probability: float = 1.0
    error: type[BackendError] = BackendUnavailable
    retryable: bool = False
    delay_s: float = 0.01

    def __post_init__(self) -> None:
        if self.op not in _KINDS_OF_DATA.get(self.kind, tuple(Op)):
            raise ConfigurationError(f"{self.op} has nothing to {self.kind}")


class FaultyBackend:
    """Passes every call to an inner backend, except for what the plan says; the first matching fault wins.

    To force an interleaving: ``hold("write")``, start the work, ``await reached("write")``, act, ``release()``.

    Attributes:
        plan: Faults in force; assign to it to change the weather.
        calls: Calls so far by operation.
        injected: Faults that took effect so far by kind.
    """

    def __init__(self, inner: Backend, *, seed: int = 0, plan: Sequence[Fault] = ()) -> None:
        self.plan = plan
        self.calls: Counter[Op] = Counter()
        self.injected: Counter[FaultKind] = Counter()
        self._inner = inner
        self._seed = seed
        self._held: set[tuple[Op, Stop]] = set()
        self._waiting: Counter[Op] = Counter()
        self._changed = asyncio.Event()
        self._gate = asyncio.Event()

    def __repr__(self) -> str:
        return f"<FaultyBackend seed={self._seed} injected={dict(self.injected)} over {self._inner!r}>"

    def hold(self, op: Op | str, stop: Stop = Stop.BEFORE) -> None:
        """Stop every further call of `op` until `release`."""
        self._held.add((Op(op), stop))

    async def reached(self, op: Op | str, count: int = 1) -> None:
        """Wait until `count` calls of `op` stand still, by `hold` or by a HANG fault."""
        while self._waiting[Op(op)] < count:
            await self._changed.wait()

    def release(self) -> None:
        """Let everything go that stands still, and stop nothing more."""
        self._held.clear()
        self._waiting = Counter()  # those let go no longer stand still, even before they run
        self._gate.set()
        self._gate = asyncio.Event()

    @property
    def name(self) -> str:
        """See `Backend.name`."""
        return self._inner.name

    @property
    def capabilities(self) -> Capabilities:
        """See `Backend.capabilities`."""
        return self._inner.capabilities

    async def open(self, context: BackendContext) -> None:
        """See `Backend.open`."""
        fault = await self._enter(Op.OPEN)
        await self._inner.open(context)
        await self._leave(Op.OPEN, fault)

    async def attach(self, namespace_id: NamespaceId, manifest: Mapping[str, object]) -> None:
        """See `Backend.attach`."""
        fault = await self._enter(Op.ATTACH)
        await self._inner.attach(namespace_id, manifest)
        await self._leave(Op.ATTACH, fault)

    async def contains(self, keys: Sequence[ChunkKey]) -> Sequence[bool]:
        """See `Backend.contains`."""
        fault = await self._enter(Op.CONTAINS)
        if fault is not None and fault.kind is FaultKind.LOSE:
            self._note(fault)
            return [False] * len(keys)
        found = await self._inner.contains(keys)
        await self._leave(Op.CONTAINS, fault)
        return found

    async def read(self, key: ChunkKey, into: memoryview) -> int | None:
        """See `Backend.read`."""
        fault = await self._enter(Op.READ, key)
        if fault is not None and fault.kind is FaultKind.LOSE:
            self._note(fault)
            return None
        size = await self._inner.read(key, into)
        if size and fault is not None:
            fitting = into[: min(size, len(into))]
            if fault.kind is FaultKind.TRUNCATE:
                self._note(fault)
                size = _half(size)
                fitting[size:] = bytes(max(0, len(fitting) - size))
            elif fault.kind is FaultKind.CORRUPT:
                self._flip(fault, fitting)
        await self._leave(Op.READ, fault, key)
        return size

    async def write(self, key: ChunkKey, frame: memoryview) -> None:
        """See `Backend.write`."""
        fault = await self._enter(Op.WRITE, key)
        if fault is not None and fault.kind is FaultKind.LOSE:
            self._note(fault)
            return
        if fault is not None and fault.kind is FaultKind.TRUNCATE:
            self._note(fault)
            frame = frame[: _half(len(frame))]
        elif fault is not None and fault.kind is FaultKind.CORRUPT:
            copy = aligned_buffer(len(frame))
            copy[:] = frame
            self._flip(fault, copy)
            frame = copy
        await self._inner.write(key, frame)
        await self._leave(Op.WRITE, fault, key)

    async def delete(self, key: ChunkKey) -> bool:
        """See `Backend.delete`."""
        fault = await self._enter(Op.DELETE, key)
        deleted = await self._inner.delete(key)
        await self._leave(Op.DELETE, fault, key)
        return deleted

    async def scan(self, namespace_id: NamespaceId) -> AsyncIterator[StoredChunk]:
        """See `Backend.scan`."""
        fault = await self._enter(Op.SCAN)
        async for chunk in self._inner.scan(namespace_id):
            yield chunk
        await self._leave(Op.SCAN, fault)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """See `Backend.touch`."""
        self._inner.touch(keys)

    async def aclose(self) -> None:
        """See `Backend.aclose`."""
        fault = await self._enter(Op.ACLOSE)
        await self._inner.aclose()
        await self._leave(Op.ACLOSE, fault)

    async def _enter(self, op: Op, key: ChunkKey | None = None) -> Fault | None:
        """Count the call, stop it if held, suffer what comes before its effect; return the fault chosen for it."""
        call = self.calls[op]
        self.calls[op] += 1
        if (op, Stop.BEFORE) in self._held:
            await self._wait_for_release(op)
        fault = next((f for i, f in enumerate(self.plan) if f.op is op and self._happens(f, i, call)), None)
        if fault is None:
            return None
        if fault.kind in (FaultKind.SLOW, FaultKind.HANG, FaultKind.NEVER, FaultKind.FAIL):
            self._note(fault)
        if fault.kind is FaultKind.SLOW:
            await asyncio.sleep(fault.delay_s)
        elif fault.kind is FaultKind.HANG:
            await self._wait_for_release(op)
        elif fault.kind is FaultKind.NEVER:
            await asyncio.Event().wait()
        elif fault.kind is FaultKind.FAIL:
            raise self._error(fault, key)
        return fault

    async def _leave(self, op: Op, fault: Fault | None, key: ChunkKey | None = None) -> None:
        if (op, Stop.AFTER) in self._held:
            await self._wait_for_release(op)
        if fault is not None and fault.kind is FaultKind.FAIL_AFTER:
            self._note(fault)
            raise self._error(fault, key)

    async def _wait_for_release(self, op: Op) -> None:
        gate, waiting = self._gate, self._waiting
        waiting[op] += 1
        self._changed.set()
        self._changed = asyncio.Event()
        try:
            await gate.wait()
        finally:
            waiting[op] -= 1

    def _happens(self, fault: Fault, index: int, call: int) -> bool:
        if fault.calls is not None and call not in fault.calls:
            return False
        return self._draw(f"{index}/{fault.op}/{call}", 1 << 53) < fault.probability * (1 << 53)

    def _draw(self, label: str, below: int) -> int:
        """Return a number that depends on the seed and the label only."""
        return xxhash.xxh3_64_intdigest(f"{self._seed}/{label}".encode()) % below

    def _note(self, fault: Fault) -> None:
        self.injected[fault.kind] += 1

    def _error(self, fault: Fault, key: ChunkKey | None) -> BackendError:
        return fault.error("injected", backend=self.name, op=fault.op, key=key, retryable=fault.retryable)

    def _flip(self, fault: Fault, frame: memoryview) -> None:
        """Flip one byte of the header or of the payload, each as likely; never of the padding, which nothing reads."""
        self._note(fault)
        try:
            payload_bytes = min(parse(frame).payload_bytes, len(frame) - HEADER_BYTES)
        except ChunkCorrupt:
            payload_bytes = 0
        label = f"flip/{self.injected[fault.kind]}"
        if payload_bytes and self._draw(f"{label}/part", 2):
            at = HEADER_BYTES + self._draw(f"{label}/payload", payload_bytes)
        else:
            at = self._draw(f"{label}/header", min(HEADER_BYTES, len(frame)))
        frame[at] ^= 1 << self._draw(f"{label}/bit", 8)


def _half(nbytes: int) -> int:
    return nbytes // 2 // PAGE_BYTES * PAGE_BYTES
