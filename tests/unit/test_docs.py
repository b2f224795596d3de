"""The documentation says what the code says: names, defaults and signatures agree, links resolve, snippets run."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from akvcache_nvme.options import NvmeOptions

import akvcache
from akvcache import EngineConfig, StopReason, errors
from akvcache.telemetry import names

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "backends").glob("*.md")])
RUN = "<!-- run -->"
SECONDS_PER_BLOCK = 20
_BLOCK = re.compile(r"^(?P<mark><!-- run -->\n+)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_DRIVER = """
import os, sys, tempfile, pathlib
for number, text in enumerate(sys.stdin.read().split("\\0"), 1):
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        exec(compile(text, f"block {number}", "exec"), {"__name__": "__main__"})
        os.chdir("/")
"""


def blocks(page: Path) -> list[tuple[str, bool]]:
    """Return every Python block of a page and whether it is marked to run."""
    return [(found["code"], bool(found["mark"])) for found in _BLOCK.finditer(page.read_text(encoding="utf-8"))]


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def rows(page: Path, section: str | None = None) -> list[list[str]]:
    """Return the cells of every table row whose first cell is code; with `section`, of that section only."""
    text = page.read_text(encoding="utf-8")
    if section is not None:
        text = re.split(r"^## ", text.split(f"\n## {section}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def code(cell: str) -> str:
    return cell.strip("`").replace("\\|", "|")


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", without_code(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# -- reference pages against the code --------------------------------------------------------------------------------


def test_configuration_names_every_option_with_its_type_and_default() -> None:
    documented = [
        (code(name), code(kind), ast.literal_eval(code(default)))
        for name, kind, default, _ in rows(REFERENCE / "configuration.md", "Engine options")
    ]
    assert documented == [(f.name, f.type, f.default) for f in dataclasses.fields(EngineConfig)]


def test_configuration_names_every_option_of_the_nvme_tier() -> None:
    table = {
        code(cells[0]): code(cells[1]) for cells in rows(REFERENCE / "configuration.md", "Options of the NVMe tier")
    }
    assert table.pop("capacity") == "required"
    assert NvmeOptions.parse("nvme:///x?capacity=1GiB") == NvmeOptions.parse(
        "nvme:///x?capacity=1GiB&" + "&".join(f"{name}={default}" for name, default in table.items())
    )
    with pytest.raises(errors.ConfigurationError) as refused:
        NvmeOptions.parse("nvme:///x?zzzzzz=1")
    assert set(re.findall(r"\w+", str(refused.value).rsplit("known are ", 1)[1])) == {*table, "capacity"}


def test_metrics_names_every_span_attribute_and_metric() -> None:
    documented = [code(cells[0]) for cells in rows(REFERENCE / "metrics.md")]
    known = [value for name, value in vars(names).items() if not name.startswith("_")]
    assert sorted(documented) == sorted(known)


def test_errors_names_every_exception_and_stop_reason() -> None:
    tree = re.search(r"```text\n(.*?)```", (REFERENCE / "errors.md").read_text(encoding="utf-8"), re.DOTALL)
    assert tree is not None
    assert set(re.findall(r"^[│├└─ ]*(\w+)", tree[1], flags=re.MULTILINE)) == set(errors.__all__)
    assert [code(cells[0]) for cells in rows(REFERENCE / "errors.md", "Exceptions")] == sorted(errors.__all__)
    reasons = rows(REFERENCE / "errors.md", "Stop reasons")
    assert [code(cells[0]) for cells in reasons] == [reason.name for reason in StopReason]
    assert [code(cells[1]) for cells in reasons] == [reason.value for reason in StopReason]


def test_api_describes_every_public_name() -> None:
    headings = re.findall(r"^## `(\w+)`$", (REFERENCE / "api.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(headings) == sorted(akvcache.__all__)


def documented_classes() -> dict[str, ast.ClassDef]:
    """Return the class sketches of api.md by name."""
    parsed = [ast.parse(text) for text, _ in blocks(REFERENCE / "api.md")]
    return {node.name: node for module in parsed for node in module.body if isinstance(node, ast.ClassDef)}


def public_methods(cls: type) -> dict[str, object]:
    """Return what a caller may call, a constructor of our own included."""
    found: dict[str, object] = {}
    for name, member in inspect.getmembers(cls):
        own = any(name in vars(base) for base in cls.__mro__ if base.__module__.startswith("akvcache"))
        if own and callable(member) and not isinstance(member, type) and not name.startswith("_"):
            found[name] = member
    if "__init__" in vars(cls) and not dataclasses.is_dataclass(cls) and not getattr(cls, "_is_protocol", False):
        found["__init__"] = vars(cls)["__init__"]
    return found


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[tuple[str, bool, bool]]:
    """Return (name, is keyword only, has a default) of every parameter but self and cls."""
    spec = function.args
    plain = [(a.arg, False, i >= len(spec.args) - len(spec.defaults)) for i, a in enumerate(spec.args)]
    only = [(a.arg, True, d is not None) for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)]
    return [item for item in [*plain, *only] if item[0] not in ("self", "cls")]


SKETCHED = [
    name for name in akvcache.__all__ if name not in ("StopReason", "AkvError", "ConfigurationError", "UsageError")
]
NOT_FOR_CALLERS = {"CacheEngine": {"__init__", "degrade"}, "CacheNamespace": {"encode"}, "RequestScope": {"encode"}}


@pytest.mark.parametrize("name", SKETCHED)
def test_api_has_the_signature_of_every_method_and_every_field(name: str) -> None:
    sketch, cls = documented_classes()[name], getattr(akvcache, name)
    methods = {m.name: m for m in sketch.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)}
    properties = {n for n, m in methods.items() if any(ast.unparse(d) == "property" for d in m.decorator_list)}
    for method in properties:
        assert isinstance(inspect.getattr_static(cls, method), property), method
        del methods[method]
    known = {n: m for n, m in public_methods(cls).items() if n not in NOT_FOR_CALLERS.get(name, ())}
    assert sorted(methods) == sorted(known)
    for method, node in methods.items():
        signature = inspect.signature(inspect.unwrap(getattr(known[method], "__func__", known[method])))
        assert parameters(node) == [
            (p.name, p.kind is p.KEYWORD_ONLY, p.default is not p.empty)
            for p in signature.parameters.values()
            if p.name not in ("self", "cls")
        ], method
        is_async = inspect.iscoroutinefunction(known[method]) or (method == "open" and name == "CacheEngine")
        assert isinstance(node, ast.AsyncFunctionDef) == is_async, method
    if dataclasses.is_dataclass(cls) and cls is not EngineConfig:
        fields = [n.target.id for n in sketch.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
        assert fields == [f.name for f in dataclasses.fields(cls) if not f.name.startswith("_")]


def test_the_map_has_the_layers_that_the_linter_holds() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    held = [
        (len(layers) - at, name) for at, layer in enumerate(layers) for name in re.findall(r"akvcache\.(\w+)", layer)
    ]
    text, drawn, number = (DOCS / "explanation" / "map.md").read_text(encoding="utf-8"), [], 0
    for layer, name in re.findall(r"^\| *(\d*) *\| `(\w+)` \|", text, flags=re.MULTILINE):
        number = int(layer or number)
        drawn.append((number, name))
    assert sorted(drawn) == sorted(held)
    assert [n for n, _ in drawn] == sorted((n for n, _ in drawn), reverse=True)


# -- all pages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    broken = []
    for target in _LINK.findall(without_code(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda page: str(page.relative_to(ROOT)))
def test_snippets_compile_and_marked_ones_run(page: Path) -> None:
    marked = []
    for text, runs in blocks(page):
        compile(text, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if runs:
            marked.append(text)
    if not marked:
        return
    assert RUN in page.read_text(encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", _DRIVER],
        input="\0".join(marked),
        capture_output=True,
        text=True,
        timeout=SECONDS_PER_BLOCK * len(marked),
        check=False,
    )
    assert done.returncode == 0, done.stderr
