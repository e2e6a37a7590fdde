"""The check that refuses a backend with wrong numbers on a stage."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autosplit.backends.base import Backend, Runnable
from autosplit.backends.lowering import beside
from autosplit.errors import AutosplitError, BackendError
from autosplit.tracing.capturing import Traced
from autosplit.tracing.differing import NumericalError, compare
from autosplit.tracing.programs import CHOOSES
from autosplit.tracing.splitting import StageProgram, unsplit
from autosplit.tracing.widening import in_f32, own_precision
from autosplit.values.samples import Precision

F32_TOLERANCE = 1e-3
"""Largest relative error against f32 eager that a backend may show on a model in f32 by default."""

TIMES_EAGER = 4.0
TOLERANCES: Mapping[Precision, tuple[float, float]] = {"bf16": (0.02, 0.9), "f16": (0.0025, 0.9), "tf32": (0.0025, 0.9)}
"""Where values are shorter, a backend's error may be TIMES_EAGER times that of torch's own, clipped to these: 5 steps of the
dtype, and less than an answer of zeros.

A fixed limit cannot tell right from wrong: with 8 bits of mantissa a correct shallow network is 0.005 off, a deep one up to 0.45.
The rule is that of FlashAttention's tests (with a factor of 2) and of torch's check of its compilers (2 to 10, in
``torch._dynamo.utils.same``): both compare with a run in more bits too.
"""


@dataclass(frozen=True)
class Reference:
    """What outputs of a stage, or of a whole model, are compared with.

    Attributes:
        work: its inputs in one or several requests.
        own: the outputs of torch's eager in the dtypes of the model; exact backends give these bits.
    """

    program: StageProgram
    work: Sequence[Sequence[torch.Tensor]]
    own: Sequence[Sequence[torch.Tensor]]

    @cached_property
    def precision(self) -> Precision:
        """The coarsest precision of the model's own dtypes."""
        return own_precision(self.program.module, self.work[0])

    @cached_property
    def outputs(self) -> Sequence[Sequence[torch.Tensor]]:
        """The outputs that all other backends should give: those of f32, rounded to the dtypes of the model."""
        if self.precision == "f32":
            return self.own
        return [in_f32(self.program.module, inputs, own) for inputs, own in zip(self.work, self.own, strict=True)]

    @cached_property
    def scores(self) -> Mapping[int, fx.Node]:
        """The scores among which outputs choose, by the number of the output."""
        [end] = self.program.module.graph.find_nodes(op="output")
        return {number: node.args[0] for number, node in enumerate(end.args[0]) if node.target in CHOOSES}

    @cached_property
    def by_scores(self) -> "Reference":
        """The same with scores in place of the outputs that choose among them; itself without such outputs."""
        if not self.scores:
            return self
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        outputs: Any = graph.graph_copy(self.program.module.graph, copies)
        graph.output(tuple(copies[self.scores[k]] if k in self.scores else value for k, value in enumerate(outputs)))
        program = replace(self.program, module=fx.GraphModule(self.program.module, graph))
        with torch.inference_mode():
            return Reference(program, self.work, [program.module(*inputs) for inputs in self.work])

    def tolerance(self, precision: Precision) -> float:
        """The largest relative error against ``outputs`` that a backend may show which computes in ``precision``."""
        if precision == self.precision == "f32":
            return F32_TOLERANCE
        right = self.by_scores
        found = right.own
        if precision != "f32":
            lowered = beside(right.program, precision).module
            with torch.inference_mode():
                found = [lowered(*inputs) for inputs in self.work]
        least, most = TOLERANCES[self.precision if precision == "f32" else precision]
        natural = worst(right.program, found, right.outputs).relative
        return min(most, max(least, TIMES_EAGER * natural))

    def error(self, found: Sequence[Sequence[torch.Tensor]]) -> NumericalError:
        """The largest error of the outputs of its requests against ``outputs``.

        A choice is off by as much as its score in f32 is below the largest one: of two near ones rounding may take either. That
        of torch's eager is right: it need not be the largest in a row that nobody reads.
        Raises: BackendError: number, shape or dtype differ.
        """
        right = self.by_scores
        if right is not self:
            worst(self.program, found, self.own)  # their shapes and dtypes
            triples = [list(enumerate(zip(*three, strict=True))) for three in zip(found, right.outputs, self.own, strict=True)]
            found = [[_as_chosen(*three) if k in self.scores else three[0] for k, three in each] for each in triples]
        return worst(right.program, found, right.outputs)


def _as_chosen(chosen: torch.Tensor, scores: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """The scores [rows, scores], the largest of each row replaced by that of the chosen place, or by NaN for no such place; as
    they are in rows where ``own`` chooses the same."""
    within = (chosen >= 0) & (chosen < scores.shape[1])
    taken = scores.gather(1, chosen.clamp(0, scores.shape[1] - 1)[:, None]).masked_fill(~within[:, None], math.nan)
    return torch.where((chosen == own)[:, None], scores, scores.scatter(1, scores.argmax(1, keepdim=True), taken))


def worst(
    program: StageProgram, found: Sequence[Sequence[torch.Tensor]], right: Sequence[Sequence[torch.Tensor]]
) -> NumericalError:
    """The largest error of the outputs of several requests. Raises: BackendError: number, shape or dtype differ."""
    names = [spec.name for spec in program.outputs]
    return max((compare(names, *pair) for pair in zip(found, right, strict=True)), key=lambda error: error.relative)


def model_reference(traced: Traced, inputs: Sequence[torch.Tensor]) -> Reference:
    """What answers to one request to a model are compared with: run in eager, on torch's own number of threads."""
    with torch.inference_mode():
        return Reference(unsplit(traced), [inputs], [traced.program(*inputs)])


def stage_reference(program: StageProgram, inputs: Sequence[torch.Tensor], threads: int = 1) -> Reference:
    """Run a stage in eager: what to ``check`` backends against."""
    with torch.inference_mode(), torch_threads(threads):
        return Reference(program, [inputs], [[value.clone() for value in program.module(*inputs)]])


def check(
    backend: Backend,
    program: StageProgram,
    inputs: Sequence[torch.Tensor],
    limit: float | None = None,
    *,
    precision: Precision = "f32",
    threads: int = 1,
    runnable: Runnable | None = None,
    exact: bool | None = None,
    reference: Reference | None = None,
) -> NumericalError:
    """Measure the largest error of a backend on one stage: of an exact one against eager's bits, else against f32.

    Args:
        limit: largest relative error allowed; by default that of the precision.
        threads: threads of the backend and of eager, which sums in another order on another number.
        runnable: the compiled stage, if there is one already.
        exact: whether the bits must equal eager's; by default for an exact backend in f32.
        reference: the result of ``stage_reference``, if there is one already.
    Raises: BackendError: the error is beyond the limit, or the backend cannot run the stage.
    """
    run = runnable or backend.compile(program, threads, precision)
    reference = reference or stage_reference(program, inputs, threads)
    exact = (backend.exact and precision == "f32") if exact is None else exact
    with torch.inference_mode(), torch_threads(threads):
        try:
            found = run(inputs)
        except AutosplitError:
            raise
        except Exception as failure:
            raise BackendError(f"backend '{backend.name}' failed on stage '{program.name}': {failure}") from failure
        error = worst(program, [found], reference.own) if exact else reference.error([found])
        limit = 0.0 if exact else reference.tolerance(precision) if limit is None else limit
    if not error.relative <= limit:
        off = f"off by {error.relative:.3g} of the largest value; the tolerance is {limit:.3g}"
        if math.isinf(error.relative):
            off = "NaN or infinite in other places than eager's" if math.isinf(error.absolute) else "not 0 where eager's all is"
        raise BackendError(
            f"backend '{backend.name}' ({precision}) gives wrong numbers on stage '{program.name}': output '{error.output}' is "
            f"{off}. Run it on another backend, such as eager."
        )
    return error


@contextlib.contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Let torch compute on this number of threads in a block."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
