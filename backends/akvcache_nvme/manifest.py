"""Manifests: what a namespace directory tells an operator about itself.

A manifest found on disk is untrusted: its size is bounded, it is JSON and nothing else, and whatever is wrong with
it costs a log line, never a call. No chunk is found or refused because of a manifest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, cast

from akvcache.keys import NamespaceId

from .files import ABSENT, allocated, directory, stat_or_none
from .names import MANIFEST, namespace_in

__all__ = (
    "FORMAT",
    "MAX_MANIFEST_BYTES",
    "conflict",
    "difference",
    "encode_manifest",
    "other_manifests",
    "read_manifest",
    "write_manifest",
)

FORMAT: Final = 1
"""Version of the directory layout."""

MAX_MANIFEST_BYTES: Final = 65536
MAX_MANIFESTS: Final = 256

_CUTS: Final = {"chunker": "chunk size", "key_schema": "key schema", "hash": "key hash", "layout": "layout"}
"""Fields that change every key of a model, and what to call them."""


def encode_manifest(manifest: Mapping[str, object]) -> bytes:
    """Return the file for `manifest`."""
    return (json.dumps({"format": FORMAT, **manifest}, indent=2, sort_keys=True) + "\n").encode()


def read_manifest(parent: int) -> dict[str, object] | None:
    """Return the manifest in a namespace directory, or None if there is none that can be understood.

    Args:
        parent: Handle of the directory.
    """
    if stat_or_none(MANIFEST, parent) is None:
        return None
    handle = os.open(MANIFEST, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        text = os.read(handle, MAX_MANIFEST_BYTES)
    finally:
        os.close(handle)
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, object]", found) if isinstance(found, dict) else None


def write_manifest(name: str, parent: int, text: bytes) -> int:
    """Write a new manifest file and return its allocated bytes; leave nothing behind if that fails."""
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=parent)
    try:
        os.write(handle, text)
        return allocated(os.fstat(handle))
    except OSError:
        os.unlink(name, dir_fd=parent)
        raise
    finally:
        os.close(handle)


def other_manifests(root: Path, namespace_id: NamespaceId) -> dict[NamespaceId, Mapping[str, object]]:
    """Return the manifests of other namespaces below `root`, at most `MAX_MANIFESTS` of them."""
    others: dict[NamespaceId, Mapping[str, object]] = {}
    with os.scandir(root) as entries:
        found = [other for entry in entries if (other := namespace_in(entry.name)) and other != namespace_id]
    for other in found[:MAX_MANIFESTS]:
        try:
            with directory(root, other.hex()) as parent:
                manifest = read_manifest(parent)
        except OSError as error:
            if error.errno not in ABSENT:
                raise
        else:
            if manifest is not None:
                others[other] = manifest
    return others


def conflict(found: Mapping[str, object], text: bytes) -> str | None:
    """Return how a manifest on disk disagrees with the one we would write, or None if it does not."""
    ours = cast("dict[str, object]", json.loads(text))
    changed = sorted(name for name in found.keys() | ours.keys() if found.get(name) != ours.get(name))
    return f"it differs in {', '.join(map(repr, changed[:8]))}" if changed else None


def difference(ours: Mapping[str, object], theirs: Mapping[str, object]) -> str | None:
    """Return why entries of another namespace of the same model will not be hit, or None if it is no surprise.

    A difference in weights, rank or adapter is what namespaces are for; one in how prompts are cut or hashed is
    mostly a changed setting.
    """
    if not ours.get("model") or ours.get("model") != theirs.get("model"):
        return None
    changed = [
        f"{label} {str(theirs.get(name))[:80]!r} (now {str(ours.get(name))[:80]!r})"
        for name, label in _CUTS.items()
        if theirs.get(name) != ours.get(name)
    ]
    return " and ".join(changed) or None
