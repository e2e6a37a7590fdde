"""Versions of installed packages. A package that runs from a checkout has no metadata, and so no version."""

from importlib.metadata import PackageNotFoundError, version


def version_of(package: str) -> str:
    """The installed version from the package's metadata; '' if it has none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
