"""Every module says what it offers: `__all__` is a tuple of what it defines for others, no less and no more."""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
from pathlib import Path

import akvcache_nvme

import akvcache


def trees() -> dict[str, ast.Module]:
    """Return every module by name, parsed; except for the entry point, which nobody imports."""
    names = [
        found.name
        for package in (akvcache, akvcache_nvme)
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if found.name != "akvcache.__main__"
    ]
    specs = {name: importlib.util.find_spec(name) for name in ("akvcache", "akvcache_nvme", *names)}
    return {name: ast.parse(Path(spec.origin or "").read_text()) for name, spec in specs.items() if spec}


def offered(tree: ast.Module) -> list[str] | None:
    """Return what `__all__` lists, None if it is not a tuple of names."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value)) if isinstance(node.value, ast.Tuple) else None
    return []


def defined(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Return the public classes and functions, and everything else bound at a module's top level."""
    code: set[str] = set()
    others: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            code |= {node.name} if node.name[0] != "_" else set()
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            others.add(node.target.id)
        elif isinstance(node, ast.Assign):
            others |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return code, others


def imported(tree: ast.Module) -> set[tuple[str, str]]:
    """Return (module, name) of everything a module imports by name."""
    return {
        (node.module or "", item.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for item in node.names
    }


def test_all_is_exact() -> None:
    modules = trees()
    wanted = {pair for tree in modules.values() for pair in imported(tree) if ".".join(pair) not in modules}
    wrong: list[str] = []
    for name, tree in modules.items():
        names = offered(tree)
        if names is None:
            wrong.append(f"{name}: __all__ is not a tuple")
            continue
        code, others = defined(tree)
        may_offer = code | others
        if name in ("akvcache", "akvcache.testing", "akvcache_nvme"):
            may_offer |= {item for _module, item in imported(tree)}
        wrong += [f"{name} defines {item}, __all__ does not have it" for item in code - set(names)]
        wrong += [
            f"{name}: {item} is imported elsewhere, __all__ does not have it"
            for module, item in wanted
            if module == name and item not in names
        ]
        wrong += [f"{name}.__all__ has {item}, the module does not" for item in set(names) - may_offer]
        wrong += [f"{name}.__all__ has {item} twice" for item in set(names) if names.count(item) > 1]
    assert len(modules) > 30
    assert not wrong, "\n".join(sorted(wrong))
