"""Call every listed operator with hostile arguments, in a worker process.

One valid call of each operator is changed at one to three places: a size, an index, a shape or a dtype. Inputs end where memory
without access begins, so that a kernel that reads past one of them ends the process. Tensors of known bytes lie beside the
outputs, and show a write past one. A file names the call before it is made.
"""

import ctypes
import mmap
import os
import random
import resource
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # registers quantized_decomposed
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from autosplit.devices import forking
from autosplit.tracing.operators import argument_fault, operator_fault

PAGE, GUARD_BYTES, ROOM_BYTES = mmap.PAGESIZE, 1 << 20, 64 << 20
SIZES = (
    0, 1, -1, 2, 3, -3, 7, 64, 1000, -1000, 2**15, 2**31 - 1, -(2**31), 2**31, 2**32 + 1, 2**40, 2**61, 2**62 - 1, 2**63 - 1,
    -(2**63),
)  # fmt: skip
NUMBERS = (0.0, -1.0, 1e30, float("nan"), float("inf"), -float("inf"), 1e-30, 1e18)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64)
KNOWN = 0x5A


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def i(*shape: int) -> torch.Tensor:
    return torch.randint(0, 2, shape)


def b(*shape: int) -> torch.Tensor:
    return torch.randint(0, 2, shape).bool()


CALLS: dict[str, tuple[Any, ...]] = {
    # elementwise
    "__and__.Tensor": (b(3, 4), b(4)),
    "__or__.Tensor": (b(3, 4), b(4)),
    "absolute": (f(3, 4),),
    "divide.Tensor": (f(3, 4), f(4)),
    "floor_divide": (f(3, 4), f(4)),
    "greater.Tensor": (f(3, 4), f(4)),
    "greater_equal.Tensor": (f(3, 4), f(4)),
    "hardswish": (f(3, 4),),
    "less.Tensor": (f(3, 4), f(4)),
    "less_equal.Tensor": (f(3, 4), f(4)),
    "log_sigmoid": (f(3, 4),),
    "multiply.Tensor": (f(3, 4), f(4)),
    "negative": (f(3, 4),),
    "not_equal.Tensor": (f(3, 4), f(4)),
    "rsub.Tensor": (f(3, 4), f(4)),
    "subtract.Tensor": (f(3, 4), f(4)),
    # views
    "_unsafe_view": (f(2, 6), [3, 4]),
    "alias": (f(3),),
    "chunk": (f(6, 2), 3, 0),
    "detach": (f(3),),
    "diagonal": (f(4, 5), 1, 0, 1),
    "expand": (f(3, 1), [2, 3, 4]),
    "expand_as": (f(3, 1), f(3, 4)),
    "flatten.using_ints": (f(2, 3, 4), 1, 2),
    "movedim.int": (f(2, 3, 4), 0, 2),
    "moveaxis.int": (f(2, 3, 4), 0, 2),
    "narrow": (f(5, 3), 0, 1, 2),
    "permute": (f(2, 3, 4), [2, 0, 1]),
    "real": (torch.randn(3, dtype=torch.complex64),),
    "reshape": (f(2, 6), [3, -1]),
    "reshape_as": (f(2, 6), f(3, 4)),
    "select.int": (f(4, 3), 0, 2),
    "slice.Tensor": (f(8, 2), 0, 1, 7, 2),
    "split.Tensor": (f(7, 2), 3, 0),
    "split_with_sizes": (f(7, 2), [3, 4], 0),
    "squeeze.dims": (f(1, 3, 1), [0, 2]),
    "swapaxes": (f(2, 3), 0, 1),
    "t": (f(2, 3),),
    "transpose.int": (f(2, 3, 4), 0, 2),
    "unbind.int": (f(3, 2), 0),
    "unflatten.int": (f(6, 2), 0, [2, 3]),
    "unfold": (f(8, 2), 0, 3, 2),
    "unsqueeze": (f(3), 1),
    "view": (f(2, 6), [3, 4]),
    "view_as": (f(2, 6), f(3, 4)),
    "view_as_complex": (f(3, 2),),
    "view_as_real": (torch.randn(3, dtype=torch.complex64),),
    # new tensors
    "arange.start_step": (0, 9, 2),
    "eye": (4,),
    "full": ([2, 3], 1.0),
    "full_like": (f(2, 3), 2),
    "linspace": (0, 1, 5),
    "new_full": (f(2), [3, 2], 1.0),
    "new_ones": (f(2), [3, 2]),
    "new_zeros": (f(2), [3, 2]),
    "ones": ([2, 3],),
    "ones_like": (f(2, 3),),
    "scalar_tensor": (3,),
    "zeros": ([2, 3],),
    "zeros_like": (f(2, 3),),
    # copies
    "_to_copy": (f(2, 3),),
    "cat": ([f(2, 3), f(4, 3)], 0),
    "clone": (f(2, 3),),
    "concat": ([f(2, 3), f(4, 3)], 0),
    "concatenate": ([f(2, 3), f(4, 3)], 0),
    "constant_pad_nd": (f(2, 3), [1, 2, 0, 1], 0.5),
    "contiguous": (f(2, 3),),
    "copy": (f(2, 3), f(2, 3)),
    "diff": (f(5, 2), 1, 0),
    "fill.Scalar": (f(3), 2),
    "flip": (f(2, 3), [0, 1]),
    "hstack": ([f(2), f(3)],),
    "meshgrid": ([f(2), f(3)],),
    "outer": (f(2), f(3)),
    "pad": (f(1, 2, 4), [1, 2], "reflect", None),
    "reflection_pad1d": (f(2, 5), [2, 1]),
    "reflection_pad2d": (f(2, 5, 5), [2, 1, 1, 1]),
    "reflection_pad3d": (f(1, 3, 3, 3), [1, 1, 1, 1, 1, 1]),
    "repeat": (f(2, 3), [2, 1, 2]),
    "repeat_interleave.self_int": (f(2, 3), 2, 0),
    "replication_pad1d": (f(2, 5), [2, 1]),
    "replication_pad2d": (f(2, 5, 5), [2, 1, 1, 1]),
    "replication_pad3d": (f(1, 3, 3, 3), [1, 1, 1, 1, 1, 1]),
    "roll": (f(4, 3), [1, 2], [0, 1]),
    "rot90": (f(3, 4), 1, [0, 1]),
    "stack": ([f(2, 3), f(2, 3)], 1),
    "tile": (f(2, 3), [2, 2]),
    "to.dtype": (f(2, 3), torch.float64),
    "tril": (f(4, 5), 1),
    "triu": (f(4, 5), -1),
    "type_as": (f(3), i(3)),
    "vstack": ([f(2), f(2)],),
    # indices
    "argsort": (f(4, 3), 0),
    "embedding": (f(5, 3), i(2, 4)),
    "gather": (f(4, 3), 0, i(2, 3)),
    "index.Tensor": (f(4, 3), [i(5), i(5)]),
    "index_add": (f(4, 3), 0, i(5), f(5, 3)),
    "index_fill.int_Scalar": (f(4, 3), 0, i(5), 2.0),
    "index_put": (f(4, 3), [i(5), i(5)], f(5), True),
    "index_select": (f(4, 3), 0, i(5)),
    "masked_fill.Scalar": (f(4, 3), b(4, 3), 1.0),
    "masked_scatter": (f(4, 3), b(4, 3), f(12)),
    "one_hot": (i(4), 3),
    "scatter.src": (f(4, 3), 0, i(2, 3), f(2, 3)),
    "scatter_add": (f(4, 3), 0, i(2, 3), f(2, 3)),
    "scatter_reduce.two": (f(4, 3), 0, i(2, 3), f(2, 3), "amax"),
    "select_scatter": (f(4, 3), f(3), 0, 2),
    "slice_scatter": (f(8, 2), f(3, 2), 0, 1, 7, 2),
    "sort": (f(4, 3), 0),
    "take_along_dim": (f(4, 3), i(2, 3), 0),
    "topk": (f(4, 3), 2, 0),
    "where.self": (b(4, 3), f(4, 3), f(3)),
    # reductions
    "_log_softmax": (f(4, 3), 1, False),
    "_softmax": (f(4, 3), 1, False),
    "all.dim": (b(4, 3), 0),
    "amax": (f(4, 3), [0, 1]),
    "amin": (f(4, 3), [0]),
    "any.dim": (b(4, 3), 0),
    "argmax": (f(4, 3), 0),
    "argmin": (f(4, 3), 0),
    "cummax": (f(4, 3), 0),
    "cummin": (f(4, 3), 0),
    "cumprod": (f(4, 3), 0),
    "cumsum": (f(4, 3), 0),
    "histc": (f(9), 4, -1, 1),
    "linalg_vector_norm": (f(4, 3), 2, [0]),
    "log_softmax.int": (f(4, 3), 1),
    "logcumsumexp": (f(4, 3), 0),
    "logsumexp": (f(4, 3), [0]),
    "max.dim": (f(4, 3), 0),
    "mean.dim": (f(4, 3), [0, 1]),
    "min.dim": (f(4, 3), 0),
    "norm.ScalarOpt_dim": (f(4, 3), 2, [0]),
    "prod.dim_int": (f(4, 3), 0),
    "softmax.int": (f(4, 3), 1),
    "std.correction": (f(4, 3), [0]),
    "std_mean.correction": (f(4, 3), [0]),
    "sum.dim_IntList": (f(4, 3), [0, 1]),
    "var.correction": (f(4, 3), [0]),
    "var_mean.correction": (f(4, 3), [0]),
    # products
    "addmm": (f(4), f(2, 3), f(3, 4)),
    "baddbmm": (f(2, 3, 5), f(2, 3, 4), f(2, 4, 5)),
    "bmm": (f(2, 3, 4), f(2, 4, 5)),
    "cdist": (f(3, 4), f(5, 4), 2.0),
    "conv1d": (f(1, 4, 9), f(6, 2, 3), f(6), [1], [1], [1], 2),
    "conv2d": (f(1, 4, 9, 9), f(6, 2, 3, 3), f(6), [1, 1], [1, 1], [1, 1], 2),
    "conv3d": (f(1, 2, 5, 5, 5), f(4, 2, 3, 3, 3), f(4), [1, 1, 1], [1, 1, 1], [1, 1, 1], 1),
    "conv_transpose1d": (f(1, 4, 9), f(4, 3, 3), f(6), [2], [1], [1], 2, [1]),
    "conv_transpose2d.input": (f(1, 4, 5, 5), f(4, 3, 3, 3), f(6), [2, 2], [1, 1], [1, 1], 2, [1, 1]),
    "conv_transpose3d.input": (f(1, 2, 4, 4, 4), f(2, 3, 2, 2, 2), f(3), [2, 2, 2], [0, 0, 0], [0, 0, 0], 1, [1, 1, 1]),
    "convolution": (f(1, 4, 9, 9), f(6, 2, 3, 3), f(6), [1, 1], [1, 1], [1, 1], False, [0, 0], 2),
    "cosine_similarity": (f(4, 3), f(4, 3), 1),
    "dot": (f(4), f(4)),
    "einsum": ("ij,jk->ik", [f(2, 3), f(3, 4)]),
    "linear": (f(2, 3), f(4, 3), f(4)),
    "matmul": (f(2, 3, 4), f(4, 5)),
    "mm": (f(2, 3), f(3, 4)),
    "mv": (f(2, 3), f(3)),
    "scaled_dot_product_attention": (f(2, 4, 5, 8), f(2, 4, 6, 8), f(2, 4, 6, 8), f(2, 1, 5, 6)),
    # layers
    "_adaptive_avg_pool2d": (f(2, 9, 9), [3, 3]),
    "_adaptive_avg_pool3d": (f(1, 2, 5, 5, 5), [2, 2, 2]),
    "batch_norm": (f(2, 3, 4), f(3), f(3), f(3), f(3).abs(), False, 0.1, 1e-5, False),
    "adaptive_avg_pool1d": (f(2, 9), [3]),
    "adaptive_avg_pool2d": (f(2, 9, 9), [3, 3]),
    "adaptive_avg_pool3d": (f(1, 2, 5, 5, 5), [2, 2, 2]),
    "avg_pool1d": (f(2, 9), [3], [2], [1]),
    "avg_pool2d": (f(2, 9, 9), [3, 3], [2, 2], [1, 1]),
    "avg_pool3d": (f(1, 6, 6, 6), [3, 3, 3], [2, 2, 2], [1, 1, 1]),
    "gru.input": (f(5, 2, 3), f(1, 2, 4), [f(12, 3), f(12, 4), f(12), f(12)], True, 1, 0.0, False, False, False),
    "channel_shuffle": (f(1, 6, 3, 3), 3),
    "glu": (f(4, 6), 1),
    "grid_sampler": (f(1, 2, 5, 5), f(1, 3, 3, 2), 0, 1, False),
    "grid_sampler_2d": (f(1, 2, 5, 5), f(1, 3, 3, 2), 0, 1, False),
    "grid_sampler_3d": (f(1, 2, 5, 5, 5), f(1, 3, 3, 3, 3), 0, 1, False),
    "group_norm": (f(2, 6, 5), 3, f(6), f(6)),
    "layer_norm": (f(2, 6), [6], f(6), f(6)),
    "max_pool2d": (f(2, 9, 9), [3, 3], [2, 2], [1, 1], [1, 1]),
    "max_pool2d_with_indices": (f(2, 9, 9), [3, 3], [2, 2], [1, 1], [2, 1]),
    "max_pool3d": (f(1, 6, 6, 6), [3, 3, 3], [2, 2, 2], [1, 1, 1], [1, 1, 1]),
    "native_group_norm": (f(2, 6, 5), f(6), f(6), 2, 6, 5, 3, 1e-5),
    "native_layer_norm": (f(2, 6), [6], f(6), f(6), 1e-5),
    "pixel_shuffle": (f(1, 8, 3, 3), 2),
    "pixel_unshuffle": (f(1, 2, 6, 6), 2),
    "prelu": (f(2, 3, 4), f(3)),
    "rms_norm": (f(2, 6), [6], f(6), 1e-5),
    "upsample_bicubic2d": (f(1, 2, 5, 5), [7, 8], False, 1.4, 1.6),
    "upsample_bilinear2d": (f(1, 2, 5, 5), [7, 8], False, 1.4, 1.6),
    "upsample_linear1d": (f(1, 2, 5), [7], False, 1.4),
    "upsample_nearest1d": (f(1, 2, 5), [7], 1.4),
    "upsample_nearest2d": (f(1, 2, 5, 5), [7, 8], 1.4, 1.6),
    "upsample_nearest3d": (f(1, 2, 3, 3, 3), [4, 5, 6], 1.4, 1.6, 2.0),
    "upsample_trilinear3d": (f(1, 2, 3, 3, 3), [4, 5, 6], False, 1.4, 1.6, 2.0),
    # numbers of 8 bits
    "quantized_decomposed.choose_qparams.tensor": (f(3, 4), -128, 127, 1e-5, torch.int8),
    "quantized_decomposed.choose_qparams_symmetric.tensor": (f(3, 4), -128, 127, 1e-5, torch.int8),
    "quantized_decomposed.dequantize_per_channel.default": (i(3, 4).to(torch.int8), f(3), i(3), 0, -128, 127, torch.int8),
    "quantized_decomposed.dequantize_per_tensor.default": (i(3, 4).to(torch.int8), 0.1, 0, -128, 127, torch.int8),
    "quantized_decomposed.dequantize_per_token.default": (
        i(3, 4).to(torch.int8),
        f(3, 1),
        i(3, 1),
        -128,
        127,
        torch.int8,
        torch.float32,
    ),
    "quantized_decomposed.quantize_per_channel.default": (f(3, 4), f(3), i(3), 0, -128, 127, torch.int8),
    "quantized_decomposed.quantize_per_tensor.default": (f(3, 4), 0.1, 0, -128, 127, torch.int8),
    "quantized_decomposed.quantize_per_token.default": (f(3, 4), f(3, 1), i(3, 1), -128, 127, torch.int8),
}
"""A valid call of each operator that is listed; those without a namespace are of ``aten``."""

EXAMPLES = {
    "Tensor": f(3, 4),
    "number": 1.5,
    "float": 0.5,
    "int": 2,
    "bool": False,
    "Optional[Tensor]": f(3, 4),
    "Optional[number]": 1.5,
    "ScalarType": torch.float64,
}


def sibling_calls() -> dict[str, tuple[Any, ...]]:
    """A call of each further overload that is allowed, with the arguments of the same names."""
    found = {}
    for name, call in CALLS.items():
        known = find(name)
        given = {argument.name: value for argument, value in zip(known._schema.arguments, call, strict=False)}
        packet = known.overloadpacket
        for other in (getattr(packet, overload) for overload in packet.overloads()):
            if other is not known and not operator_fault(other):
                arguments = [argument for argument in other._schema.arguments if not argument.kwarg_only]
                values = [given.get(argument.name, EXAMPLES.get(str(argument.real_type))) for argument in arguments]
                found[str(other)] = (call[0], *values[1:]) if values else ()
    return found


def pointwise_calls() -> dict[str, tuple[Any, ...]]:
    """A call of each operator that is allowed because torch says that it is pointwise."""
    found = {}
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, base = schema.name.partition("::")
        operator = getattr(getattr(getattr(torch.ops, namespace), base), schema.overload_name or "default", None)
        if isinstance(operator, torch._ops.OpOverload) and torch.Tag.pointwise in operator.tags and not operator_fault(operator):
            needed = [argument for argument in schema.arguments if not argument.has_default_value() and not argument.kwarg_only]
            found[str(operator)] = tuple(EXAMPLES[str(argument.real_type)] for argument in needed)
    return found


class Guarded:
    """Copies of tensors whose last byte is the last one before memory without access."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._mapped: list[tuple[int, int]] = []

    def copy(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.nbytes == 0:
            return value
        dense = value.contiguous()
        size = -(-dense.nbytes // PAGE) * PAGE
        start = self._libc.mmap(None, size + 2 * GUARD_BYTES, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if start == ctypes.c_size_t(-1).value:  # this call has used up its memory
            return value
        self._libc.mprotect(start + GUARD_BYTES, size, mmap.PROT_READ | mmap.PROT_WRITE)
        self._mapped.append((start, size + 2 * GUARD_BYTES))
        memory = (ctypes.c_char * dense.nbytes).from_address(start + GUARD_BYTES + size - dense.nbytes)
        return torch.frombuffer(memory, dtype=dense.dtype).view(dense.shape).copy_(dense)

    def release(self) -> None:
        while self._mapped:
            self._libc.munmap(*self._mapped.pop())


def changed(value: Any, chance: random.Random) -> Any:
    if isinstance(value, torch.Tensor):
        kind = chance.random()
        if value.dtype == torch.int64 and kind < 0.6:
            return _with_index(value, chance)
        if kind < 0.9:
            return _reshaped(value, chance)
        return value.to(chance.choice(DTYPES)) if not value.is_complex() else value
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return chance.choice(SIZES)
    if isinstance(value, float):
        return chance.choice(NUMBERS)
    return value


def _with_index(value: torch.Tensor, chance: random.Random) -> torch.Tensor:
    value = value.clone()
    flat = value.view(-1)
    everywhere = chance.random() < 0.5
    for place in range(len(flat)):
        if everywhere or chance.random() < 0.3:
            flat[place] = chance.choice(SIZES)
    return value


def _reshaped(value: torch.Tensor, chance: random.Random) -> torch.Tensor:
    shape = list(value.shape)
    place = chance.randrange(len(shape)) if shape else 0
    match chance.randrange(5):
        case 0 | 1 if shape:
            shape[place] = chance.choice((0, 1, 2, 3, 17))
        case 2 if shape:
            shape.pop(place)
        case 3:
            shape.insert(place, chance.choice((0, 1, 2, 3)))
        case _:
            shape = [chance.choice((0, 1, 3, 6)) for _ in range(chance.randrange(6))]
    return (
        torch.randn(shape).to(value.dtype)
        if value.is_floating_point() or value.is_complex()
        else torch.ones(shape).to(value.dtype)
    )


def find(name: str) -> Any:
    """The operator ``base``, ``base.overload`` (of aten) or ``namespace.base.overload``."""
    *namespace, base, overload = name.split(".") if "." in name else (name, "default")
    return getattr(getattr(getattr(torch.ops, namespace[0] if namespace else "aten"), base), overload)


def main(connection: Connection) -> None:
    """Receive the number of trials and a path; send "right" after the last trial."""
    num_trials, path = connection.recv()
    with forking.freed_memory_returned(), path.open("wb") as last:
        call_all(num_trials, last.fileno())
    connection.send("right")


def call_all(num_trials: int, last: int) -> None:
    """Make the calls, one after the other, each named at the start of the file ``last``."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    guarded = Guarded()
    known = [torch.full((size,), KNOWN, dtype=torch.uint8) for size in (64, 1024, 70_000, 1 << 20) for _ in range(4)]
    for name, call in CALLS.items():
        find(name)(*call)  # else each changed call were refused for the same reason
    calls = pointwise_calls() | sibling_calls() | CALLS
    for name, call in calls.items():
        operator = find(name)
        held_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
        resource.setrlimit(resource.RLIMIT_AS, (held_bytes + ROOM_BYTES, resource.RLIM_INFINITY))
        for trial in range(num_trials):
            chance = random.Random(f"{name} {trial}")
            leaves, tree = tree_flatten(call)
            for _ in range(chance.randint(1, 3)):
                place = chance.randrange(len(leaves))
                leaves[place] = changed(leaves[place], chance)
            if argument_fault(operator, tree_unflatten(leaves, tree), {}):
                continue
            shown = [f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else value for value in leaves]
            os.pwrite(last, f"{name} {shown}"[:400].ljust(400).encode(), 0)
            args = tree_map(guarded.copy, tree_unflatten(leaves, tree))
            try:
                with torch.inference_mode():
                    for made in tree_flatten(operator(*args))[0]:
                        if made.numel() < 1_000_000:
                            made.clone()
            except Exception:  # a refusal
                pass
            del args
            made = None
            guarded.release()
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert all(one.numpy().tobytes() == bytes([KNOWN]) * len(one) for one in known), f"{name} wrote into another tensor"
