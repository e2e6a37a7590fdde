"""Check a plan's outputs against the unsplit model's for several inputs: the error that is allowed, the stage that exceeds it."""

from collections.abc import Sequence

import torch

from autosplit.backends.base import exact_on, get_backend
from autosplit.backends.checking import Reference, check, worst
from autosplit.errors import BackendError
from autosplit.tracing.capturing import Traced
from autosplit.tracing.differing import NumericalError
from autosplit.tracing.splitting import split
from autosplit.values.plan import Plan


def threads_of(plan: Plan) -> dict[str, int]:
    """The threads of each op of the reference: as in its stage where outputs must be exact, else torch's own number.

    It is empty where all ops run with torch's own number, so that such plans share a reference.
    """
    threads = {op: stage.threads for stage in plan.stages for op in stage.ops} if is_exact(plan) else {}
    return {} if set(threads.values()) == {torch.get_num_threads()} else threads


def worst_error(plan: Plan, reference: Reference, answers: Sequence[Sequence[torch.Tensor]]) -> tuple[NumericalError, float]:
    """The largest error of a plan's answers to the requests of the reference, sent in turn, and the relative error allowed.

    Answers of exact stages are compared with torch's own outputs, all others with those of f32.
    Raises: BackendError: number, shape or dtype of the outputs differ.
    """
    expected = reference.own if is_exact(plan) else reference.outputs
    right = [expected[k % len(expected)] for k in range(len(answers))]
    return worst(reference.program, answers, right), limit_of(plan, reference)


def is_exact(plan: Plan) -> bool:
    """Whether the plan's outputs must be eager's bit for bit."""
    stages = zip(plan.stages, plan.precisions, strict=True)
    return all(exact_on(get_backend(stage.backend), name, precision) for stage, precision in stages for name in stage.devices)


def limit_of(plan: Plan, reference: Reference) -> float:
    """The largest relative error that the plan's outputs may have: 0 where every stage is exact."""
    return 0.0 if is_exact(plan) else max(map(reference.tolerance, {*plan.precisions}))


def blame(plan: Plan, traced: Traced, inputs: Sequence[torch.Tensor], error: NumericalError, limit: float) -> str:
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
