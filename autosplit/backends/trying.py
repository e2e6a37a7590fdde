"""Try the ops of a probe program on hard values, and say where a backend computes something else than eager."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autosplit.backends.base import Runnable
from autosplit.backends.hardvalues import LARGE, NUM_DRAWS, SMALL, WIDE, Values, distinct, draw
from autosplit.backends.opcases import call
from autosplit.backends.probing import innermost
from autosplit.backends.translating import GROUPED
from autosplit.compat.torchparts import OpOverload, schema_of
from autosplit.tracing.differing import difference
from autosplit.tracing.flattening import is_op, is_pick, pick_index
from autosplit.tracing.indexlimits import Limits, base_name, divisor, index_limits
from autosplit.tracing.splitting import StageProgram
from autosplit.tracing.tensorspec import TensorSpec, laid_out, zeros
from autosplit.tracing.valueranges import INT32

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.complex64: 1e-3, torch.complex128: 1e-9}
"""Largest relative error of an op alone; 0.02 for shorter floats, and 0 for integers."""

ORDERING = frozenset(["sort", "topk", "argsort", "argmax", "argmin", "max", "min", "median", "mode", "kthvalue"])
"""Operators that answer with places, which equal values make ambiguous."""


LEVELS: Mapping[Values, Sequence[int]] = {"large": (LARGE, 1 << 12, 20), "wide": (WIDE,)}
"""Kind of values to the sizes of integers, largest first, of which that is taken whose results still fit into 32 bits."""


@dataclass(frozen=True, eq=False)
class Trial:
    """An op of a probe program: its node, the specs of its inputs, its weights, and the nodes of its results."""

    node: fx.Node
    inputs: Mapping[fx.Node, TensorSpec]
    weights: Mapping[fx.Node, torch.Tensor]
    outputs: Sequence[fx.Node]

    def limits(self) -> dict[fx.Node, Limits]:
        """The inputs that are indices, with the values that torch takes."""
        held = self.weights
        found = index_limits(self.node, lambda node: held[node].shape if node in held else self.inputs[node].shape)
        return {node: limits for node, limits in found.items() if node in self.inputs}

    def refused(self) -> list[tuple[fx.Node, int]]:
        """Inputs with a value that torch refuses in them: indices beyond a table, divisors of 0."""
        found = [(node, value) for node, (low, high) in self.limits().items() for value in (low - 1, high + 1)]
        by = divisor(self.node)
        whole = by in self.inputs and not self.inputs[by].torch_dtype.is_floating_point  # type: ignore[index]
        return [*found, (by, 0)] if by is not None and whole else found


@dataclass(frozen=True, eq=False)
class Drawn:
    """Inputs of a trial, and eager's results."""

    inputs: Mapping[fx.Node, torch.Tensor]
    right: Sequence[torch.Tensor]


def trials_of(program: StageProgram) -> list[Trial]:
    """The ops of a probe program, in order."""
    specs = {spec.name: spec for spec in program.inputs}
    found = []
    for node in filter(is_op, program.module.graph.nodes):
        sources = node.all_input_nodes
        inputs = {source: specs[source.name] for source in sources if source.op == "placeholder"}
        weights = {source: program.weights[str(source.target)] for source in sources if source.op == "get_attr"}
        found.append(Trial(node, inputs, weights, [user for user in node.users if is_pick(user)] or [node]))
    return found


def faults(program: StageProgram, run: Runnable, values: Values, ops: Sequence[str]) -> dict[str, str]:
    """Op name to the difference between backend and eager on one kind of values, in words; '' for none.

    Args:
        run: the program on the backend.
        ops: all ops of the program, or the one that gets values that torch refuses.
    Raises: any exception of the backend on values that torch takes.
    """
    trials = trials_of(program)
    usual = [_drawn(trial, "finite", 0) for trial in trials]
    if values == "outside":
        return {op: _outside(program, trials, usual, run, program.ops.index(op)) for op in ops}
    found = dict.fromkeys(ops, "")
    for number in range(NUM_DRAWS):
        drawn = [_drawn(trial, values, number) or usual[k] for k, trial in enumerate(trials)]
        answers = _answers(program, drawn, run)
        for trial, made in zip(trials, drawn, strict=True):
            pairs = zip(trial.outputs, made.right, strict=True) if made is not None else ()
            told = (_difference_text(answers[node.name], right, made.inputs, values) for node, right in pairs)  # type: ignore[union-attr]
            found[trial.node.name] = found[trial.node.name] or next(filter(None, told), "")
    return found


def attended(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of attention that are no mask."""
    return node.args[:3] if base_name(node) == "scaled_dot_product_attention" else ()


def _drawn(trial: Trial, values: Values, number: int) -> Drawn | None:
    """A draw of hard values; None if torch refuses it. Divisors are not 0."""
    limits, scalars = trial.limits(), [float(item) for item in trial.node.args if isinstance(item, int | float)]
    for level in LEVELS.get(values, (SMALL, 1 << 12, 20)):
        made = {}
        for place, (node, spec) in enumerate(trial.inputs.items()):
            if base_name(trial.node) in ORDERING and values in ("finite", "signed", "large"):
                made[node] = distinct(spec.shape, spec.torch_dtype, number)
            else:
                seed, kind = number + 2 * NUM_DRAWS * place, values
                if values == "masked" and node in attended(trial.node):
                    kind = "finite"
                made[node] = draw(spec.shape, spec.torch_dtype, kind, seed, level, limits.get(node), scalars)
        if isinstance(trial.node.target, OpOverload) and schema_of(trial.node.target).name in GROUPED:
            rows, _, ends = trial.node.all_input_nodes
            made |= {ends: _group_ends(made[ends], len(made[rows]))} if {rows, ends} <= made.keys() else {}
        made = {node: laid_out(value, trial.inputs[node]) for node, value in made.items()}
        for inputs in (made, {node: _without_zeros(value) for node, value in made.items()}):
            with suppress(Exception):
                right = _eager(trial, inputs)
                if values == "wide" or all(map(_fits, right)):
                    return Drawn(inputs, right)
    return None


def _eager(trial: Trial, inputs: Mapping[fx.Node, torch.Tensor]) -> list[torch.Tensor]:
    result = call(trial.node, {**trial.weights, **inputs}, {})
    return [result] if isinstance(result, torch.Tensor) else [result[pick_index(pick)] for pick in trial.outputs]


def _group_ends(drawn: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Where consecutive groups of rows end, of drawn integers: in order, the last one behind all rows.

    >>> _group_ends(torch.tensor([7, 2, -1]), 5).tolist()
    [1, 2, 5]
    """
    return (drawn % (num_rows + 1)).sort().values.index_fill(0, torch.tensor(len(drawn) - 1), num_rows)


def _without_zeros(value: torch.Tensor) -> torch.Tensor:
    return value if value.dtype.is_floating_point or value.dtype == torch.bool else value + (value == 0)


def _fits(value: torch.Tensor) -> bool:
    return value.dtype != torch.int64 or not value.numel() or (int(value.max()) <= INT32.max and int(value.min()) >= INT32.min)


def _answers(program: StageProgram, drawn: Sequence[Drawn | None], run: Runnable) -> dict[str, torch.Tensor]:
    held = {node.name: value for made in drawn if made is not None for node, value in made.inputs.items()}
    inputs = [held[spec.name] if spec.name in held else zeros(spec) for spec in program.inputs]
    return {spec.name: value.clone() for spec, value in zip(program.outputs, run(inputs), strict=True)}


def _outside(program: StageProgram, trials: Sequence[Trial], usual: Sequence[Drawn | None], run: Runnable, number: int) -> str:
    """That the backend answers where torch refuses an argument of one op, '' if it raises too or torch answers."""
    trial, made = trials[number], usual[number]
    for node, value in trial.refused() if made is not None else ():
        wrong = {**made.inputs, node: torch.full_like(made.inputs[node], value)}  # type: ignore[union-attr]
        try:
            _eager(trial, wrong)
        except Exception as failure:
            with suppress(Exception):
                _answers(program, [*usual[:number], Drawn(wrong, ()), *usual[number + 1 :]], run)
                return f"torch refuses {value} ({innermost(failure)}), and it answers"
    return ""


def _difference_text(found: torch.Tensor, right: torch.Tensor, inputs: Mapping[fx.Node, torch.Tensor], values: Values) -> str:
    """How a value differs from torch's, with an element of it; '' if it does not. In `signed` ones the signs of zeros count."""
    if found.shape != right.shape or found.dtype != right.dtype:
        return f"torch gives {right.dtype} {tuple(right.shape)}, and it gives {found.dtype} {tuple(found.shape)}"
    exact = not (right.dtype.is_floating_point or right.dtype.is_complex)
    if values == "signed" and right.dtype.is_floating_point:
        gap = ((found == 0) & (right == 0) & (found.signbit() != right.signbit())).double()
        if not bool(gap.any()):
            return ""
    elif difference(found, right)[1] <= (0.0 if exact else TOLERANCE.get(right.dtype, 0.02)):
        return ""
    else:
        same = (found == right) | ((found != found) & (right != right))
        gap = torch.where(same, 0.0, (found.double() - right.double()).abs().nan_to_num(math.inf))
    place = int(gap.flatten().argmax())
    told = [_text(value, place) for value in inputs.values() if value.shape == right.shape]
    where = f" for {', '.join(told)}" if told else ""
    return f"torch gives {_text(right, place)}{where}, and it gives {_text(found, place)}"


def _text(value: torch.Tensor, place: int) -> str:
    number = value.flatten()[place].item()
    return f"{number:.9g}" if isinstance(number, float) else str(number)
