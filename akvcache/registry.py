"""Finds backends by name among the installed plug-ins (entry-point group ``akvcache.backends``).

Loading is lazy: a plug-in is imported when a configuration names it. Backends of this repository take the same road.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Final, Protocol, cast

from akvcache.backend import Backend
from akvcache.config import TierUrl, suggest
from akvcache.errors import BackendUnavailable, ConfigurationError

__all__ = ("GROUP", "BackendFactory", "installed", "make_backend")

GROUP: Final = "akvcache.backends"


class BackendFactory(Protocol):
    """What an entry point names: a class or object that makes a backend from a tier URL."""

    from_url: Callable[[str], Backend]


def installed() -> dict[str, EntryPoint]:
    """Return the installed backends by URL scheme."""
    return {point.name: point for point in entry_points(group=GROUP)}


def make_backend(url: str) -> Backend:
    """Return an unopened backend for a tier URL. Blocking: it reads what is installed and imports the plug-in.

    Raises:
        ConfigurationError: No backend of that name is installed (the installed ones are named), or the URL is wrong.
        BackendUnavailable: The plug-in cannot be imported; names it and the cause.
    """
    scheme = TierUrl.parse(url).scheme
    points = installed()
    if scheme not in points:
        raise ConfigurationError(f"no backend {scheme!r} is installed; {suggest(scheme, points)}")
    try:
        make = cast("BackendFactory", points[scheme].load()).from_url
    except Exception as error:
        raise BackendUnavailable(
            f"backend {scheme!r} ({points[scheme].value}) cannot be imported: {error}", backend=scheme, op="import"
        ) from error
    return make(url)
