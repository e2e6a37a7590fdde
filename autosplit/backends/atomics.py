"""Atomic operations on int64 and calls of the C library, in compiled code: for threads that share memory without a lock."""

import platform
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from autosplit.backends.rowtiles import INT, SHORT, ints, nothing
from autosplit.jit import intrinsic

_types: Any = types  # numba has no types for the checker
PAUSES = {"x86_64": ("llvm.x86.sse2.pause", []), "aarch64": ("llvm.aarch64.hint", [SHORT(1)])}
"""The instruction by which a thread that waits leaves the core to the other one of a pair, and its arguments."""


def _int_at(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, INT.as_pointer())


@intrinsic  # type: ignore[untyped-decorator]
def atomic_load(_: Any, address: Any) -> Any:
    """In compiled code: the int64 at an address, and what its writer wrote before."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_int_at(builder, arguments[0]), "acquire", 8)

    return ints(ints), code


@intrinsic  # type: ignore[untyped-decorator]
def atomic_store(_: Any, address: Any, value: Any) -> Any:
    """In compiled code: write an int64 after all that was written before."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _int_at(builder, arguments[0]), "release", 8)
        return context.get_dummy_value()

    return nothing(ints, ints), code


@intrinsic  # type: ignore[untyped-decorator]
def atomic_add(_: Any, address: Any, value: Any) -> Any:
    """In compiled code: add to the int64 at an address, and return what it was."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", _int_at(builder, arguments[0]), arguments[1], "acq_rel")

    return ints(ints, ints), code


@intrinsic  # type: ignore[untyped-decorator]
def atomic_swap(_: Any, address: Any, old: Any, new: Any) -> Any:
    """In compiled code: replace the int64 at an address if it is ``old``; whether it was."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        found = builder.cmpxchg(_int_at(builder, arguments[0]), *arguments[1:], "acq_rel", "acquire")
        return builder.extract_value(found, 1)

    return _types.boolean(ints, ints, ints), code


@intrinsic  # type: ignore[untyped-decorator]
def pause(_: Any) -> Any:
    """In compiled code: wait some ten nanoseconds."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if platform.machine() in PAUSES:
            name, numbers = PAUSES[platform.machine()]
            type_ = ir.FunctionType(ir.VoidType(), [one.type for one in numbers])
            builder.call(cgutils.get_or_insert_function(builder.module, type_, name), numbers)
        return context.get_dummy_value()

    return nothing(), code


@intrinsic  # type: ignore[untyped-decorator]
def yield_core(_: Any) -> Any:
    """In compiled code: let another thread of this core run."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(SHORT, []), "sched_yield"), [])
        return context.get_dummy_value()

    return nothing(), code


@intrinsic  # type: ignore[untyped-decorator]
def sleep(_: Any, time_us: Any) -> Any:
    """In compiled code: sleep for so many microseconds."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(SHORT, [SHORT]), "usleep")
        builder.call(function, [builder.trunc(arguments[0], SHORT)])
        return context.get_dummy_value()

    return nothing(ints), code


def _transfer(name: str) -> Any:
    """In compiled code: ``read`` or ``write`` bytes of a file at an address; their number, or less than 0."""

    @intrinsic  # type: ignore[untyped-decorator]
    def call(_: Any, descriptor: Any, address: Any, count: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(INT, [SHORT, INT, INT]), name)
            return builder.call(function, [builder.trunc(arguments[0], SHORT), *arguments[1:]])

        return ints(ints, ints, ints), code

    return call


read_bytes, write_bytes = _transfer("read"), _transfer("write")
