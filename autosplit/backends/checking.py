"""The check that refuses a backend with wrong numbers on a stage."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from autosplit.backends.base import Backend, Runnable
from autosplit.backends.lowering import beside
from autosplit.errors import AutosplitError, BackendError
from autosplit.tracing.differing import NumericalError, compare
from autosplit.tracing.splitting import StageProgram
from autosplit.values.samples import Precision

F32_TOLERANCE = 1e-3
"""Largest relative error against f32 eager that a backend may show in f32 by default."""

TIMES_EAGER = 4.0
TOLERANCES: Mapping[Precision, tuple[float, float]] = {"bf16": (0.02, 0.9), "f16": (0.0025, 0.9), "tf32": (0.0025, 0.9)}
"""In a lower precision a backend's error may be TIMES_EAGER times that of torch's own (``lowering.beside``), clipped to these.

A fixed limit cannot tell right from wrong: with 8 bits of mantissa a correct shallow network is 0.005 off, a deep one up to 0.45.
"""


def tolerance(precision: Precision, eager: NumericalError | None = None) -> float:
    """The largest relative error against f32 eager that a backend may show.

    ``eager`` is the error of torch's own lower precision on the same inputs; f32 does not need it.

    >>> tolerance("f32"), tolerance("bf16", NumericalError(1.0, 0.05, "y")), tolerance("bf16", NumericalError(1.0, 0.4, "y"))
    (0.001, 0.2, 0.9)
    """
    if precision == "f32":
        return F32_TOLERANCE
    least, most = TOLERANCES[precision]
    return min(most, max(least, TIMES_EAGER * eager.relative)) if eager else most


def reference(program: StageProgram, inputs: Sequence[torch.Tensor], threads: int = 1) -> list[torch.Tensor]:
    """Run a stage in f32 eager: the outputs to ``check`` backends against."""
    with torch.inference_mode(), _torch_threads(threads):
        return [value.clone() for value in program.module(*inputs)]


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
    expected: Sequence[torch.Tensor] | None = None,
) -> NumericalError:
    """Measure the largest error of a backend against f32 eager on one stage.

    Args:
        backend: the backend.
        program: the stage.
        inputs: the stage's inputs, in order.
        limit: largest relative error allowed; by default that of the precision.
        precision: the backend's precision.
        threads: threads of the backend and of eager, which sums in another order on another number.
        runnable: the compiled stage, if there is one already.
        exact: whether the bits must equal eager's; by default for an exact backend in f32.
        expected: the outputs of ``reference``, if there are some already.
    Raises: BackendError: the error is beyond the limit, or the backend cannot run the stage.
    """
    run = runnable or backend.compile(program, threads, precision)
    expected = expected or reference(program, inputs, threads)
    with torch.inference_mode(), _torch_threads(threads):
        try:
            found = run(inputs)
        except AutosplitError:
            raise
        except Exception as failure:
            raise BackendError(f"backend '{backend.name}' failed on stage '{program.name}': {failure}") from failure
        names = [spec.name for spec in program.outputs]
        error = compare(names, found, expected)
        if limit is None:
            natural = None if precision == "f32" else compare(names, beside(program, precision).module(*inputs), expected)
            limit = tolerance(precision, natural)
    if (backend.exact and precision == "f32") if exact is None else exact:
        limit = 0.0
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
def _torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
