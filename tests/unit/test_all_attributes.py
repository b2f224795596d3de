"""Every module says what it offers: `__all__` is a tuple of exactly the public names it defines."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import akvcache_nvme
import pytest

import akvcache


def modules() -> Iterator[str]:
    for package in (akvcache, akvcache_nvme):
        yield package.__name__
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            yield found.name


def public_names(source: str) -> set[str]:
    """Return the public classes, functions, constants and aliases that a module defines at its top level."""
    names: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Assign) and not _makes_type_variable(node.value):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def _makes_type_variable(value: ast.expr) -> bool:
    return (
        isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in ("TypeVar", "ParamSpec")
    )


@pytest.mark.parametrize("name", list(modules()))
def test_all_is_exact(name: str) -> None:
    module = importlib.import_module(name)
    assert isinstance(module.__all__, tuple)
    assert len(set(module.__all__)) == len(module.__all__)
    assert all(hasattr(module, offered) for offered in module.__all__)
    file = Path(module.__file__ or "")
    if file.name != "__init__.py":
        assert set(module.__all__) == public_names(file.read_text())
    else:
        assert public_names(file.read_text()) <= set(module.__all__)
