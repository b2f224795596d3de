"""`akvcache demo` with a tiny model: two real processes, a real folder, the real command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from akvcache import cli
from akvcache.demo.model import is_prepared, model_folder
from akvcache.demo.options import DemoOptions, default_cache_dir
from akvcache.demo.run import Silent, run_demo
from tests.e2e.demo_kit import HANDBOOK, Finished, run_cli
from tests.tiny_model import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, make_tiny_model

pytestmark = pytest.mark.timeout(180)

PROMPT, CHUNK, NEW = 600, 64, 8
CHUNKS = (PROMPT - 1) // CHUNK
TOKEN_BYTES = NUM_LAYERS * 2 * NUM_KV_HEADS * HEAD_DIM * 4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "tier with space?"


def common(tiny: Path, store: Path) -> list[str]:
    values = {"model": tiny, "document": HANDBOOK, "prompt-tokens": PROMPT, "new-tokens": NEW, "store": store}
    return ["demo", "--json", *(word for name, value in values.items() for word in (f"--{name}", str(value)))]


@pytest.fixture(scope="module")
def json_run(tiny: Path, store: Path) -> Finished:
    return run_cli(*common(tiny, store))


def test_json_is_one_object_and_all_of_the_output(json_run: Finished) -> None:
    assert json_run.code == 0
    assert json_run.err == ""
    assert json_run.out.count("\n") == 1
    report = json_run.report()
    assert report["problems"] == []
    assert report["model"] == "tiny"
    assert report["dtype"] == "float32"


def test_second_process_hits_every_whole_chunk_on_nvme(json_run: Finished) -> None:
    report = json_run.report()
    assert report["prompt_tokens"] == PROMPT
    assert report["full_chunks"] == CHUNKS
    assert report["hit_tokens"] == CHUNKS * CHUNK
    assert report["hit_by_tier"] == {"nvme": CHUNKS * CHUNK}
    assert report["bytes"] == CHUNKS * CHUNK * TOKEN_BYTES
    assert report["warm"]["computed_tokens"] == PROMPT - CHUNKS * CHUNK


def test_first_process_is_cold_and_its_store_is_durable(json_run: Finished) -> None:
    cold = json_run.report()["cold"]
    assert cold["hit_tokens"] == 0
    assert cold["hit_by_tier"] == {}
    assert cold["computed_tokens"] == PROMPT
    assert cold["stored_tokens"] == cold["durable_tokens"] == CHUNKS * CHUNK


def test_answers_and_kv_are_identical(json_run: Finished) -> None:
    report = json_run.report()
    assert report["tokens_identical"] is True
    assert report["kv_identical"] is True
    assert report["generated_cold"] == report["generated_warm"]
    assert 1 <= len(report["generated_warm"]) <= NEW
    assert len(set(report["generated_warm"])) > 1, "a model that repeats one token proves nothing"


def test_times_are_of_the_whole_way_to_the_first_token(json_run: Finished) -> None:
    report = json_run.report()
    assert report["speedup"] == pytest.approx(report["ttft_cold_s"] / report["ttft_warm_s"])
    for process in ("cold", "warm"):
        parts = report[process]
        assert parts["ttft_s"] == pytest.approx(parts["lookup_s"] + parts["retrieve_s"] + parts["prefill_s"])
    assert report["cold"]["retrieve_s"] < report["warm"]["retrieve_s"], "nothing was retrieved in the first process"


def test_processes_share_nothing_but_the_folder(json_run: Finished) -> None:
    report = json_run.report()
    assert report["cold"]["pid"] != report["warm"]["pid"]


def test_spans_of_both_requests_form_trees(json_run: Finished) -> None:
    report = json_run.report()
    spans = report["cold"]["spans"] + report["warm"]["spans"]
    ids = [span["span_id"] for span in spans]
    assert len(set(ids)) == len(ids)
    assert (
        len({span["trace_id"] for span in report["cold"]["spans"]} & {s["trace_id"] for s in report["warm"]["spans"]})
        == 0
    )
    for process, expected in (("cold", "akv.store"), ("warm", "akv.retrieve")):
        own = {span["name"]: span for span in report[process]["spans"]}
        root = own["demo.request"]
        assert root["parent_id"] is None
        for name in ("akv.lookup", "demo.prefill", "demo.generate", expected):
            assert own[name]["parent_id"] == root["span_id"]
            assert own[name]["duration_s"] <= root["duration_s"]
    write = next(span for span in report["cold"]["spans"] if span["name"] == "akv.tier.write")
    store = next(span for span in report["cold"]["spans"] if span["name"] == "akv.store")
    assert write["links"] == [store["span_id"]]


def test_given_store_is_kept(json_run: Finished, store: Path) -> None:
    assert any(path.stat().st_size >= CHUNK * TOKEN_BYTES for path in store.rglob("*") if path.is_file())
    assert any(note.startswith(f"entries stay in {str(store)!r}") for note in json_run.report()["notes"])


def test_text_run_shows_table_answer_and_spans(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = run_cli(
        "demo", "--model", tiny, "--document", HANDBOOK, "--prompt-tokens", "200", "--chunk-tokens", "16",
        "--new-tokens", "4", "--dtype", "bfloat16", "--question", "What [is] it?",
    )  # fmt: skip
    assert (done.code, done.err) == (0, "")
    for text in (
        "first process: nothing is cached",
        "second process: the prompt is on NVMe",
        "write to NVMe",
        "tiny, bfloat16, chunks of 16 tokens",
        "nvme: 192 tokens",
        "tokens identical: yes",
        "KV identical:     yes",
        "note: the document was cut to its first",
        "demo.request",
        "├── akv.retrieve",
        "└── demo.generate",
    ):
        assert text in done.out, text
    assert list(tmp_path.iterdir()) == [], "the temporary store is removed"


class Saboteur(Silent):
    """Overwrites the stored chunks between the two processes."""

    def __init__(self, store: Path) -> None:
        self._store = store

    def process(self, title: str) -> None:
        if not title.startswith("second"):
            return
        for path in self._store.rglob("*"):
            if path.is_file() and path.stat().st_size >= CHUNK * TOKEN_BYTES:
                with path.open("r+b") as file:
                    file.seek(path.stat().st_size // 2)
                    file.write(b"\xff" * 64)


def test_damaged_store_is_recomputed_and_reported(
    tiny: Path, json_run: Finished, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert json_run.code == 0
    monkeypatch.setattr("akvcache.demo.run.Silent", lambda: Saboteur(store))
    code = cli.main(common(tiny, store))
    out, err = capsys.readouterr()
    assert code == 1
    report = Finished(code, out, err).report()
    assert report["cold"]["hit_tokens"] == 0, "another run's entries on the same store are not seen"
    assert report["hit_by_tier"] != {"nvme": CHUNKS * CHUNK}
    assert report["tokens_identical"] is True, "what cannot be loaded is computed"
    assert err.count("\n") == 1
    assert "the second process loaded" in err
    assert "corrupt" in err


def test_worker_says_what_is_wrong_with_the_weights(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken\nmodel"
    broken.mkdir()
    for path in tiny.iterdir():
        data = path.read_bytes()
        (broken / path.name).write_bytes(data[: len(data) // 2] if path.suffix == ".safetensors" else data)
    code = cli.main(common(broken, tmp_path / "store"))
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "model folder" in err
    assert "must hold a causal language model" in err


def test_worker_that_dies_is_reported(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.Popen

    def dying(command: list[str], **options: object) -> subprocess.Popen[str]:
        return real([sys.executable, "-c", "import sys; sys.exit('no luck today')"], **options)

    monkeypatch.setattr(subprocess, "Popen", dying)
    with pytest.raises(Exception, match=r"the first process ended early, exit code 1: no luck today"):
        run_demo(
            DemoOptions(
                document=HANDBOOK, question="Why?", model=tiny, dtype="float32", chunk_tokens=32, store=None,
                prompt_tokens=200, new_tokens=2, cache_dir=tiny,
            ),
            Silent(),
        )  # fmt: skip


def test_interrupted_run_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "akvcache", "demo", "--model", str(tiny), "--document", str(HANDBOOK)]
    with subprocess.Popen(
        [*command, "--prompt-tokens", "3000", "--new-tokens", "1000"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as demo:
        assert demo.stdout is not None
        assert any("first process" in line for line in demo.stdout)
        os.killpg(demo.pid, signal.SIGINT)
        _, err = demo.communicate(timeout=60)
    assert (demo.returncode, err) == (130, "akvcache demo: interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(300)
def test_real_model_on_a_short_prompt(tmp_path: Path) -> None:
    """The real weights; the first run on a machine converts them, into the user's cache or this tree's."""
    is_ready = is_prepared(model_folder(default_cache_dir()))
    cache_dir = default_cache_dir() if is_ready else HANDBOOK.parents[2] / ".cache" / "models"
    document = tmp_path / "handbook.txt"
    document.write_text(HANDBOOK.read_text()[:2400])
    done = run_cli(
        "demo", "--json", "--document", document, "--question", "How tall is the tower?", "--new-tokens", "12",
        "--cache-dir", cache_dir,
    )  # fmt: skip
    assert done.code == 0, done.err
    report = done.report()
    assert report["full_chunks"] >= 8
    assert report["hit_by_tier"] == {"nvme": report["full_chunks"] * 64}
    assert report["tokens_identical"] is True
    assert "34" in report["answer"]
