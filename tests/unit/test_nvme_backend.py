"""What the NVMe backend promises beyond the contract: layout, recovery, recycling, the cap, sharing."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
from pathlib import Path

import pytest
from akvcache_nvme import DirectMode, NvmeBackend

from akvcache.backend import BackendContext
from akvcache.errors import BackendUnavailable, CapacityExhausted, ConfigurationError, UsageError
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


def _inode(root: Path, key: ChunkKey) -> int:
    return path_of(root, key).stat().st_ino


class TestLayout:
    @pytest.mark.asyncio
    async def test_constructing_touches_nothing(self, tmp_path: Path) -> None:
        NvmeBackend(tmp_path / "cache", capacity_bytes=SMALL)
        assert os.listdir(tmp_path) == []

    @pytest.mark.asyncio
    async def test_a_chunk_lies_where_the_format_says_and_only_the_user_may_look(self, tmp_path: Path) -> None:
        root = tmp_path / "deep" / "cache"
        async with opened(root) as backend:
            [key] = prompt("a")
            await put(backend, [key])
            assert path_of(root, key).read_bytes() == bytes(
                make_frame(key, make_payload(PAYLOAD, int(key[-4:].hex(), 16)))
            )
            for path in [root, *root.rglob("*")]:
                mode = path.stat().st_mode
                assert stat.S_IMODE(mode) == (0o700 if stat.S_ISDIR(mode) else 0o600), path

    @pytest.mark.asyncio
    async def test_the_root_may_be_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        async with opened(tmp_path / "link") as backend:
            await put(backend, prompt("a"))
            assert len(chunk_files(tmp_path / "real")) == 1

    @pytest.mark.asyncio
    async def test_the_manifest_tells_the_operator_what_this_is(self, tmp_path: Path) -> None:
        async with opened(tmp_path):
            manifest = json.loads((tmp_path / make_namespace_id().hex() / "manifest.json").read_text())
            assert manifest == {"format": 1, "model": "m", "chunker": "fixed:16"}

    @pytest.mark.asyncio
    async def test_closing_leaves_neither_owner_nor_temporary_files(self, tmp_path: Path) -> None:
        async with opened(tmp_path) as backend:
            await put(backend, prompt("a", 3))
            assert len(os.listdir(tmp_path / "tmp")) == 1
        assert os.listdir(tmp_path / "tmp") == []
        await backend.aclose()


class TestLifeCycle:
    @pytest.mark.asyncio
    async def test_calls_on_a_closed_backend_say_so(self, tmp_path: Path) -> None:
        async with opened(tmp_path) as backend:
            pass
        [key] = prompt("a")
        with pytest.raises(BackendUnavailable, match="not open"):
            await backend.read(key, aligned_buffer(FRAME))
        with pytest.raises(BackendUnavailable, match="not open"):
            await backend.contains([key])
        with pytest.raises(UsageError, match="opened again"):
            await backend.open(BackendContext(frame_bytes=FRAME))

    @pytest.mark.asyncio
    async def test_closing_waits_for_running_calls(self, tmp_path: Path) -> None:
        keys = prompt("a", 8)
        async with opened(tmp_path) as backend, asyncio.TaskGroup() as group:
            for key in keys:
                group.create_task(put(backend, [key]))
            await asyncio.sleep(0)  # let every write begin
            await backend.aclose()
        assert len(chunk_files(tmp_path)) == 8

    @pytest.mark.asyncio
    async def test_a_backend_never_opened_closes(self, tmp_path: Path) -> None:
        backend = NvmeBackend(tmp_path / "cache", capacity_bytes=SMALL)
        await backend.aclose()
        assert os.listdir(tmp_path) == []

    @pytest.mark.asyncio
    async def test_a_capacity_that_holds_no_chunk_is_refused(self, tmp_path: Path) -> None:
        backend = NvmeBackend(tmp_path, capacity_bytes=FRAME + 4096)
        with pytest.raises(ConfigurationError, match="holds no chunk"):
            await backend.open(BackendContext(frame_bytes=FRAME))

    @pytest.mark.asyncio
    async def test_the_least_capacity_holds_a_chunk(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError) as refusal:
            await NvmeBackend(tmp_path, capacity_bytes=1).open(BackendContext(frame_bytes=FRAME))
        least = next(int(word) for word in str(refusal.value).split() if word.isdigit() and int(word) > 1)
        async with opened(tmp_path, capacity_bytes=least) as backend:
            for label in range(4):
                await put(backend, prompt(label))
                assert await get(backend, prompt(label)[0])
                assert allocated_below(tmp_path) <= least

    @pytest.mark.asyncio
    async def test_a_root_that_is_a_file_is_unavailable(self, tmp_path: Path) -> None:
        (tmp_path / "cache").write_text("not a directory")
        backend = NvmeBackend(tmp_path / "cache", capacity_bytes=SMALL)
        with pytest.raises(BackendUnavailable):
            await backend.open(BackendContext(frame_bytes=FRAME))
        with pytest.raises(BackendUnavailable, match="not open"):
            await backend.contains([])


class TestUsage:
    @pytest.mark.asyncio
    async def test_usage_is_what_the_disk_says(self, tmp_path: Path) -> None:
        async with opened(tmp_path, capacity_bytes=SMALL) as backend:
            assert backend.statistics().used_bytes == allocated_below(tmp_path)
            for round_ in range(12):
                keys = prompt(round_, 3)
                await put(backend, keys)
                await backend.delete(keys[round_ % 3])
                statistics = backend.statistics()
                assert statistics.used_bytes == allocated_below(tmp_path) <= SMALL
                assert statistics.entries == len(chunk_files(tmp_path))
            assert statistics.evictions > 0
            assert statistics.recycled > 0
            assert statistics.capacity_bytes == SMALL

    @pytest.mark.asyncio
    async def test_chunks_of_many_sizes_stay_under_the_cap(self, tmp_path: Path) -> None:
        async with opened(tmp_path, capacity_bytes=SMALL) as backend:
            for turn in range(60):
                [key] = prompt(turn)
                size = 1 + (turn * turn * 7919) % PAYLOAD
                await put(backend, [key], payload_bytes=size)
                assert await get(backend, key, payload_bytes=size)
                assert backend.statistics().used_bytes == allocated_below(tmp_path) <= SMALL

    @pytest.mark.asyncio
    async def test_concurrent_writes_stay_under_the_cap(self, tmp_path: Path) -> None:
        async with opened(tmp_path, capacity_bytes=SMALL) as backend:
            for round_ in range(6):
                async with asyncio.TaskGroup() as group:
                    for label in range(8):
                        group.create_task(put(backend, prompt((round_, label))))
                assert backend.statistics().used_bytes == allocated_below(tmp_path) <= SMALL
                assert temp_files(tmp_path) == []

    @pytest.mark.asyncio
    async def test_an_evicted_chunk_leaves_its_file_to_the_next(self, tmp_path: Path) -> None:
        async with opened(tmp_path, capacity_bytes=SMALL) as backend:
            written: dict[int, ChunkKey] = {}
            for label in range(40):
                [key] = prompt(label)
                evictions = backend.statistics().evictions
                await put(backend, [key])
                if backend.statistics().evictions == evictions + 1:
                    assert written.get(_inode(tmp_path, key)) is not None, "the victim's file was not used again"
                written[_inode(tmp_path, key)] = key
            assert backend.statistics().evictions > 20

    @pytest.mark.asyncio
    async def test_a_deleted_chunk_leaves_a_spare_file_to_the_next(self, tmp_path: Path) -> None:
        async with opened(tmp_path) as backend:
            [first], [second] = prompt("a"), prompt("b")
            await put(backend, [first])
            inode = _inode(tmp_path, first)
            await backend.delete(first)
            assert backend.statistics().spare_bytes == FRAME
            await put(backend, [second], payload_bytes=PAYLOAD // 3)
            assert _inode(tmp_path, second) == inode
            assert await get(backend, second, payload_bytes=PAYLOAD // 3)
            assert backend.statistics().spare_bytes == 0

    @pytest.mark.asyncio
    async def test_spare_files_keep_to_their_share(self, tmp_path: Path) -> None:
        share = 4.5 * FRAME / SMALL
        keys = prompt("a", 10)
        async with opened(tmp_path, capacity_bytes=SMALL, recycle_share=share) as backend:
            await put(backend, keys)
            for key in keys:
                await backend.delete(key)
            assert backend.statistics().spare_bytes == 4 * FRAME
            assert backend.statistics().used_bytes == allocated_below(tmp_path)
        async with opened(tmp_path, capacity_bytes=SMALL, recycle_share=0) as backend:
            assert backend.statistics().spare_bytes == 0
            assert os.listdir(tmp_path / "spare") == []

    @pytest.mark.asyncio
    async def test_a_prompt_longer_than_the_tier_keeps_its_head(self, tmp_path: Path) -> None:
        keys = prompt("long", 30)
        async with opened(tmp_path, capacity_bytes=SMALL) as backend:
            with pytest.raises(CapacityExhausted):
                await put(backend, keys)
            kept = await holds(backend, keys)
            assert kept.index(False) >= 8
            assert not any(kept[kept.index(False) :])
            assert temp_files(tmp_path) == []
            assert backend.statistics().used_bytes == allocated_below(tmp_path)

    @pytest.mark.asyncio
    async def test_protected_chunks_stay(self, tmp_path: Path) -> None:
        protected = set(prompt("kept", 3))
        async with opened(tmp_path, capacity_bytes=SMALL, is_protected=protected.__contains__) as backend:
            await put(backend, prompt("kept", 3))
            for label in range(30):
                await put(backend, prompt(label))
            assert await holds(backend, prompt("kept", 3)) == [True] * 3

    @pytest.mark.asyncio
    async def test_a_touched_prompt_outlives_newer_ones(self, tmp_path: Path) -> None:
        async with opened(tmp_path, capacity_bytes=SMALL) as backend:
            await put(backend, prompt("hot", 2))
            for label in range(30):
                await put(backend, prompt(label))
                backend.touch(prompt("hot", 2))
            assert await holds(backend, prompt("hot", 2)) == [True] * 2


class TestRecovery:
    @pytest.mark.asyncio
    async def test_everything_committed_hits_after_a_restart(self, tmp_path: Path) -> None:
        keys = prompt("a", 20)
        async with opened(tmp_path) as backend:
            await put(backend, keys)
        async with opened(tmp_path) as backend:
            assert backend.statistics().entries == 20
            assert backend.statistics().used_bytes == allocated_below(tmp_path)
            assert list(await backend.contains(keys)) == [True] * 20
            assert await holds(backend, keys) == [True] * 20

    @pytest.mark.asyncio
    async def test_a_smaller_cap_holds_when_open_returns(self, tmp_path: Path) -> None:
        async with opened(tmp_path) as backend:
            await put(backend, prompt("a", 30))
            for key in prompt("a", 30)[28:]:
                await backend.delete(key)
        async with opened(tmp_path, capacity_bytes=SMALL, namespaces=()) as backend:
            assert allocated_below(tmp_path) <= SMALL
            assert backend.statistics().entries == len(chunk_files(tmp_path)) > 5
            assert list(await backend.contains(prompt("a", 5))) == [True] * 5, "the tail leaves before the head"

    @pytest.mark.asyncio
    async def test_what_dead_owners_left_becomes_spare_and_live_owners_keep_theirs(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with opened(tmp_path):
            [live] = os.listdir(tmp_path / "tmp")
            (tmp_path / "tmp" / live / "ff").write_bytes(bytes(FRAME))
            for dead in ("1-dead", "2-dead"):
                (tmp_path / "tmp" / dead).mkdir()
                (tmp_path / "tmp" / dead / "0").write_bytes(bytes(FRAME))
            (tmp_path / "tmp" / "1-dead" / "lock").touch()
            caplog.set_level(logging.INFO, "akvcache.nvme")
            async with opened(tmp_path) as second:
                assert second.statistics().leftovers_reclaimed == 2
                assert second.statistics().spare_bytes == 2 * FRAME
                assert [path.parent.name for path in temp_files(tmp_path)] == [live]
                assert "reclaimed 2 unfinished files" in caplog.text
                await put(second, prompt("a"))
                assert second.statistics().spare_bytes == FRAME

    @pytest.mark.asyncio
    async def test_foreign_names_are_counted_reported_once_and_left_alone(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with opened(tmp_path) as backend:
            await put(backend, prompt("a", 2))
        chunk = chunk_files(tmp_path)[0]
        strangers = [
            tmp_path / "notes.txt",
            chunk.with_name("readme"),
            tmp_path / "lost+found" / "x",
            chunk.parent / "d" / "y",
        ]
        for path in strangers:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(bytes(8192))
        async with opened(tmp_path) as backend:
            assert backend.statistics().entries == 2
            assert backend.statistics().used_bytes == allocated_below(tmp_path)
            assert caplog.text.count("holds 4 names that are not ours and 0 directories that cannot be read") == 1
            assert {chunk.key async for chunk in backend.scan(make_namespace_id())} == set(prompt("a", 2))
        assert all(path.exists() for path in strangers)

    @pytest.mark.asyncio
    async def test_namespaces_without_chunks_go(self, tmp_path: Path) -> None:
        async with opened(tmp_path, namespaces=("one", "two")) as backend:
            [key] = prompt("a", namespace="one")
            await put(backend, [key])
            await backend.delete(key)
        async with opened(tmp_path, namespaces=("two",)) as backend:
            assert set(os.listdir(tmp_path)) == {
                "tmp",
                "spare",
                "usage",
                make_namespace_id("two").hex(),
            }
            assert backend.statistics().used_bytes == allocated_below(tmp_path)

    @pytest.mark.asyncio
    async def test_a_namespace_that_somebody_has_attached_stays(self, tmp_path: Path) -> None:
        manifest = tmp_path / make_namespace_id("one").hex() / "manifest.json"
        async with opened(tmp_path, namespaces=("one",)), opened(tmp_path, namespaces=("two",)):
            assert manifest.exists(), "attached by another"
        async with opened(tmp_path, namespaces=("one", "two"), capacity_bytes=SMALL) as backend:
            [key] = prompt("a", namespace="two")
            await put(backend, [key])
            path_of(tmp_path, key).unlink()
            assert not await get(backend, key)  # found out, so everything is counted again
            assert manifest.exists(), "attached by us"

    @pytest.mark.asyncio
    async def test_another_namespace_is_counted_never_hit_and_leaves_first(self, tmp_path: Path) -> None:
        async with opened(tmp_path, namespaces=("old",), capacity_bytes=SMALL) as backend:
            await put(backend, prompt("a", 4, namespace="old"))
        async with opened(tmp_path, capacity_bytes=SMALL) as backend:
            await put(backend, prompt("a", 4))
        async with opened(tmp_path, capacity_bytes=SMALL) as backend:
            assert backend.statistics().entries == 8
            while any(await backend.contains(prompt("a", 4, namespace="old"))):
                await put(backend, prompt(f"fill {backend.statistics()}"))
            assert await holds(backend, prompt("a", 4)) == [True] * 4


class TestManifests:
    @pytest.mark.asyncio
    async def test_entries_cut_in_another_way_are_named_in_one_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with opened(tmp_path, namespaces=()) as backend:
            for name, size in (("a", 16), ("b", 32), ("empty", 64)):
                await backend.attach(make_namespace_id(name), {"model": "m", "chunker": f"fixed:{size}"})
                if name != "empty":
                    await put(backend, prompt("x", namespace=name))
        caplog.clear()
        async with opened(tmp_path, namespaces=()) as backend:
            await backend.attach(make_namespace_id("c"), {"model": "m", "chunker": "fixed:256"})
            [warning] = [record.message for record in caplog.records if record.levelno == logging.WARNING]
            assert "and 1 more were written with chunk size 'fixed:" in warning
            assert "(now 'fixed:256') and will not be hit" in warning
            assert make_namespace_id("a").hex() in warning or make_namespace_id("b").hex() in warning
            caplog.clear()
            await backend.attach(make_namespace_id("d"), {"model": "another", "chunker": "fixed:256"})
            assert caplog.text == ""

    @pytest.mark.asyncio
    async def test_a_manifest_that_disagrees_is_left_alone(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with opened(tmp_path) as backend:
            await put(backend, prompt("a"))
        path = tmp_path / make_namespace_id().hex() / "manifest.json"
        path.write_text('{"format": 2, "model": "m", "chunker": "fixed:16"}')
        async with opened(tmp_path) as backend:
            assert "is left alone: it differs in 'format'" in caplog.text
            assert json.loads(path.read_text())["format"] == 2
            assert await get(backend, prompt("a")[0])

    @pytest.mark.asyncio
    @pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"[1]", b"null", b"[" * 60_000, b"{" + b" " * 100_000 + b"}"])
    async def test_a_manifest_nobody_can_read_is_written_again(self, tmp_path: Path, text: bytes) -> None:
        async with opened(tmp_path) as backend:
            await put(backend, prompt("a"))
        path = tmp_path / make_namespace_id().hex() / "manifest.json"
        path.write_bytes(text)
        async with opened(tmp_path, namespaces=("test", "other")) as backend:
            assert json.loads(path.read_text())["model"] == "m"
            assert await get(backend, prompt("a")[0])
            assert backend.statistics().used_bytes == allocated_below(tmp_path)


class TestSharing:
    @pytest.mark.asyncio
    async def test_what_another_process_wrote_is_found(self, tmp_path: Path) -> None:
        keys = prompt("a", 4)
        async with opened(tmp_path) as one, opened(tmp_path) as two:
            await put(one, keys[:3])
            assert two.statistics().entries == 0
            assert list(await two.contains(keys)) == [True, True, True, False]
            assert await get(two, keys[0])
            assert two.statistics().entries == 3
            await put(one, keys[3:])
            assert await get(two, keys[3])
            assert two.statistics().entries == 4

    @pytest.mark.asyncio
    async def test_a_key_written_twice_is_stored_once(self, tmp_path: Path) -> None:
        keys = prompt("a", 6)
        async with opened(tmp_path) as one, opened(tmp_path) as two:
            async with asyncio.TaskGroup() as group:
                for backend in (one, two, one, two):
                    for key in keys:
                        group.create_task(put(backend, [key]))
            assert len(chunk_files(tmp_path)) == 6
            await put(two, prompt("b"))
            assert two.statistics().used_bytes == allocated_below(tmp_path)
            assert temp_files(tmp_path) == []
            assert await holds(one, keys) == await holds(two, keys) == [True] * 6

    @pytest.mark.asyncio
    async def test_a_key_that_another_has_written_costs_no_eviction(self, tmp_path: Path) -> None:
        async with opened(tmp_path, capacity_bytes=SMALL) as one, opened(tmp_path, capacity_bytes=SMALL) as two:
            for label in range(20):
                await put(two, prompt(label))
            await put(one, prompt("both"))
            await put(two, prompt("own"))
            evictions, entries = two.statistics().evictions, two.statistics().entries
            files = chunk_files(tmp_path)
            await put(two, prompt("both"))
            assert two.statistics().evictions == evictions
            assert two.statistics().entries == entries + 1
            assert chunk_files(tmp_path) == files

    @pytest.mark.asyncio
    async def test_a_full_directory_of_strangers_is_reported(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "big").write_bytes(bytes(2 * SMALL))
        async with opened(tmp_path, capacity_bytes=SMALL) as backend:
            assert "nothing can be evicted" in caplog.text
            with pytest.raises(CapacityExhausted):
                await put(backend, prompt("a"))

    @pytest.mark.asyncio
    async def test_a_latecomer_evicts_what_others_left(self, tmp_path: Path) -> None:
        async with opened(tmp_path, capacity_bytes=SMALL) as one, opened(tmp_path, capacity_bytes=SMALL) as late:
            for label in range(30):
                await put(one, prompt(label))
            assert late.statistics().entries == 0
            for label in range(100, 130):
                await put(late, prompt(label))
                assert allocated_below(tmp_path) <= SMALL
            assert await get(late, prompt(129)[0])
            assert late.statistics().evictions >= 30
            assert await holds(one, [key for label in range(30) for key in prompt(label)]) == [False] * 30
            assert one.statistics().entries == len(chunk_files(tmp_path)), "what is gone was found out"
            await put(one, prompt("again"))
            assert one.statistics().used_bytes == allocated_below(tmp_path)

    @pytest.mark.asyncio
    async def test_each_process_keeps_its_own_cap(self, tmp_path: Path) -> None:
        async with opened(tmp_path) as wide:
            await put(wide, prompt("a", 40))
            async with opened(tmp_path, capacity_bytes=SMALL) as narrow:
                assert allocated_below(tmp_path) <= SMALL
                await put(narrow, prompt("b"))
                assert allocated_below(tmp_path) <= SMALL


class TestDirect:
    @pytest.mark.asyncio
    @pytest.mark.parametrize("mode", list(DirectMode))
    async def test_every_mode_moves_the_same_bytes(self, tmp_path: Path, mode: DirectMode) -> None:
        async with opened(tmp_path, direct=mode) as backend:
            await put(backend, prompt("a", 3))
            assert await holds(backend, prompt("a", 3)) == [True] * 3
            if mode is not DirectMode.AUTO:
                assert backend.statistics().direct is (mode is DirectMode.ON)

    @pytest.mark.asyncio
    async def test_a_buffer_off_the_page_grid_still_works(self, tmp_path: Path) -> None:
        [key] = prompt("a")
        frame = make_frame(key, make_payload(PAYLOAD))
        odd = aligned_buffer(FRAME + 4096)[1 : FRAME + 1]
        odd[:] = frame
        async with opened(tmp_path) as backend:
            await backend.write(key, odd)
            odd[:] = bytes(FRAME)
            assert await backend.read(key, odd) == FRAME
            assert odd == frame
