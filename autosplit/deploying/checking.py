"""Check a plan's outputs against the unsplit model's for several inputs: the error that is allowed, the stage that exceeds it."""

from collections.abc import Sequence

import torch

from autosplit.backends.base import exact_on, get_backend
from autosplit.backends.checking import check, tolerance
from autosplit.backends.lowering import beside
from autosplit.backends.workspace import Microbatch, Reference
from autosplit.errors import BackendError
from autosplit.tracing.capturing import Traced
from autosplit.tracing.differing import NumericalError, compare
from autosplit.tracing.splitting import split, unsplit
from autosplit.values.plan import Plan


def threads_of(plan: Plan) -> dict[str, int]:
    """The threads of each op of the reference: as in its stage where outputs must be exact, else torch's own number.

    It is empty where all ops run with torch's own number, so that such plans share a reference.
    """
    threads = {op: stage.threads for stage in plan.stages for op in stage.ops} if is_exact(plan) else {}
    return {} if set(threads.values()) == {torch.get_num_threads()} else threads


def worst_error(plan: Plan, reference: Reference, answers: Sequence[Sequence[torch.Tensor]]) -> tuple[NumericalError, float]:
    """The largest error of a plan's answers to the reference's inputs, sent in turn, and the relative error that is allowed.

    Raises: BackendError: number, shape or dtype of the outputs differ.
    """
    traced, expected = reference.traced, reference.expected
    errors = [compare(traced.graph.outputs, found, expected[k % len(expected)]) for k, found in enumerate(answers)]
    return max(errors, key=lambda error: error.relative), limit_of(plan, traced, reference.work, expected)


def is_exact(plan: Plan) -> bool:
    """Whether the plan's outputs must be eager's bit for bit."""
    stages = zip(plan.stages, plan.precisions, strict=True)
    return all(exact_on(get_backend(stage.backend), name, precision) for stage, precision in stages for name in stage.devices)


def limit_of(plan: Plan, traced: Traced, work: Sequence[Microbatch], expected: Sequence[Microbatch]) -> float:
    """The largest relative error that the plan's outputs may have: 0 where every stage is exact."""
    if set(plan.precisions) == {"f32"}:
        return 0.0 if is_exact(plan) else tolerance("f32")
    limits = []
    for precision in set(plan.precisions) - {"f32"}:
        lowered = beside(unsplit(traced), precision).module
        with torch.inference_mode():
            errors = [
                compare(traced.graph.outputs, lowered(*inputs), right) for inputs, right in zip(work, expected, strict=True)
            ]
        limits.append(tolerance(precision, max(errors, key=lambda error: error.relative)))
    return max(limits)


def blame(plan: Plan, traced: Traced, inputs: Microbatch, error: NumericalError, limit: float) -> str:
    """The fault of a plan's numbers: it names the first stage that gives wrong outputs for right inputs."""
    values = dict(zip(traced.graph.inputs, inputs, strict=True))
    for stage, program in zip(plan.stages, split(traced, [stage.ops for stage in plan.stages]), strict=True):
        given = [values[spec.name] for spec in program.inputs]
        try:
            check(get_backend(stage.backend), program, given, precision=stage.precision or plan.precision, threads=stage.threads)
        except BackendError as failure:
            return str(failure)
        with torch.inference_mode():
            values |= zip((spec.name for spec in program.outputs), program.module(*given), strict=True)
    backends = ", ".join(dict.fromkeys(stage.backend for stage in plan.stages))
    precisions = ", ".join(dict.fromkeys(plan.precisions))
    return (
        f"the outputs of {len(plan.stages)} stages ({backends}, {precisions}) differ from f32 eager: '{error.output}' is "
        f"off by {error.relative:.3g} of the largest value, and the tolerance is {limit:.3g}; no stage alone is wrong"
    )
