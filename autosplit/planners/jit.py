"""Compilation of the inner loops with numba; the machine code is cached beside the sources.

`python -m autosplit.planners.warming` compiles everything ahead of time. Whoever comes without is told that it takes a while.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.core import event

from autosplit.errors import is_interrupt

Function = TypeVar("Function", bound=Callable[..., object])

whole = cast(Callable[[int], int], np.int64)
"""For whole numbers given to compiled functions: for a literal numba would compile all that is called once more."""


def compiled(function: Function) -> Function:
    """The function compiled on its first call, or loaded from the cache; it releases the interpreter lock.

    It may not allocate: without numba's reference counting it compiles several times faster and runs twice as fast.
    """
    return _cached(function, _nrt=False)


def allocating(function: Function) -> Function:
    """Likewise, for a function that makes arrays."""
    return _cached(function)


def inner(function: Function) -> Function:
    """Like ``compiled``, for a function that only compiled code calls: no wrapper for Python, which saves half the time."""
    return _cached(function, _nrt=False, no_cpython_wrapper=True)


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C while compiled code works is a KeyboardInterrupt, as ever.

    Numba hears of it while it makes the answer an array of Python's, returns the array nonetheless, and Python calls that a
    SystemError; for an answer of several arrays, a SystemError of a SystemError.
    """
    try:
        yield
    except SystemError as failure:
        if is_interrupt(failure):
            raise KeyboardInterrupt from None
        raise


def _cached(function: Function, **options: bool) -> Function:
    dispatcher: Any = numba.njit(cache=True, nogil=True, no_cfunc_wrapper=True, **options)(function)
    # numba looks at the one file in which a function stands; what is compiled into it may stand in another
    dispatcher._cache._cache_file._source_stamp = source_stamp(Path(__file__).parent)
    return cast(Function, dispatcher)


@cache
def source_stamp(folder: Path) -> str:
    """A digest of every module in the folder that is compiled: machine code of any other sources is made anew."""
    digest = sha256()
    for path in sorted(folder.rglob("*.py")):
        source = path.read_bytes()
        if b"planners.jit import" in source:
            digest.update(source)
    return digest.hexdigest()


class _Notice(event.Listener):  # type: ignore[misc]
    """Says once in a process that something of this package is being compiled."""

    def on_start(self, event: Any) -> None:
        if event.data["dispatcher"].py_func.__module__.startswith("autosplit."):
            _say_once()

    def on_end(self, event: Any) -> None:
        pass


@cache
def _say_once() -> None:
    logging.getLogger(__name__).warning(
        "compiling the planner's inner loops, once after each installation; this takes half a minute or less"
    )


event.register("numba:compile", _Notice())
