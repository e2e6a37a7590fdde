"""The operators that a graph from a file may call without trust in the maker of the file.

Many kernels of torch trust their arguments: ``segment_reduce`` its lengths, ``_to_dense`` the indices of a sparse tensor,
``_fft_r2c`` its dimensions. Such a call reads or writes memory of other tensors. So the operators are listed: those that traced
models use, and their siblings. ``tests/tracing/test_operators.py`` calls each of them with hostile arguments.

Of torch's own tags only ``pointwise`` is evidence: ``TensorIterator`` broadcasts the shapes of a pointwise operator before its
kernel runs, and the kernel reads no positions out of a tensor. ``core`` says only that each backend must have the operator:
``_fft_c2r`` is a core operator, and crashes the process if its tensor lacks the dimension that is asked for.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import fx

from autosplit.compat.torchparts import OpOverload, custom_source, schema_of
from autosplit.errors import PlanError, raise_faults
from autosplit.tracing.tensorspec import is_plain

ELEMENTWISE = """
    __and__ __or__ absolute divide floor_divide greater greater_equal hardswish less less_equal log_sigmoid multiply negative
    not_equal rsub subtract
"""
"""Pointwise operators, or other names of such, without torch's tag ``pointwise``."""

VIEWS = """
    _unsafe_view alias chunk detach diagonal expand expand_as flatten moveaxis movedim narrow permute real reshape
    reshape_as select slice split split_with_sizes squeeze swapaxes t transpose unbind unflatten unfold unsqueeze view
    view_as view_as_complex view_as_real
"""
"""Operators that name a part of a tensor by dimension, start and length, which torch compares with its shape. ``_unsafe_view`` is
unsafe for autograd only. ``as_strided`` is left out, since it reaches all memory of the tensor's storage."""

NEW = """
    arange eye full full_like linspace new_full new_ones new_zeros ones ones_like scalar_tensor zeros zeros_like
"""
"""Operators that fill the tensor that they make. ``empty`` and its siblings are left out: they show memory of earlier use."""

COPIES = """
    _to_copy cat clone concat concatenate constant_pad_nd contiguous copy diff fill flip hstack meshgrid outer pad
    reflection_pad1d reflection_pad2d reflection_pad3d repeat repeat_interleave.self_int replication_pad1d replication_pad2d
    replication_pad3d roll rot90 stack tile to tril triu type_as vstack
"""
"""Operators that copy whole tensors to places that follow from shapes alone; shapes are checked before the answer gets memory."""

INDICES = """
    argsort embedding gather index index_add index_fill index_put index_select masked_fill masked_scatter one_hot scatter
    scatter_add scatter_reduce select_scatter slice_scatter sort take_along_dim topk where
"""
"""Operators whose kernels compare each index with the dimension before they read or write there."""

REDUCTIONS = """
    _log_softmax _softmax all amax amin any argmax argmin cummax cummin cumprod cumsum histc linalg_vector_norm log_softmax
    logcumsumexp logsumexp max mean min norm prod softmax std std_mean sum var var_mean
"""
"""Operators that reduce given dimensions, which torch checks and wraps."""

PRODUCTS = """
    addmm baddbmm bmm cdist conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution
    cosine_similarity dot einsum linear matmul mm mv scaled_dot_product_attention
"""
"""Products whose sizes torch compares before it calls a library that trusts them."""

LAYERS = """
    _adaptive_avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d avg_pool1d avg_pool2d avg_pool3d batch_norm channel_shuffle
    glu grid_sampler grid_sampler_2d grid_sampler_3d group_norm gru.input layer_norm max_pool2d max_pool2d_with_indices
    max_pool3d native_group_norm native_layer_norm pixel_shuffle pixel_unshuffle prelu rms_norm upsample_bicubic2d
    upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
"""
"""Layers that compute positions from checked sizes, and cut them off at the border. Left out are ``max_pool1d``, ``col2im``,
``im2col`` and ``adaptive_avg_pool3d``, which loop over any window, and ``_weight_norm`` and ``lstm``, which trust the sizes of
their weights."""

ALLOWED = frozenset(" ".join((ELEMENTWISE, VIEWS, NEW, COPIES, INDICES, REDUCTIONS, PRODUCTS, LAYERS)).split())
"""Names in the namespace ``aten``; a name with an overload allows that overload alone."""

QUANTISED = frozenset(
    f"{verb}_per_{what}" for verb in ("quantize", "dequantize") for what in ("tensor", "channel", "token")
) | frozenset(["choose_qparams", "choose_qparams_symmetric"])
"""Names in the namespace ``quantized_decomposed``: functions in Python over operators of torch that check their arguments."""

ATEN = torch.ops.aten
TYPES = ("ScalarType", "Layout", "MemoryFormat")
PLAIN = ("Tensor", "number", "int", "SymInt", "float", "bool", "complex", "str", "Device", "Generator", *TYPES)
"""Types of arguments that are plain values. No file can hold a generator."""

OPEN_END = 2**63 - 1
"""The end of a slice without one."""

MOST_SIZE = 2**31 - 1
"""Largest integer argument otherwise: kernels add and multiply them without a check for overflow."""

READING = "a file calls operators that run only if you trust its maker; give trust=True (--trust) if you do"
WRITING = (
    "it calls operators that run only for people who trust the maker of the file; give trust=True (--trust) here to write it "
    "nevertheless, and there to open it"
)


def allowed_graph(graph: fx.Graph, subject: str = READING) -> fx.Graph:
    """A copy of a graph that may run without trust in its maker; its values have the same bits.

    Two operators give way to others that check: ``_native_batch_norm_legit_no_training`` trusts the sizes of its parameters, and
    ``empty_like`` shows memory that was used before.
    Raises: PlanError: it calls operators that need trust; the message begins with ``subject`` and names all of them.
    """
    copy = deepcopy(graph)
    for node in copy.nodes:
        picks = [*node.users]
        first_alone = all(pick.target is operator.getitem and pick.args[1:] == (0,) for pick in picks)
        if node.target is ATEN.empty_like.default:
            node.target = ATEN.zeros_like.default
        elif node.target is ATEN._native_batch_norm_legit_no_training.default and first_alone:
            node.target, (*tensors, momentum, eps) = ATEN.batch_norm.default, node.args
            node.args = (*tensors, False, momentum, eps, False)
            for pick in picks:
                pick.replace_all_uses_with(node)
                copy.erase_node(pick)
    raise_faults(PlanError, subject, list(_faults(copy)))
    return copy


def _faults(graph: fx.Graph) -> Iterator[str]:
    for node in graph.nodes:
        if isinstance(node.target, OpOverload):
            fault = operator_fault(node.target) or argument_fault(node.target, node.args, node.kwargs)
            if fault:
                yield f"op '{node.name}': operator '{node.target}' is not allowed: {fault}"


def operator_fault(operator_: OpOverload) -> str | None:
    """The reason why a graph may not call this operator without trust, or None.

    A custom operator is allowed if it returns tensors and writes to none: it is the user's code, which this process has imported.
    """
    schema = schema_of(operator_)
    if schema.is_mutable or torch.Tag.inplace_view in operator_.tags:
        return "it writes to its arguments"
    if not schema.returns or not all(_is_made_of(result.type, ("Tensor",)) for result in schema.returns):
        return "it returns something other than tensors"
    if defined_in(operator_):
        return None
    if not _is_listed(operator_):
        return "it is not known to check its arguments"
    strange = [argument.name for argument in schema.arguments if not _is_made_of(argument.real_type, PLAIN)]
    return f"its argument '{strange[0]}' is not a plain value" if strange else None


def _is_listed(operator_: OpOverload) -> bool:
    namespace, _, name = schema_of(operator_).name.partition("::")
    if namespace == "quantized_decomposed":
        return name in QUANTISED
    tagged = namespace in ("aten", "prims") and torch.Tag.pointwise in operator_.tags and "polynomial" not in name  # one loops
    return tagged or (namespace == "aten" and not ALLOWED.isdisjoint((name, f"{name}.{schema_of(operator_).overload_name}")))


def argument_fault(operator_: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """The reason why a graph may not call an allowed operator with these arguments without trust, or None.

    Kernels take a tensor without memory (``meta``), of a sparse layout or of quantised numbers for a dense one. An integer in
    place of a dtype is not checked. Sums of sizes near 2^63 wrap round: ``reflection_pad1d`` by -2^63 ended the process.
    """
    types = {argument.name: argument.real_type for argument in schema_of(operator_).arguments}
    given = [*zip(types, args, strict=False), *kwargs.items()]
    for name, value in given:
        if name == "training" and value is not False:
            return "'training' is not False, and then it writes to its statistics"
        if isinstance(value, torch.device) and value.type != "cpu":
            return f"'{name}' is device '{value}', and a stage's graph is written for 'cpu'"
        if isinstance(value, torch.layout) and value is not torch.strided:
            return f"'{name}' is {value}, and only dense tensors are allowed"
        if isinstance(value, torch.dtype) and not is_plain(value):
            return f"'{name}' is {value}, whose numbers are quantised or packed"
        if isinstance(value, int | str) and any(kind in str(types.get(name)) for kind in (*TYPES, "Device")):
            return f"'{name}' is {value!r:.40}, and a dtype, a layout or a device is expected"
        if "number" not in str(types.get(name)):
            sizes = [size for size in (value if isinstance(value, list | tuple) else [value]) if isinstance(size, int)]
            large = [size for size in sizes if abs(size) > MOST_SIZE and (name, size) != ("end", OPEN_END)]
            if large:
                return f"'{name}' holds {large[0]}, and sizes of at most {MOST_SIZE} are allowed"
    return None


def defined_in(operator_: OpOverload) -> str:
    """The file that defines a custom operator, or '' for an operator of torch."""
    file = custom_source(operator_)
    return "" if file is None or Path(file).is_relative_to(Path(torch.__file__).parent) else file


def _is_made_of(kind: Any, names: Sequence[str]) -> bool:
    """Whether a type of a schema is one of ``names``, or a list, an optional or a tuple of such types."""
    if kind.kind() in ("ListType", "OptionalType", "TupleType"):
        return all(_is_made_of(part, names) for part in kind.containedTypes())
    return str(kind) in names
