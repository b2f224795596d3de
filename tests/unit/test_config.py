"""Options: what is accepted, and that a refusal names the option, the value and what would be right."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akvcache.config import EngineConfig, TierUrl, parse_bytes, suggest
from akvcache.errors import ConfigurationError
from akvcache.keys import HASHES
from akvcache.policy import POLICIES

SIZES = ("host_bytes", "wave_bytes", "window_bytes", "write_queue_bytes")
AT_LEAST_1 = ("chunk_tokens", "breaker_failures", "copy_threads")
AT_LEAST_0 = ("staging_reserve", "io_retries", "min_tokens")
FLAGS = ("prefault", "passive", "strict")
SECONDS = tuple(f.name for f in dataclasses.fields(EngineConfig) if f.name.endswith("_s"))
CHOICES = {"chunker": ("fixed", "segments"), "key_hash": ("sha256", "xxh3_128"), "eviction": ("lru", "slru")}
LISTS = ("tiers", "separator")


def refused(values: dict[str, object]) -> str:
    with pytest.raises(ConfigurationError) as refusal:
        EngineConfig.from_mapping(values)
    return str(refusal.value)


def test_every_option_belongs_to_a_group_tested_here() -> None:
    groups = [*SIZES, *AT_LEAST_1, *AT_LEAST_0, *FLAGS, *SECONDS, *CHOICES, *LISTS]
    assert sorted(groups) == sorted(f.name for f in dataclasses.fields(EngineConfig))


def test_the_choices_are_what_there_is() -> None:
    assert CHOICES["key_hash"] == tuple(HASHES)
    assert CHOICES["eviction"] == tuple(POLICIES)


class TestSizes:
    @pytest.mark.parametrize(
        ("text", "size"),
        [
            ("1024", 1024),
            ("1b", 1),
            ("2KB", 2000),
            ("2 KiB", 2048),
            ("1.5MiB", 3 << 19),
            (" 4GiB ", 4 << 30),
            ("500 mb", 500_000_000),
            ("200GB", 200 * 10**9),
            ("1TiB", 1 << 40),
            ("2TB", 2 * 10**12),
            (7, 7),
        ],
    )
    def test_understood(self, text: str | int, size: int) -> None:
        assert parse_bytes(text) == size

    @pytest.mark.parametrize(
        "value", ["", "GiB", "4 gigs", "4GiB!", "-1", "1e9", "0x10", "1.2.3MB", "٣KB", True, None, 1.5, b"1", [], "0"]
    )
    def test_refused_with_the_value(self, value: object) -> None:
        with pytest.raises(ConfigurationError) as refusal:
            parse_bytes(value)  # type: ignore[arg-type]
        assert repr(value) in str(refusal.value)

    @pytest.mark.parametrize("value", [0, -1, "0", "0.4", "0GiB"])
    def test_not_positive(self, value: str | int) -> None:
        with pytest.raises(ConfigurationError, match="must be positive"):
            parse_bytes(value)

    def test_an_absurd_number_is_refused_too(self) -> None:
        with pytest.raises(ConfigurationError):
            parse_bytes("9" * 400)
        with pytest.raises(ConfigurationError):
            parse_bytes("9" * 400 + "GiB")

    @given(st.integers(1, 2**50))
    def test_a_number_is_itself_as_text_too(self, value: int) -> None:
        assert parse_bytes(str(value)) == value

    @pytest.mark.parametrize("option", SIZES)
    def test_an_option_accepts_both_forms(self, option: str) -> None:
        assert getattr(EngineConfig.from_mapping({option: "3MiB"}), option) == 3 << 20
        assert getattr(EngineConfig.from_mapping({option: 12345}), option) == 12345

    @pytest.mark.parametrize("option", SIZES)
    @pytest.mark.parametrize("value", ["much", 0, -5, True, 1.5, [1]])
    def test_a_refusal_names_option_and_value(self, option: str, value: object) -> None:
        message = refused({option: value})
        assert option in message
        assert repr(value) in message

    def test_resolved_sizes(self) -> None:
        config = EngineConfig(host_bytes="4MiB", wave_bytes="1MiB", window_bytes="2MiB")
        assert (config.host_size, config.wave_size, config.window_size) == (4 << 20, 1 << 20, 2 << 20)
        assert config.write_queue_size == 2 << 20
        assert EngineConfig(write_queue_bytes="64KiB").write_queue_size == 65536


class TestNumbers:
    @pytest.mark.parametrize("option", AT_LEAST_1)
    @pytest.mark.parametrize("value", [0, -1, True, 1.0, "16", None])
    def test_at_least_one(self, option: str, value: object) -> None:
        assert refused({option: value}) == f"{option} must be a whole number of at least 1, got {value!r}"

    @pytest.mark.parametrize("option", AT_LEAST_0)
    @pytest.mark.parametrize("value", [-1, False, 0.5, "0", None])
    def test_at_least_zero(self, option: str, value: object) -> None:
        assert refused({option: value}) == f"{option} must be a whole number of at least 0, got {value!r}"
        assert getattr(EngineConfig.from_mapping({option: 0}), option) == 0

    @pytest.mark.parametrize("option", SECONDS)
    @pytest.mark.parametrize("value", [0, -1.5, math.inf, math.nan, True, "5", None])
    def test_seconds(self, option: str, value: object) -> None:
        assert refused({option: value}) == f"{option} must be a positive number of seconds, got {value!r}"
        assert getattr(EngineConfig.from_mapping({option: 0.25}), option) == 0.25

    @pytest.mark.parametrize("option", FLAGS)
    @pytest.mark.parametrize("value", [1, 0, "true", None])
    def test_flags(self, option: str, value: object) -> None:
        assert refused({option: value}) == f"{option} must be true or false, got {value!r}"


class TestChoices:
    @pytest.mark.parametrize("option", CHOICES)
    @pytest.mark.parametrize("value", ["", "nonsense", 5, None, ["lru"]])
    def test_a_refusal_names_option_value_and_choices(self, option: str, value: object) -> None:
        message = refused({option: value})
        assert option in message
        assert repr(value) in message
        assert all(choice in message for choice in CHOICES[option])

    def test_accepted(self) -> None:
        assert EngineConfig(key_hash="xxh3_128", eviction="slru").eviction == "slru"
        assert EngineConfig(chunker="segments", separator=[1, 2]).separator == (1, 2)

    def test_segments_and_separator_go_together(self) -> None:
        assert "needs a separator" in refused({"chunker": "segments"})
        assert "only it takes one" in refused({"separator": [1]})

    @pytest.mark.parametrize("value", [5, None, "12", [1, "x"], [-1], [True], [2**40], [1.5]])
    def test_a_separator_is_a_list_of_token_ids(self, value: object) -> None:
        message = refused({"chunker": "segments", "separator": value})
        assert "separator" in message
        assert repr(value) in message

    @pytest.mark.parametrize("value", ["nvme:///x", 5, None, [5], [None], ["nvme:///x", b"y"]])
    def test_tiers_are_a_list_of_urls(self, value: object) -> None:
        message = refused({"tiers": value})
        assert "tiers must be a list of URLs" in message
        assert repr(value) in message

    def test_lists_are_copied(self) -> None:
        tiers, separator = ["nvme:///x"], [1]
        config = EngineConfig(tiers=tiers, chunker="segments", separator=separator)
        tiers.append("y")
        separator.append(2)
        assert (config.tiers, config.separator) == (("nvme:///x",), (1,))


class TestUnknownKeys:
    @pytest.mark.parametrize(
        ("name", "near"),
        [
            ("host_byte", "host_bytes"),
            ("chunk_token", "chunk_tokens"),
            ("tier", "tiers"),
            ("iotimeout_s", "io_timeout_s"),
        ],
    )
    def test_the_nearest_is_suggested(self, name: str, near: str) -> None:
        assert refused({name: 1}) == f"unknown option {name!r}; did you mean {near!r}?"

    def test_a_far_one_lists_them_all(self) -> None:
        message = refused({"zzz": 1})
        assert all(f.name in message for f in dataclasses.fields(EngineConfig))

    def test_suggest_without_any(self) -> None:
        assert suggest("x", []) == "known are none"


class TestEnvironment:
    def test_every_kind_of_value(self) -> None:
        config = EngineConfig.load(
            environ={
                "AKV_HOST_BYTES": "64MiB",
                "AKV_CHUNK_TOKENS": "128",
                "AKV_IO_TIMEOUT_S": "2.5",
                "AKV_PREFAULT": "No",
                "AKV_PASSIVE": "1",
                "AKV_TIERS": "nvme:///a, nvme:///b",
                "AKV_CHUNKER": "segments",
                "AKV_SEPARATOR": "1 2,3",
                "AKV_WRITE_QUEUE_BYTES": "1MiB",
                "OTHER_HOST_BYTES": "nonsense",
            }
        )
        assert config == EngineConfig(
            host_bytes=64 << 20,
            chunk_tokens=128,
            io_timeout_s=2.5,
            prefault=False,
            passive=True,
            tiers=("nvme:///a", "nvme:///b"),
            chunker="segments",
            separator=(1, 2, 3),
            write_queue_bytes=1 << 20,
        )

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("AKV_CHUNK_TOKENS", "many"),
            ("AKV_CHUNK_TOKENS", ""),
            ("AKV_IO_TIMEOUT_S", "soon"),
            ("AKV_PREFAULT", "maybe"),
            ("AKV_SEPARATOR", "a b"),
        ],
    )
    def test_a_value_that_does_not_read_names_the_variable(self, name: str, text: str) -> None:
        with pytest.raises(ConfigurationError, match=f"{name}={text!r} is not a valid"):
            EngineConfig.load(environ={name: text})

    def test_an_unknown_variable_suggests(self) -> None:
        with pytest.raises(ConfigurationError, match="did you mean 'host_bytes'"):
            EngineConfig.load(environ={"AKV_HOST_BYTE": "1GiB"})

    def test_the_process_environment_is_the_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AKV_MIN_TOKENS", "7")
        assert EngineConfig.load().min_tokens == 7


class TestToml:
    def test_a_table_or_the_top_level_and_the_environment_wins(self, tmp_path: Path) -> None:
        nested, flat = tmp_path / "nested.toml", tmp_path / "flat.toml"
        nested.write_text('[other]\nx = 1\n[akvcache]\nhost_bytes = "32MiB"\ntiers = ["nvme:///a"]\nmin_tokens = 5\n')
        flat.write_text("chunk_tokens = 64\nio_timeout_s = 3\nstrict = true\n")
        config = EngineConfig.load(nested, environ={"AKV_MIN_TOKENS": "9"})
        assert (config.host_bytes, config.tiers, config.min_tokens) == (32 << 20, ("nvme:///a",), 9)
        config = EngineConfig.load(str(flat), environ={})
        assert (config.chunk_tokens, config.io_timeout_s, config.strict) == (64, 3, True)

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("chunk_tokens = ", "cannot read configuration"),
            ("akvcache = 5", "must be a table, got 5"),
            ("chunk_token = 5", "did you mean 'chunk_tokens'"),
            ("[akvcache]\nhost_bytes = 'x'", "host_bytes"),
            ("[akvcache]\ntiers = 'nvme:///a'", "tiers must be a list"),
            ("[akvcache]\nseparator = 5\nchunker = 'segments'", "separator"),
        ],
    )
    def test_what_is_wrong_is_said(self, tmp_path: Path, text: str, says: str) -> None:
        path = tmp_path / "akv.toml"
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=says.replace("[", r"\[")):
            EngineConfig.load(path, environ={})

    def test_a_file_that_is_not_there_or_not_text(self, tmp_path: Path) -> None:
        binary = tmp_path / "binary.toml"
        binary.write_bytes(b"\xff\xfe\x00")
        for path in (tmp_path / "missing.toml", tmp_path, binary):
            with pytest.raises(ConfigurationError, match="cannot read configuration"):
                EngineConfig.load(path, environ={})


class TestTierUrl:
    def test_taken_apart(self) -> None:
        url = TierUrl.parse("s3://bucket/a%20b/c?endpoint=http://127.0.0.1:8333&capacity=2GiB")
        assert (url.scheme, url.authority, url.path) == ("s3", "bucket", "/a b/c")
        assert dict(url.options) == {"endpoint": "http://127.0.0.1:8333", "capacity": "2GiB"}

    @pytest.mark.parametrize("url", ["", "/var/cache", "nvme:/var/cache", "://x", "nvme"])
    def test_not_a_url(self, url: str) -> None:
        with pytest.raises(ConfigurationError, match=r"is not a URL such as"):
            TierUrl.parse(url)

    @pytest.mark.parametrize("url", ["nvme://[::1/x", "nvme://[x]/y"])
    def test_a_url_that_python_refuses(self, url: str) -> None:
        with pytest.raises(ConfigurationError):
            TierUrl.parse(url)

    def test_options_are_checked(self) -> None:
        with pytest.raises(ConfigurationError, match="unknown option 'capacty'; did you mean 'capacity'"):
            TierUrl.parse("nvme:///x?capacty=1", known=["capacity"])
        for query in ("capacity=", "capacity", "capacity=1&capacity=2"):
            with pytest.raises(ConfigurationError, match="'capacity' is empty or given twice"):
                TierUrl.parse(f"nvme:///x?{query}")
