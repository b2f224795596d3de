"""The NVMe backend when the disk, the operator or another process does not behave."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiofiles.threadpool
import pytest
from akvcache_nvme import DirectMode, directory, ledger
from akvcache_nvme.recovery import SLACK_BYTES

from akvcache.errors import (
    BackendError,
    BackendTimeout,
    BackendUnavailable,
    CapacityExhausted,
    ChunkCorrupt,
    CommitFailed,
    ConfigurationError,
)
from akvcache.frame import verify
from akvcache.keys import ChunkKey
from akvcache.testing import aligned_buffer, make_frame, make_namespace_id, make_payload
from tests.nvme_kit import (
    FRAME,
    PAYLOAD,
    allocated_below,
    chunk_files,
    get,
    holds,
    opened,
    path_of,
    prompt,
    put,
    temp_files,
)

SMALL = 16 * FRAME


class _File:
    """A file of aiofiles whose writes and reads go through `meddle`."""

    def __init__(self, file: Any, meddle: Callable[[Any, memoryview], Any]) -> None:
        self._file = file
        self._meddle = meddle

    async def write(self, view: memoryview) -> int:
        count: int = await self._meddle(self._file.write, view)
        return count

    async def readinto(self, view: memoryview) -> int:
        count: int = await self._meddle(self._file.readinto, view)
        return count


@pytest.fixture
def meddle(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any, memoryview], Any] | None], None]:
    """Put a function between the backend and every file it moves from now on; None takes it away."""
    real_wrap = aiofiles.threadpool.wrap
    current: list[Callable[[Any, memoryview], Any] | None] = [None]

    def fake_wrap(*args: Any, **kwargs: Any) -> Any:
        file = real_wrap(*args, **kwargs)
        return file if current[0] is None else _File(file, current[0])

    monkeypatch.setattr(aiofiles.threadpool, "wrap", fake_wrap)

    def use(function: Callable[[Any, memoryview], Any] | None) -> None:
        current[0] = function

    return use


async def _half(move: Any, view: memoryview) -> Any:
    """Move 40 % of the bytes, then fail as a dying disk does."""
    if len(view) == FRAME:
        return await move(view[: FRAME * 2 // 5 // 4096 * 4096])
    raise OSError(errno.EIO, "dying disk")


async def _raw_read(backend: Any, key: ChunkKey) -> tuple[int | None, memoryview]:
    into = aligned_buffer(FRAME)
    return await backend.read(key, into), into


class TestDamagedFiles:
    @pytest.mark.asyncio
    @pytest.mark.parametrize("size", [0, 4096, FRAME - 4096, FRAME - 1, FRAME + 1, FRAME + 4096])
    async def test_a_file_of_the_wrong_length_tells_its_length_also_after_a_restart(
        self, tmp_path: Path, size: int
    ) -> None:
        [key] = prompt("a")
        async with opened(tmp_path) as backend:
            await put(backend, [key])
        os.truncate(path_of(tmp_path, key), size)
        async with opened(tmp_path) as backend:
            assert (await _raw_read(backend, key))[0] == size
            assert await backend.delete(key)
            await put(backend, [key])
            assert await get(backend, key)
            assert backend.statistics().used_bytes == allocated_below(tmp_path)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("position", [0, 50, 200, 4096, FRAME - 6000])
    async def test_a_flipped_byte_fails_verification(self, tmp_path: Path, position: int) -> None:
        [key] = prompt("a")
        async with opened(tmp_path) as backend:
            await put(backend, [key])
            with path_of(tmp_path, key).open("r+b") as file:
                file.seek(position)
                [byte] = file.read(1)
                file.seek(position)
                file.write(bytes([byte ^ 1]))
            size, into = await _raw_read(backend, key)
            assert size == FRAME
            with pytest.raises(ChunkCorrupt):
                verify(into, key=key, num_tokens=1, part_bytes=(PAYLOAD,))

    @pytest.mark.asyncio
    async def test_swapped_files_fail_verification(self, tmp_path: Path) -> None:
        one, two = prompt("a", 2)
        async with opened(tmp_path) as backend:
            await put(backend, [one, two])
            path_of(tmp_path, one).rename(tmp_path / "x")
            path_of(tmp_path, two).rename(path_of(tmp_path, one))
            (tmp_path / "x").rename(path_of(tmp_path, two))
            size, into = await _raw_read(backend, one)
            assert size == FRAME
            with pytest.raises(ChunkCorrupt, match="another key"):
                verify(into, key=one, num_tokens=1, part_bytes=(PAYLOAD,))

    @pytest.mark.asyncio
    @pytest.mark.parametrize("kind", ["symlink", "dangling", "directory", "pipe"])
    async def test_what_is_not_a_regular_file_is_never_opened(
        self, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        [key] = prompt("a")
        root, outside = tmp_path / "cache", tmp_path / "secret"
        outside.write_bytes(bytes(make_frame(key, make_payload(PAYLOAD))))
        async with opened(root) as backend:
            await put(backend, [key])
            path = path_of(root, key)
            path.unlink()
            if kind == "directory":
                path.mkdir()
            elif kind == "pipe":
                os.mkfifo(path)
            else:
                path.symlink_to(outside if kind == "symlink" else tmp_path / "nowhere")
            assert (await _raw_read(backend, key))[0] is None
            assert "is not a file of ours" in caplog.text
            assert list(await backend.contains([key])) == [False]
            assert [chunk async for chunk in backend.scan(make_namespace_id())] == []
        async with opened(root) as backend:
            assert backend.statistics().entries == 0
            assert not await get(backend, key)
        assert outside.read_bytes() == bytes(make_frame(key, make_payload(PAYLOAD)))

    @pytest.mark.asyncio
    @pytest.mark.parametrize("level", [1, 2])
    async def test_no_link_to_a_directory_is_followed(self, tmp_path: Path, level: int) -> None:
        [key] = prompt("a")
        root, outside = tmp_path / "cache", tmp_path / "outside"
        async with opened(root) as backend:
            await put(backend, [key])
            linked = path_of(root, key).parents[level - 1]
            linked.rename(outside)
            linked.symlink_to(outside)
            before = sorted(outside.rglob("*"))
            assert not await get(backend, key)
            assert list(await backend.contains([key])) == [False]
            with pytest.raises(BackendUnavailable):
                await put(backend, [key])
            assert await backend.delete(key) is False
            assert temp_files(root) == []
        async with opened(root, namespaces=("other",)) as backend:
            assert backend.statistics().entries == 0
            assert [chunk async for chunk in backend.scan(make_namespace_id())] == []
        assert sorted(outside.rglob("*")) == before


class TestVanishedFiles:
    @pytest.mark.asyncio
    async def test_a_vanished_chunk_is_a_miss_and_is_not_counted(self, tmp_path: Path) -> None:
        keys = prompt("a", 4)
        async with opened(tmp_path, capacity_bytes=SMALL) as backend:
            await put(backend, keys)
            path_of(tmp_path, keys[2]).unlink()
            assert await holds(backend, keys) == [True, True, False, True]
            assert list(await backend.contains(keys)) == [True, True, False, True]
            assert backend.statistics().entries == 3
            assert backend.statistics().used_bytes == allocated_below(tmp_path)
            assert await backend.delete(keys[2]) is False
            await put(backend, keys)
            assert await holds(backend, keys) == [True] * 4

    @pytest.mark.asyncio
    async def test_evicting_what_has_vanished_is_fine(self, tmp_path: Path) -> None:
        async with opened(tmp_path, capacity_bytes=SMALL) as backend:
            for label in range(20):
                await put(backend, prompt(label))
            for path in chunk_files(tmp_path):
                path.unlink()
            for label in range(20, 40):
                await put(backend, prompt(label))
                assert await get(backend, prompt(label)[0])
                assert allocated_below(tmp_path) <= SMALL
            assert backend.statistics().used_bytes == allocated_below(tmp_path)

    @pytest.mark.asyncio
    async def test_room_that_an_operator_made_is_used_before_more_is_evicted(self, tmp_path: Path) -> None:
        async with opened(tmp_path, capacity_bytes=SMALL) as backend:
            for label in range(40):
                await put(backend, prompt(label))
            kept = backend.statistics().entries
            for label in range(40 - kept, 40 - kept // 2):
                path_of(tmp_path, prompt(label)[0]).unlink()
            await put(backend, prompt("new"))
            young = [prompt(label)[0] for label in range(40 - kept // 2, 40)]
            assert await holds(backend, young) == [True] * len(young)
            assert backend.statistics().used_bytes == allocated_below(tmp_path)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("victim", ["root", "namespace", "tmp", "owner", "spare", "usage"])
    async def test_directories_removed_under_a_running_engine_come_back(self, tmp_path: Path, victim: str) -> None:
        root = tmp_path / "cache"
        keys = prompt("a", 3)
        async with opened(root) as backend:
            await put(backend, [*keys, *prompt("b", 3)])
            await backend.delete(prompt("b", 3)[1])  # leaves a spare file
            [owner] = (root / "tmp").iterdir()
            target = {
                "root": root,
                "namespace": root / make_namespace_id().hex(),
                "tmp": root / "tmp",
                "owner": owner,
                "spare": root / "spare",
                "usage": root / "usage",
            }[victim]
            if target.is_dir():
                shutil.rmtree(target)
            else:
                target.unlink()
            assert await holds(backend, keys) == [victim not in ("root", "namespace")] * 3
            await put(backend, keys)
            await put(backend, prompt("c", 3))
            assert await holds(backend, [*keys, *prompt("c", 3)]) == [True] * 6
            assert len(list((root / "tmp").iterdir())) == 1
        assert list((root / "tmp").iterdir()) == []
        async with opened(root) as backend:
            assert backend.statistics().used_bytes == allocated_below(root)
            assert await holds(backend, keys) == [True] * 3

    @pytest.mark.asyncio
    async def test_closing_after_the_root_has_gone_does_not_bring_it_back(self, tmp_path: Path) -> None:
        async with opened(tmp_path / "cache") as backend:
            await put(backend, prompt("a"))
            shutil.rmtree(tmp_path / "cache")
        assert os.listdir(tmp_path) == []

    @pytest.mark.asyncio
    async def test_a_file_that_vanishes_while_it_is_written_cannot_be_committed(
        self, tmp_path: Path, meddle: Callable[..., None]
    ) -> None:
        async def remove(move: Any, view: memoryview) -> Any:
            count = await move(view)
            for path in await asyncio.to_thread(temp_files, tmp_path):
                await asyncio.to_thread(path.unlink)
            return count

        [key] = prompt("a")
        async with opened(tmp_path, capacity_bytes=SMALL) as backend:
            meddle(remove)
            with pytest.raises(CommitFailed) as failure:
                await put(backend, [key])
            assert failure.value.retryable
            meddle(None)
            assert not await get(backend, key)
            await put(backend, [key])
            assert await get(backend, key)
            assert backend.statistics().used_bytes == allocated_below(tmp_path)


class TestFailingDisk:
    @pytest.mark.asyncio
    async def test_a_write_that_fails_half_way_is_never_visible(
        self, tmp_path: Path, meddle: Callable[..., None]
    ) -> None:
        keys = prompt("a", 3)
        async with opened(tmp_path) as backend:
            await put(backend, keys[:1])
            usage = backend.statistics().used_bytes
            meddle(_half)
            with pytest.raises(BackendUnavailable, match="dying disk") as failure:
                await put(backend, keys)
            assert not failure.value.retryable
            assert isinstance(failure.value.__cause__, OSError)
            meddle(None)
            assert await holds(backend, keys) == [True, False, False]
            assert temp_files(tmp_path) == []
            assert backend.statistics().used_bytes == usage == allocated_below(tmp_path)
        async with opened(tmp_path) as backend:
            assert await holds(backend, keys) == [True, False, False]
            await put(backend, keys)
            assert await holds(backend, keys) == [True] * 3

    @pytest.mark.asyncio
    async def test_a_read_that_fails_says_so(self, tmp_path: Path, meddle: Callable[..., None]) -> None:
        [key] = prompt("a")
        async with opened(tmp_path) as backend:
            await put(backend, [key])
            meddle(_half)
            with pytest.raises(BackendUnavailable, match="dying disk"):
                await get(backend, key)
            meddle(None)
            assert await get(backend, key)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.EACCES])
    @pytest.mark.parametrize("call", ["posix_fallocate", "rename", "open"])
    async def test_what_the_system_refuses_makes_the_tier_unavailable(
        self, tmp_path: Path, call: str, code: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        [key], [other] = prompt("a"), prompt("b")

        def refuse(*_args: Any, **_kwargs: Any) -> Any:
            raise OSError(code, os.strerror(code))

        async with opened(tmp_path) as backend:
            await put(backend, [other])
            with monkeypatch.context() as patch:
                patch.setattr(os, call, refuse)
                with pytest.raises(BackendUnavailable):
                    await put(backend, [key])
            assert await holds(backend, [key, other]) == [False, True]
            await put(backend, [key])
            assert await get(backend, key)
            assert temp_files(tmp_path) == []
            assert backend.statistics().used_bytes == allocated_below(tmp_path)

    @pytest.mark.asyncio
    async def test_short_reads_and_writes_are_continued(self, tmp_path: Path, meddle: Callable[..., None]) -> None:
        async def short(move: Any, view: memoryview) -> Any:
            return await move(view[: min(len(view), 8192)])

        keys = prompt("a", 3)
        async with opened(tmp_path) as backend:
            meddle(short)
            await put(backend, keys)
            assert await holds(backend, keys) == [True] * 3

    @pytest.mark.asyncio
    async def test_a_file_cut_short_while_it_is_read_tells_what_is_left(
        self, tmp_path: Path, meddle: Callable[..., None]
    ) -> None:
        [key] = prompt("a")

        async def cut(move: Any, view: memoryview) -> Any:
            return await move(view[:4096]) if len(view) == FRAME else 0

        async with opened(tmp_path) as backend:
            await put(backend, [key])
            meddle(cut)
            assert (await _raw_read(backend, key))[0] == 4096

    @pytest.mark.asyncio
    async def test_a_file_that_cannot_be_opened_for_writing_is_removed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = os.open

        def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & os.O_WRONLY and flags & os.O_NONBLOCK:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(path, flags, *args, **kwargs)

        async with opened(tmp_path) as backend:
            with monkeypatch.context() as patch:
                patch.setattr(os, "open", refuse)
                with pytest.raises(BackendUnavailable):
                    await put(backend, prompt("a"))
            assert temp_files(tmp_path) == []
            assert backend.statistics().used_bytes == allocated_below(tmp_path)

    @pytest.mark.asyncio
    async def test_a_delete_that_fails_says_so(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        [key] = prompt("a")

        def refuse(*_args: Any, **_kwargs: Any) -> Any:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        async with opened(tmp_path) as backend:
            await put(backend, [key])
            with monkeypatch.context() as patch:
                patch.setattr(os, "rename", refuse)
                with pytest.raises(BackendUnavailable):
                    await backend.delete(key)
            assert await get(backend, key)
            assert await backend.delete(key)

    @pytest.mark.asyncio
    async def test_a_write_that_writes_nothing_does_not_hang(self, tmp_path: Path, meddle: Callable[..., None]) -> None:
        async def nothing(_move: Any, _view: memoryview) -> int:
            return 0

        async with opened(tmp_path) as backend:
            meddle(nothing)
            with pytest.raises(BackendUnavailable, match="nothing was written"):
                await put(backend, prompt("a"))
            assert temp_files(tmp_path) == []


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting is not permitted")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def _fill_up(path: Path) -> None:
    subprocess.run(["dd", "if=/dev/zero", f"of={path}", "bs=4096"], capture_output=True, check=False)


class TestFullDisk:
    @pytest.mark.asyncio
    @pytest.mark.parametrize("has_chunks", [True, False])
    async def test_no_room_for_a_directory_costs_one_chunk(
        self, tmp_path: Path, has_chunks: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with opened(tmp_path) as backend:
            await put(backend, prompt("a", 4 if has_chunks else 0))
        real = os.mkdir

        def mkdir(*args: Any, **kwargs: Any) -> None:
            if len(chunk_files(tmp_path)) in (0, 4):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(*args, **kwargs)

        monkeypatch.setattr(os, "mkdir", mkdir)
        if has_chunks:
            async with opened(tmp_path) as backend:
                assert backend.statistics().entries == 3
                assert backend.statistics().used_bytes == allocated_below(tmp_path)
        else:
            with pytest.raises(CapacityExhausted):
                async with opened(tmp_path):
                    pass

    @pytest.mark.asyncio
    async def test_a_disk_smaller_than_the_cap_goes_on_by_evicting(
        self, tiny_disk: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with opened(tiny_disk / "cache") as backend:
            for label in range(60):
                await put(backend, prompt(label))
                assert await get(backend, prompt(label)[0])
            await backend.delete(prompt(59)[0])
            for label in range(60, 70):
                await put(backend, prompt(label))
            assert caplog.text.count("is full before its capacity is reached") == 1
            assert temp_files(tiny_disk / "cache") == []
            assert backend.statistics().entries == len(chunk_files(tiny_disk / "cache"))
        async with opened(tiny_disk / "cache") as backend:
            assert await get(backend, prompt(69)[0])

    @pytest.mark.asyncio
    async def test_a_full_disk_can_be_opened_again(self, tiny_disk: Path) -> None:
        root = tiny_disk / "cache"
        async with opened(root) as backend:
            with pytest.raises(CapacityExhausted):
                await put(backend, prompt("long", 60))
        await asyncio.to_thread(_fill_up, tiny_disk / "filler")
        async with opened(root, namespaces=("test", "new")) as backend:
            assert backend.statistics().entries == len(chunk_files(root)) > 20
            await put(backend, prompt("new"))
            assert await get(backend, prompt("new")[0])

    @pytest.mark.asyncio
    async def test_without_a_victim_it_says_that_there_is_no_room(self, tiny_disk: Path) -> None:
        keys = prompt("long", 60)
        async with opened(tiny_disk / "cache") as backend:
            with pytest.raises(CapacityExhausted):
                await put(backend, keys)
            kept = await holds(backend, keys)
            assert kept.index(False) > 20
            assert not any(kept[kept.index(False) :])
            assert temp_files(tiny_disk / "cache") == []

    @pytest.mark.asyncio
    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
    async def test_one_eviction_and_one_more_try(
        self, tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        full = True
        real = os.posix_fallocate
        tries = 0

        def fallocate(handle: int, offset: int, length: int) -> None:
            nonlocal tries
            tries += 1
            if full:
                raise OSError(code, os.strerror(code))
            real(handle, offset, length)

        async with opened(tmp_path) as backend:
            full = False
            await put(backend, prompt("old", 3))
            full = True
            monkeypatch.setattr(os, "posix_fallocate", fallocate)
            with pytest.raises(CapacityExhausted):
                await put(backend, prompt("new"))
            assert tries == 2
            assert await holds(backend, prompt("old", 3)) == [True, True, False]
            assert backend.statistics().used_bytes == allocated_below(tmp_path)


class TestDirectRefused:
    @pytest.fixture
    def no_direct(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A file system without O_DIRECT."""
        real = os.open

        def fake(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real(path, flags, *args, **kwargs)

        monkeypatch.setattr(os, "open", fake)

    @pytest.mark.asyncio
    @pytest.mark.usefixtures("no_direct")
    async def test_auto_falls_back_with_one_line(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING, "akvcache.nvme")
        async with opened(tmp_path) as backend:
            assert backend.statistics().direct is False
            await put(backend, prompt("a", 3))
            assert await holds(backend, prompt("a", 3)) == [True] * 3
            [record] = caplog.records
            assert f"errno {errno.EINVAL}" in record.message
            assert str(tmp_path) in record.message
            assert temp_files(tmp_path) == []

    @pytest.mark.asyncio
    async def test_a_refusal_in_the_middle_goes_on_through_the_page_cache(
        self, tmp_path: Path, meddle: Callable[..., None], caplog: pytest.LogCaptureFixture
    ) -> None:
        async def refuse(move: Any, view: memoryview) -> Any:
            if len(view) == FRAME:
                return await move(view[:8192])
            if fcntl.fcntl(move.__self__.fileno(), fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return await move(view)

        keys = prompt("a", 2)
        async with opened(tmp_path, direct=DirectMode.ON) as backend:
            meddle(refuse)
            await put(backend, keys)
            assert await holds(backend, keys) == [True] * 2
            assert caplog.text.count("O_DIRECT was refused") == 1

    @pytest.mark.asyncio
    @pytest.mark.usefixtures("no_direct")
    async def test_on_is_a_configuration_error(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="direct=on"):
            async with opened(tmp_path, direct=DirectMode.ON):
                pass
        assert os.listdir(tmp_path / "tmp") == []


class TestRaces:
    @pytest.mark.asyncio
    async def test_a_file_recycled_while_it_is_read_is_a_plain_miss(
        self, tmp_path: Path, meddle: Callable[..., None]
    ) -> None:
        [key], [newcomer] = prompt("a"), prompt("b")
        async with opened(tmp_path) as reader, opened(tmp_path) as other:
            await put(reader, [key])
            inode = path_of(tmp_path, key).stat().st_ino

            async def overtake(move: Any, view: memoryview) -> Any:
                meddle(None)
                assert await other.delete(key)
                await put(other, [newcomer])
                recycled = await asyncio.to_thread(path_of(tmp_path, newcomer).stat)
                assert recycled.st_ino == inode, "the file was not recycled"
                return await move(view)

            meddle(overtake)
            assert await get(reader, key) is False
            assert list(await reader.contains([key])) == [False]
            assert await get(reader, newcomer)

    @pytest.mark.asyncio
    async def test_a_file_recycled_to_the_same_key_while_it_is_read_is_a_miss_too(
        self, tmp_path: Path, meddle: Callable[..., None]
    ) -> None:
        [key] = prompt("a")
        async with opened(tmp_path) as reader, opened(tmp_path) as other:
            await put(reader, [key])
            os.utime(path_of(tmp_path, key), ns=(1, 1))  # written long ago

            async def overtake(move: Any, view: memoryview) -> Any:
                meddle(None)
                count = await move(view)
                assert await other.delete(key)
                await put(other, [key])
                return count

            meddle(overtake)
            assert await get(reader, key) is False
            assert await get(reader, key)

    @pytest.mark.asyncio
    async def test_another_file_under_the_name_is_a_miss_whatever_its_age(
        self, tmp_path: Path, meddle: Callable[..., None]
    ) -> None:
        [key] = prompt("a")
        async with opened(tmp_path) as reader, opened(tmp_path, recycle_share=0) as other:
            await put(reader, [key])
            os.utime(path_of(tmp_path, key), ns=(1, 1))

            async def overtake(move: Any, view: memoryview) -> Any:
                meddle(None)
                assert await other.delete(key)
                await put(other, [key])
                await asyncio.to_thread(os.utime, path_of(tmp_path, key), ns=(1, 1))
                return await move(view)

            meddle(overtake)
            assert await get(reader, key) is False

    @pytest.mark.asyncio
    async def test_a_file_that_another_is_writing_counts_more_than_its_size(
        self, tmp_path: Path, meddle: Callable[..., None]
    ) -> None:
        async def look(move: Any, view: memoryview) -> Any:
            meddle(None)
            async with opened(tmp_path, namespaces=()) as other:
                real = await asyncio.to_thread(allocated_below, tmp_path)
                assert other.statistics().used_bytes == real + SLACK_BYTES
            return await move(view)

        async with opened(tmp_path) as backend:
            meddle(look)
            await put(backend, prompt("a"))
            assert backend.statistics().used_bytes == allocated_below(tmp_path)

    @pytest.mark.asyncio
    async def test_a_chunk_that_is_read_is_not_evicted(self, tmp_path: Path, meddle: Callable[..., None]) -> None:
        [key] = prompt("a")
        async with opened(tmp_path, capacity_bytes=SMALL) as backend:
            await put(backend, [key])

            async def fill(move: Any, view: memoryview) -> Any:
                meddle(None)
                for label in range(30):
                    await put(backend, prompt(label))
                return await move(view)

            meddle(fill)
            assert await get(backend, key)
            assert backend.statistics().evictions > 10


class TestUnreadable:
    @pytest.mark.asyncio
    async def test_a_directory_that_may_not_be_read_is_reported_and_the_rest_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        keys = prompt("a", 3)
        async with opened(tmp_path) as backend:
            await put(backend, keys)
        closed = path_of(tmp_path, keys[1]).parent
        real = os.scandir

        def scandir(path: Any = ".") -> Any:
            if path == os.fspath(closed):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return real(path)

        monkeypatch.setattr(os, "scandir", scandir)
        async with opened(tmp_path) as backend:
            assert "1 directories that cannot be read" in caplog.text
            assert backend.statistics().entries == 2
            assert await holds(backend, keys) == [True] * 3


class TestLocks:
    @pytest.mark.asyncio
    async def test_a_lock_that_is_never_released_is_a_time_out(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        [key], [other] = prompt("a"), prompt("b")
        async with opened(tmp_path) as backend:
            await put(backend, [key])
            monkeypatch.setattr(ledger, "LOCK_TIMEOUT_S", 0.3)
            with (tmp_path / "usage").open("rb") as stopped:
                fcntl.flock(stopped, fcntl.LOCK_EX)
                writes = [asyncio.create_task(put(backend, prompt(label))) for label in range(6)]
                assert await holds(backend, [key, other]) == [True, False], "reads need no lock"
                assert list(await backend.contains([key, other])) == [True, False]
                assert not any(write.done() for write in writes)
                failures = await asyncio.gather(*writes, return_exceptions=True)
                assert all(isinstance(failure, BackendTimeout) and failure.retryable for failure in failures)
            await put(backend, [other])
            assert await get(backend, other)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("content", [b"", b"AKV", b"x" * 24, b"x" * 4096])
    async def test_usage_that_nobody_can_read_is_counted_again(self, tmp_path: Path, content: bytes) -> None:
        async with opened(tmp_path) as backend:
            await put(backend, prompt("a", 3))
            (tmp_path / "usage").write_bytes(content)
            await put(backend, prompt("b"))
            assert backend.statistics().used_bytes == allocated_below(tmp_path)

    @pytest.mark.asyncio
    async def test_a_count_that_fails_half_way_is_not_believed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = os.scandir

        def scandir(path: Any = ".") -> Any:
            if path == tmp_path:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(path)

        async with opened(tmp_path) as backend:
            await put(backend, prompt("a", 3))
            (tmp_path / "usage").unlink()
            shutil.rmtree(tmp_path / "spare")
            with monkeypatch.context() as patch:
                patch.setattr(os, "scandir", scandir)
                with pytest.raises(BackendUnavailable):
                    await put(backend, prompt("b"))
            await put(backend, prompt("c"))
            assert backend.statistics().used_bytes == allocated_below(tmp_path)

    @pytest.mark.asyncio
    async def test_a_full_tier_does_not_count_again_for_each_refusal(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        counts = 0
        real = directory.take_census

        def take_census(*args: Any, **kwargs: Any) -> Any:
            nonlocal counts
            counts += 1
            time.sleep(0.05)  # in a thread: the next may come a second later
            return real(*args, **kwargs)

        monkeypatch.setattr(directory, "take_census", take_census)
        keys = prompt("long", 40)
        async with opened(tmp_path, capacity_bytes=SMALL) as backend:
            backend.touch(keys)
            counts = 0
            writes = [backend.write(key, make_frame(key, make_payload(PAYLOAD))) for key in keys]
            refused = await asyncio.gather(*writes, return_exceptions=True)
            assert sum(isinstance(error, CapacityExhausted) for error in refused) > 20
            assert counts == 1

    @pytest.mark.asyncio
    async def test_a_lock_that_is_no_file_leaves_the_owner_alone(self, tmp_path: Path) -> None:
        owner = tmp_path / "tmp" / "somebody"
        owner.mkdir(parents=True)
        (owner / "lock").symlink_to(tmp_path / "elsewhere")
        (owner / "0").write_bytes(bytes(FRAME))
        async with opened(tmp_path) as backend:
            assert backend.statistics().leftovers_reclaimed == 0
            assert backend.statistics().used_bytes >= allocated_below(tmp_path)
            assert (owner / "0").exists()

    @pytest.mark.asyncio
    async def test_spare_files_removed_by_hand_are_not_missed(self, tmp_path: Path) -> None:
        async with opened(tmp_path) as backend:
            await put(backend, prompt("a", 2))
            for key in prompt("a", 2):
                await backend.delete(key)
            assert backend.statistics().spare_bytes == 2 * FRAME
            for path in (tmp_path / "spare").iterdir():
                path.unlink()
            await put(backend, prompt("b", 2))
            assert backend.statistics().spare_bytes == 0
            assert backend.statistics().used_bytes == allocated_below(tmp_path)


class TestCancellation:
    @pytest.mark.asyncio
    @pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 13, 21])
    async def test_a_cancelled_write_ends_whole_or_without_trace(self, tmp_path: Path, steps: int) -> None:
        async with opened(tmp_path, capacity_bytes=SMALL) as backend:
            for label in range(20):
                [key] = prompt(label)
                task = asyncio.create_task(put(backend, [key]))
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
                assert temp_files(tmp_path) == []
                assert backend.statistics().used_bytes == allocated_below(tmp_path) <= SMALL
                await get(backend, key)

    @pytest.mark.asyncio
    async def test_a_cancelled_read_has_let_go_of_the_buffer(self, tmp_path: Path, meddle: Callable[..., None]) -> None:
        [key] = prompt("a")
        entered, go_on, done = asyncio.Event(), asyncio.Event(), False
        async with opened(tmp_path) as backend:
            await put(backend, [key])

            async def slow(move: Any, view: memoryview) -> Any:
                nonlocal done
                entered.set()
                await go_on.wait()
                count = await move(view)
                done = True
                return count

            meddle(slow)
            task = asyncio.create_task(get(backend, key))
            await entered.wait()
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert done

    @pytest.mark.asyncio
    async def test_a_cancelled_open_holds_nothing(self, tmp_path: Path) -> None:
        async def open_and_close() -> None:
            async with opened(tmp_path):
                pass

        for steps in range(12):
            task = asyncio.create_task(open_and_close())
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises((asyncio.CancelledError, BackendError)):
                await task
            assert not (tmp_path / "tmp").exists() or os.listdir(tmp_path / "tmp") == []
