"""Installed packages: their versions, and their entry points for autosplit. A checkout without metadata has neither."""

import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version


def version_of(package: str) -> str:
    """The installed version from the package's metadata; '' if it has none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def makers() -> dict[str, str]:
    """The versions of autosplit and torch, which plans and exports name."""
    return {name: version_of(name) for name in ("autosplit", "torch")}


def added(group: str) -> Mapping[str, str]:
    """Name to import path (``module:object``) of the entry points of a group in installed packages; imports nothing."""
    return _added(group, tuple(sys.path))


@cache
def _added(group: str, _path: tuple[str, ...]) -> Mapping[str, str]:
    return {one.name: one.value for one in entry_points(group=group)}
