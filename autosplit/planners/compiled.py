"""Compilation of the inner loops with numba; the machine code is cached beside the sources."""

from collections.abc import Callable
from typing import TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """The function compiled on its first call, or loaded from the cache; it releases the interpreter lock.

    It may not allocate: without numba's reference counting it compiles several times faster and runs twice as fast.
    """
    return cast(Function, numba.njit(cache=True, nogil=True, _nrt=False, no_cfunc_wrapper=True)(function))


def allocating(function: Function) -> Function:
    """Likewise, for a function that makes arrays."""
    return cast(Function, numba.njit(cache=True, nogil=True, no_cfunc_wrapper=True)(function))


def inner(function: Function) -> Function:
    """Like ``compiled``, for a function that only compiled code calls: no wrapper for Python, which saves half the time."""
    options = {"cache": True, "nogil": True, "_nrt": False, "no_cfunc_wrapper": True, "no_cpython_wrapper": True}
    return cast(Function, numba.njit(**options)(function))
