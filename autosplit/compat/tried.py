"""The versions on which the private interfaces were tried, and the error where a newer version has none of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from autosplit.errors import MissingExtraError

TRIED = {
    "numba": "0.68.1",
    "onnxruntime": "1.31.1",
    "openvino": "2026.4.1",
    "ray": "2.60.0",
    "torch": "2.13.0",
    "transformers": "5.23.0",
}
"""Package to the version on which ``tests/compat`` passed last."""


@contextmanager
def needs(package: str) -> Iterator[None]:
    """Use private parts of a package in this block.

    Raises: MissingExtraError: the installed version has another form of them.

    >>> with needs("torch"):
    ...     from torch._ops import NoSuchName
    Traceback (most recent call last):
        ...
    autosplit.errors.MissingExtraError: torch ... lacks a part that autosplit uses ... pip install 'torch==2.13.0'
    """
    try:
        yield
    except (ImportError, AttributeError) as failure:
        raise MissingExtraError(
            f"{package} {version(package)} lacks a part that autosplit uses ({failure}). autosplit was tried on {package} "
            f"{TRIED[package]}: pip install '{package}=={TRIED[package]}'"
        ) from failure
