"""The pure parts of the NVMe backend: names, options, manifests, and the index."""

from __future__ import annotations

import string

import pytest
from akvcache_nvme import DirectMode, NvmeBackend
from akvcache_nvme.index import ChunkIndex
from akvcache_nvme.manifest import difference
from akvcache_nvme.names import ChunkPlace, key_of, namespace_in, place_of
from akvcache_nvme.options import NvmeOptions

from akvcache.errors import ConfigurationError, UsageError
from akvcache.keys import ChunkKey
from akvcache.testing import make_keys, make_namespace_id


class TestNames:
    @pytest.mark.parametrize("digest_bytes", [16, 32])
    def test_a_place_gives_its_key_back(self, digest_bytes: int) -> None:
        for key in make_keys(300, digest_bytes=digest_bytes):
            assert key_of(place_of(key)) == key

    @pytest.mark.parametrize("byte", [0, 1, 0x2E, 0x2F, 0x5C, 0x0A, 0x25, 0xFF])
    def test_a_place_is_made_of_hexadecimal_digits_whatever_the_key_holds(self, byte: int) -> None:
        namespace, fan_out, name = place_of(ChunkKey(bytes([byte]) * 52))
        assert set(namespace + fan_out) <= set(string.hexdigits.lower())
        assert set(name.removesuffix(".akv")) <= set(string.hexdigits.lower() + "-")
        assert (len(namespace), len(fan_out)) == (32, 2)
        assert len(name) < 100

    @pytest.mark.parametrize("length", [0, 16, 20])
    def test_a_key_without_a_digest_is_refused(self, length: int) -> None:
        with pytest.raises(UsageError, match="too few"):
            place_of(ChunkKey(bytes(length)))

    @pytest.mark.parametrize(
        "name",
        [
            "ab12-0",  # no suffix
            "ab12-00.akv",  # depth not in its one spelling
            "ab12-.akv",
            "ab1-0.akv",  # half a byte
            "AB12-0.akv",
            "cd12-0.akv",  # in another directory's place
            "ab12-123456789.akv",
            "ab12-0.akv.tmp",
            "../ab12-0.akv",
            "ab12-0.akv\n",
            "",
        ],
    )
    def test_other_names_are_nobodys(self, name: str) -> None:
        assert key_of(ChunkPlace("0" * 32, "ab", name)) is None

    def test_only_namespace_ids_name_namespaces(self) -> None:
        namespace_id = make_namespace_id()
        assert namespace_in(namespace_id.hex()) == namespace_id
        assert [namespace_in(name) for name in ("tmp", "spare", "usage", "0" * 31, "G" * 32, "0" * 33)] == [None] * 6


class TestOptions:
    def test_a_url_says_everything(self) -> None:
        options = NvmeOptions.parse("nvme:///var/cache/a%20b?capacity=2GiB&direct=off&threads=7&recycle=0.5")
        assert options == NvmeOptions(
            root="/var/cache/a b", capacity_bytes=2 << 30, direct=DirectMode.OFF, threads=7, recycle_share=0.5
        )

    def test_only_the_capacity_must_be_given(self) -> None:
        options = NvmeOptions.parse("nvme:///c?capacity=1MiB")
        assert (options.direct, options.threads, options.recycle_share) == (DirectMode.AUTO, 4, 0.25)
        assert "/c" in repr(NvmeBackend.from_url("nvme:///c?capacity=1MiB"))

    @pytest.mark.parametrize(
        ("url", "message"),
        [
            ("nvme:///c", "'capacity' is required"),
            ("nvme:///c?capacity=much", "not understood"),
            ("nvme:///c?capacity=1GiB&treads=4", "did you mean 'threads'"),
            ("nvme:///c?capacity=1GiB&threads=four", "numbers"),
            ("nvme:///c?capacity=1GiB&direct=yes", "not a mode"),
            ("nvme:///c?capacity=1GiB&recycle=half", "numbers"),
            ("nvme://c/d?capacity=1GiB", "three slashes"),
            ("nvme:///?capacity=1GiB", "three slashes"),
        ],
    )
    def test_a_wrong_url_is_refused_with_a_hint(self, url: str, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            NvmeBackend.from_url(url)

    @pytest.mark.parametrize(
        ("capacity", "threads", "recycle"), [(0, 4, 0.2), (1 << 20, 0, 0.2), (1 << 20, 1, -0.1), (1 << 20, 1, 1.1)]
    )
    def test_numbers_out_of_range_are_refused(self, capacity: int, threads: int, recycle: float) -> None:
        with pytest.raises(ConfigurationError):
            NvmeBackend("/c", capacity_bytes=capacity, threads=threads, recycle_share=recycle)


OURS: dict[str, object] = {"model": "m", "chunker": "fixed:256", "hash": "sha256", "layout": "aa", "key_schema": 1}


class TestManifestDifference:
    @pytest.mark.parametrize(
        ("theirs", "message"),
        [
            ({"chunker": "fixed:128"}, "chunk size 'fixed:128' (now 'fixed:256')"),
            ({"key_schema": 2}, "key schema '2' (now '1')"),
            ({"hash": "xxh3_128", "layout": "bb"}, "key hash 'xxh3_128' (now 'sha256') and layout 'bb' (now 'aa')"),
        ],
    )
    def test_another_way_of_cutting_is_named(self, theirs: dict[str, object], message: str) -> None:
        assert difference(OURS, OURS | theirs) == message

    @pytest.mark.parametrize("theirs", [{}, {"weights_version": "2"}, {"model": "n", "chunker": "fixed:1"}])
    def test_another_model_or_weights_is_no_surprise(self, theirs: dict[str, object]) -> None:
        assert difference(OURS, OURS | theirs) is None

    def test_an_unnamed_model_is_compared_with_nothing(self) -> None:
        assert difference({"chunker": "a"}, {"chunker": "b"}) is None


def _free(_key: ChunkKey) -> bool:
    return False


class TestIndex:
    def test_it_counts_what_it_holds(self) -> None:
        index = ChunkIndex()
        first, second = make_keys(2)
        index.add(first, 100)
        index.add(second, 50)
        index.add(first, 120)
        assert (len(index), index.used_bytes, first in index) == (2, 170, True)
        assert (index.drop(first), index.drop(first)) == (120, 0)
        assert (len(index), index.used_bytes, first in index) == (1, 50, False)

    def test_the_oldest_request_leaves_first_and_its_tail_before_its_head(self) -> None:
        index = ChunkIndex()
        old, new = make_keys(2, label="old"), make_keys(2, label="new")
        for request in (old, new):
            index.touch(request)
            for key in request:
                index.add(key, 1)
        assert [index.claim(_free, None).key for _ in range(4)] == [old[1], old[0], new[1], new[0]]
        assert index.claim(_free, None) is None

    def test_a_newcomer_never_eats_its_own_head(self) -> None:
        index = ChunkIndex()
        keys = make_keys(3)
        index.touch(keys)
        index.add(keys[0], 1)
        index.add(keys[1], 1)
        assert index.claim(_free, keys[2]) is None

    def test_what_is_read_or_protected_stays(self) -> None:
        index = ChunkIndex()
        read, protected, other = (make_keys(1, label=label)[0] for label in "rpo")
        for key in (read, protected, other):
            index.add(key, 1)
        with index.reading(read), index.reading(read):
            assert index.claim(lambda key: key == protected, None).key == other
            assert index.claim(lambda key: key == protected, None) is None
        assert index.claim(lambda key: key == protected, None).key == read

    def test_foreign_chunks_leave_before_recovered_ones_and_those_before_used_ones(self) -> None:
        index = ChunkIndex()
        ours = make_keys(1, namespace="ours") + make_keys(1, namespace="ours", label="late")
        foreign = make_keys(1, namespace="foreign")
        index.learn(ours[0], 1)
        index.learn(foreign[0], 1)
        for key in index.attach(make_namespace_id("ours")):
            index.promote(key)
        index.learn(ours[1], 1)
        used = make_keys(1, namespace="ours", label="used")
        index.touch(used)
        index.add(used[0], 1)
        order = [index.claim(_free, None).key for _ in range(4)]
        assert order[0] == foreign[0]
        assert set(order[1:3]) == set(ours)
        assert order[3] == used[0]

    def test_attaching_again_changes_no_rank(self) -> None:
        index = ChunkIndex()
        assert not index.attach(make_namespace_id())
        index.add(make_keys(1)[0], 1)
        assert not index.attach(make_namespace_id())

    def test_learning_what_is_known_changes_nothing(self) -> None:
        index = ChunkIndex()
        [key] = make_keys(1)
        index.add(key, 7)
        index.learn(key, 9)
        assert index.used_bytes == 7

    def test_it_knows_which_namespaces_have_chunks(self) -> None:
        index = ChunkIndex()
        [key] = make_keys(1)
        assert not index.holds_any(make_namespace_id())
        index.add(key, 1)
        assert index.holds_any(make_namespace_id())
        index.drop(key)
        assert not index.holds_any(make_namespace_id())
