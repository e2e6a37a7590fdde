"""Refuse the ops of a model that a backend computes otherwise than eager, with the values that show it (see ``faultstore``)."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from autosplit.backends.base import named_backend
from autosplit.backends.faultstore import known_faults
from autosplit.backends.hardvalues import SMALL, Values
from autosplit.backends.onnxfile import ELEMENT_TYPES
from autosplit.backends.opcases import Case, case_of
from autosplit.backends.trials import REFUSED
from autosplit.backends.trying import attended
from autosplit.compat.torchparts import OpOverload
from autosplit.errors import BackendError, refusals
from autosplit.tracing.capturing import Traced
from autosplit.tracing.flattening import is_op
from autosplit.tracing.indexlimits import base_name, divisor, index_limits
from autosplit.tracing.programs import states_of
from autosplit.tracing.valueranges import INT32, Assumed, Range, full, shape_of, values_of
from autosplit.tracing.zerosigns import observed_zeros
from autosplit.values.plan import Plan
from autosplit.values.samples import FROM_ONNX

WRONG = "computes otherwise"
"""The start of the reason for which an op is refused here."""

SIGNED = ", and the sign of its zeros counts"
"""The end of the keys of cases in which it does: other cases may have been tried before it was compared."""

STATE = "it writes to a state, which its runtime may copy"

_CASES = "autosplit_cases"
"""Attribute of a graph that keeps its cases, as ``valueranges`` keeps ranges."""

UNFILLED = ("empty_like", "new_empty", "new_empty_strided")
"""Operators whose results hold whatever was in memory."""

WORDS: Mapping[Values, str] = {
    "finite": "finite values",
    "signed": "zeros whose sign another op observes",
    "large": "integers beyond 24 bits",
    "masked": "rows that are masked whole or in part",
    "nonfinite": "NaN or infinity",
    "wide": "integers that leave 32 bits or wrap round",
    "outside": "an index beyond a table or a divisor of 0",
}


def refused(traced: Traced, backend: str) -> dict[str, str]:
    """Op name to the reason, for each op whose values a backend cannot pass or computes otherwise.

    The values are those that the op may get (``Source.values``). Unknown cases are tried, which takes seconds.
    """
    if backend == "eager":
        return {}
    found = _impassable(traced, backend)
    if named_backend(backend).missing():
        return found
    needed = needed_cases(traced, backend)
    known = known_faults(backend, {case.key: case for _, case, _ in needed})
    for name, case, kinds in needed:
        told = known.get(case.key, {})
        if REFUSED in told:
            found.setdefault(name, told[REFUSED])
        elif backend in traced.source.trusted or name in found:
            continue
        elif kind := next((kind for kind in kinds if kind in told), None):
            found[name] = f"{WRONG}, on {WORDS[kind]}: {told[kind]}"
    return found


def require_right(traced: Traced, plan: Plan) -> None:
    """Raise BackendError for a stage with an op that its backend computes otherwise than eager, or cannot pass the values of."""
    for stage in plan.stages:
        known = refused(traced, stage.backend)
        if found := {op: known[op] for op in stage.ops if op in known}:
            raise BackendError(
                f"backend '{stage.backend}' must not run {refusals(found)} of stage '{stage.name}'; plan anew, or trace the "
                f"model with trust_backends=['{stage.backend}'] (--trust-backend)",
                found,
            )


def _impassable(traced: Traced, backend: str) -> dict[str, str]:
    """Op name to the reason for each op that reads or makes a value that the backend cannot exchange, or writes to a state.

    Runtimes of ONNX files run ops with a state in torch (see ``pieces``). The others take torch's own tensors.
    """
    if not keeps_states(backend):
        return {node.name: STATE for node in traced.program.graph.nodes if states_of(node)}
    strange = {name: spec.dtype for name, spec in traced.specs.items() if spec.torch_dtype not in ELEMENT_TYPES}
    touched = {op.name: next((value for value in (*op.inputs, *op.outputs) if value in strange), "") for op in traced.graph.ops}
    return {op: f"'{value}' is {strange[value]}, which it cannot pass" for op, value in touched.items() if value}


def keeps_states(backend: str) -> bool:
    """Whether a backend leaves ops that write to a state to torch, in whose memory it is."""
    return backend in ("eager", *FROM_ONNX)


def needed_cases(traced: Traced, backend: str) -> list[tuple[str, Case, list[Values]]]:
    """Each op that can be tried alone: its name, its case, and the kinds of values that it may get on a backend."""
    assumed: Assumed = "any" if traced.source.values == "any" else named_backend(backend).assumed
    known = values_of(traced.program, assumed)
    held = vars(traced.program.graph)
    if _CASES not in held:
        nodes = [node for node in known if is_op(node) and node.all_input_nodes and base_name(node) not in UNFILLED]
        nodes = [node for node in nodes if not states_of(node)]
        cases = [(node, case_of(node)) for node in nodes if isinstance(node.target, OpOverload)]
        held[_CASES] = [(node, case) for node, case in cases if case is not None]
    varying: list[tuple[fx.Node, Case]] = [
        (node, case) for node, case in held[_CASES] if not known[node].fixed
    ]  # a run checks all others
    signed = observed_zeros(traced.program.graph)
    named = [(node, replace(case, key=case.key + SIGNED) if node in signed else case) for node, case in varying]
    return [(node.name, case, _kinds(node, known, node in signed)) for node, case in named]


def _kinds(node: fx.Node, known: Mapping[fx.Node, Range], signed: bool) -> list[Values]:
    """The kinds of values that an op may get or make, and that count."""
    sources = [known[source] for source in node.all_input_nodes]
    worst = 2 if any(known[one].strange for one in attended(node)) else max(one.strange for one in sources)
    kinds: list[Values] = ["finite", *(["masked"] if worst else []), *(["nonfinite"] if worst == 2 else [])]  # type: ignore[list-item]
    sizes = [_size(one, known[one]) for one in (*node.all_input_nodes, node)]
    kinds += [*(["large"] if {"large", "wide"} & set(sizes) else []), *(["wide"] if "wide" in sizes else [])]  # type: ignore[list-item]
    by = divisor(node)
    zero = by is not None and not by.meta["val"].dtype.is_floating_point and known[by].low <= 0 <= known[by].high
    if zero or any(not known[index].within(limits) for index, limits in index_limits(node, shape_of).items()):
        kinds.append("outside")
    return [*kinds, "signed"] if signed else kinds


def _size(node: fx.Node, found: Range) -> Values:
    """The kind of values that the range of an integer needs; 'finite' for floats."""
    value = node.meta["val"]
    dtype = (value[0] if isinstance(value, list | tuple) else value).dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool or found.within((-SMALL, SMALL)):
        return "finite"
    most = full(dtype)
    return "large" if found.within((max(most.low, INT32.min), min(most.high, INT32.max))) else "wide"
