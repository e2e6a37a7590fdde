"""Compile inner loops with numba and cache the machine code in the user's cache folder, which all installations share.

``python -m autosplit.planners.warming`` compiles those of the planner ahead of time. Else their first call compiles and says so.
"""

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, cast

# numba reads ``.numba_config.yaml`` in the current folder. A cache that it names there would be unpickled, so it could run code.
os.environ.setdefault("NUMBA_CACHE_DIR", "")
os.environ.setdefault("NUMBA_CACHE_LOCATOR_CLASSES", "")

import numba
import numpy as np
from numba.core import event, types

from autosplit.compat.numbacache import stamp_cache
from autosplit.errors import is_interrupt
from autosplit.files import cache_folder
from autosplit.opening import opened_folder

Function = TypeVar("Function", bound=Callable[..., object])

PACKAGE = Path(__file__).parent

IMPORTED = re.compile(rb"from autosplit\.([\w.]+) import")
"""The name of a module that another one imports, below the package."""

NUM_VERSIONS = 24
"""Folders of machine code that are kept, three for each version of the sources, 5 MB at most; others were not used for longer."""

whole = cast(Callable[[int], int], np.int64)
"""Wraps integer arguments of compiled functions: numba compiles a function once more for a literal."""


def compiled(function: Function) -> Function:
    """Compile a function on its first call, or load it from the cache. It releases the interpreter lock.

    The function must not allocate: without numba's reference counting it compiles several times faster and runs twice as fast.
    """
    return _cached(function, _nrt=False)


def allocating(function: Function) -> Function:
    """Like ``compiled``, for a function that allocates arrays."""
    return _cached(function)


def summing(signature: str) -> Callable[[Function], Function]:
    """Like ``compiled``, at once and for these types, for sums of floats in any order, which run several times as fast.

    NaN and infinity keep their meaning, and a division by zero gives them.
    """

    def compile_now(function: Function) -> Function:
        found: Any = _cached(function, _nrt=False, fastmath={"reassoc", "contract"}, error_model="numpy")
        found.compile(signature)
        found.disable_compile()
        return cast(Function, found)

    return compile_now


def inner(function: Function) -> Function:
    """Like ``compiled``, for a function that only compiled code calls: without a wrapper it compiles in half the time."""
    return _cached(function, _nrt=False, no_cpython_wrapper=True)


def inlined(function: Function) -> Function:
    """Put the body of a function into compiled code that calls it: so it may return part of an array, which ``inner`` may not."""
    return _cached(function, _nrt=False, no_cpython_wrapper=True, inline="always")


_types: Any = types  # numba has no types for the checker
intrinsic: Any = numba.extending.intrinsic
"""Makes a function that gives machine code one that compiled code calls."""


@intrinsic  # type: ignore[untyped-decorator]
def floats_at(_: Any, address: Any) -> Any:
    """In compiled code: the pointer to the float32 at an address."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return _types.CPointer(_types.float32)(_types.int64), code


@intrinsic  # type: ignore[untyped-decorator]
def ints_at(_: Any, address: Any) -> Any:
    """In compiled code: the pointer to the int64 at an address."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return _types.CPointer(_types.int64)(_types.int64), code


@intrinsic  # type: ignore[untyped-decorator]
def from_bits(_: Any, bits: Any) -> Any:
    """In compiled code: the float32 with the bits of an int32."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(_types.float32))

    return _types.float32(_types.int32), code


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt for Ctrl-C during compiled code.

    Numba notices the signal while it converts its result to a Python array and returns the array all the same. Python then
    raises a SystemError, or a chain of them where the result has several arrays.
    """
    try:
        yield
    except SystemError as failure:
        if is_interrupt(failure):
            raise KeyboardInterrupt from None
        raise


def _cached(function: Function, **options: Any) -> Function:
    dispatcher: Any = numba.njit(cache=True, nogil=True, no_cfunc_wrapper=True, **options)(function)
    stamp = source_stamp(PACKAGE / Path(dispatcher.py_func.__code__.co_filename).relative_to(PACKAGE).parts[0])
    stamp_cache(dispatcher, stamp, code_folder(stamp))
    return cast(Function, dispatcher)


@cache
def source_stamp(folder: Path) -> str:
    """A digest of the compiled modules of a folder, of those elsewhere that they import, and of this one.

    Where it changes, the machine code of all functions of the folder is made anew: numba puts what they call into it.
    """
    found, waiting = dict[Path, bytes](), [Path(__file__), *folder.rglob("*.py")]
    while waiting:
        path = waiting.pop()
        source = path.read_bytes() if path not in found and path.is_file() else b""
        if b"autosplit.jit import" in source or path == Path(__file__):
            found.setdefault(path, source)
            waiting += [PACKAGE / f"{name.decode().replace('.', '/')}.py" for name in IMPORTED.findall(source)]
    return sha256(b"".join(found[path] for path in sorted(found))).hexdigest()


@cache
def code_folder(stamp: str) -> Path | None:
    """The user's folder for machine code of the sources with this stamp; None, so that numba chooses, if it cannot be used."""
    try:
        folder = cache_folder() / "numba" / stamp[:16]
        with opened_folder(folder, cache_folder(), make=True):
            folder.parent.chmod(0o700)  # numba unpickles what lies there
        os.utime(folder)
        others = sorted(folder.parent.iterdir(), key=lambda path: -path.stat().st_mtime)[NUM_VERSIONS:]
    except (OSError, RuntimeError):  # the user has no home, or may not write there
        return None
    for path in others:
        shutil.rmtree(path, ignore_errors=True)
    return folder if os.access(folder, os.W_OK) else None


class _Notice(event.Listener):  # type: ignore[misc]
    """Logs once in a process that the planner's inner loops are compiled; a worker's take a few seconds and are none of these."""

    def on_start(self, event: Any) -> None:
        if event.data["dispatcher"].py_func.__module__.startswith("autosplit.planners."):
            _say_once()

    def on_end(self, event: Any) -> None:
        pass


@cache
def _say_once() -> None:
    logging.getLogger(__name__).warning(
        "compiling the planner's inner loops, once for each version of autosplit; this takes about a minute or less"
    )


event.register("numba:compile", _Notice())
