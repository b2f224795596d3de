"""Backends are found by name among installed plug-ins, imported when named, and refused with a hint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from akvcache import CacheEngine, EngineConfig
from akvcache.connector import NullConnector
from akvcache.errors import BackendUnavailable, ConfigurationError
from akvcache.layout import KVLayout
from akvcache.registry import GROUP, installed, make_backend

Plugin = Callable[..., str]

GOOD = """
from akvcache.config import TierUrl
from akvcache.testing import MemoryBackend

class Factory:
    @staticmethod
    def from_url(url):
        options = TierUrl.parse(url, known=["capacity"]).options
        return MemoryBackend(name=options.get("capacity", "toy"))
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plugin:
    """Install a distribution whose entry point names a module of the given source; return the module's name."""

    def install(scheme: str, source: str, attribute: str = "Factory") -> str:
        module = f"akv_toy_{scheme}"
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{scheme} = {module}:{attribute}\n")
        (tmp_path / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, module, raising=False)
        return module

    return install


def test_the_backends_of_this_repository_take_the_same_road() -> None:
    assert "nvme" in installed()
    assert make_backend("nvme:///somewhere?capacity=1GiB").name == "nvme"


def test_a_plug_in_is_found_by_its_scheme_and_imported_when_named(plugin: Plugin) -> None:
    module = plugin("toy", GOOD)
    assert "toy" in installed()
    assert module not in sys.modules, "listing imports nothing"
    assert make_backend("toy://?capacity=big").name == "big"
    assert module in sys.modules


def test_an_unknown_scheme_suggests(plugin: Plugin) -> None:
    plugin("toy", GOOD)
    with pytest.raises(ConfigurationError, match="no backend 'nvm' is installed; did you mean 'nvme'"):
        make_backend("nvm:///x")
    with pytest.raises(ConfigurationError, match=r"known are .*nvme.*toy"):
        make_backend("quantum://x")


def test_what_is_not_a_url_is_said_before_anything_is_imported() -> None:
    with pytest.raises(ConfigurationError, match="is not a URL"):
        make_backend("/var/cache")


@pytest.mark.parametrize(
    ("source", "attribute", "cause"),
    [
        ("import a_module_that_is_not_there", "Factory", "a_module_that_is_not_there"),
        ("raise RuntimeError('no driver')", "Factory", "no driver"),
        ("", "Factory", "Factory"),
        ("Factory = object()", "Factory", "from_url"),
    ],
)
def test_a_plug_in_that_cannot_be_imported_is_named_with_the_cause(
    plugin: Plugin, source: str, attribute: str, cause: str
) -> None:
    module = plugin("broken", source, attribute)
    with pytest.raises(BackendUnavailable) as failure:
        make_backend("broken://x")
    message = str(failure.value)
    assert "'broken'" in message
    assert module in message
    assert cause in message
    assert (failure.value.backend, failure.value.op) == ("broken", "import")
    assert failure.value.__cause__ is not None


def test_a_wrong_option_is_the_plug_ins_to_say(plugin: Plugin) -> None:
    plugin("toy", GOOD)
    with pytest.raises(ConfigurationError, match="unknown option 'capacty'; did you mean 'capacity'"):
        make_backend("toy://?capacty=5")


@pytest.mark.asyncio
@pytest.mark.parametrize("url", ["broken://x", "nothing://x", "toy://?typo=1", "nope"])
async def test_a_tier_that_cannot_be_made_is_a_configuration_error_at_open(plugin: Plugin, url: str) -> None:
    plugin("broken", "raise RuntimeError('no driver')")
    plugin("toy", GOOD)
    layout = KVLayout.mha(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32")
    config = EngineConfig(tiers=[url], host_bytes="1MiB", chunk_tokens=16)
    with pytest.raises(ConfigurationError):
        async with CacheEngine.open(config, connector=NullConnector(layout)):
            pass


@pytest.mark.asyncio
async def test_a_tier_url_becomes_a_tier(plugin: Plugin) -> None:
    plugin("toy", GOOD)
    layout = KVLayout.mha(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32")
    config = EngineConfig(tiers=["toy://", "toy://"], host_bytes="1MiB", chunk_tokens=16, strict=True)
    async with CacheEngine.open(config, connector=NullConnector(layout)) as engine:
        assert {name: tier.inactive for name, tier in engine.health().tiers.items()} == {"toy": None, "toy2": None}
        kept = await engine.store(list(range(32)), None)
        assert (await engine.flush()).pending_chunks == 0
        assert kept.stored_tokens == 32
