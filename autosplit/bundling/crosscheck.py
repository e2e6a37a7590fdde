"""Compare the answers of a bundle with its model's."""

from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path

import torch

from autosplit.backends.apart import apart
from autosplit.backends.workspace import Reference
from autosplit.bundling.openbundle import load_bundle
from autosplit.deploying.checking import threads_of, worst_error
from autosplit.errors import BundleError
from autosplit.tracing.capturing import Traced
from autosplit.tracing.differing import NumericalError
from autosplit.values.plan import Plan


def check_bundle(path: Path, networks: Mapping[str, tuple[Traced, Plan]]) -> dict[str, NumericalError]:
    """The largest error of each network against the unsplit model in f32 eager, over several inputs.

    Native code in the bundle is run, in a process apart: this is for its maker.
    Raises: BundleError: an error is above the tolerance of the plan's backends and precision. BackendError: the bundle ended the
        process.
    """
    found, path = {}, path.absolute()  # the process apart has another current folder
    for name, (traced, plan) in networks.items():
        reference = Reference.of(traced, threads_of(plan))
        doing = f"while network '{name}' of bundle '{path}' was checked"
        answers = torch.load(BytesIO(apart(_answers, path, name, _packed(reference.work), doing=doing)), weights_only=True)
        worst, limit = worst_error(plan, reference, answers)
        if not worst.relative <= limit:
            raise BundleError(
                f"network '{name}' of bundle '{path}' gives wrong numbers: output '{worst.output}' is off by "
                f"{worst.relative:.3g} of the largest value, and the tolerance is {limit:.3g}. Plan it with another "
                "backend, such as eager."
            )
        found[name] = worst
    return found


def _answers(path: Path, network: str, requests: bytes) -> bytes:
    with load_bundle(path, network=network, trust=True, verify=False) as bundle:
        return _packed([bundle.run(inputs) for inputs in torch.load(BytesIO(requests), weights_only=True)])


def _packed(rows: Iterable[Iterable[torch.Tensor]]) -> bytes:
    """Tensors as bytes: the other process opens no memory of this one."""
    file = BytesIO()
    torch.save([list(row) for row in rows], file)
    return file.getvalue()
