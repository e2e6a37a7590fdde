"""Compare the answers of a bundle with its model's."""

from collections.abc import Iterable, Mapping
from io import BytesIO
from itertools import islice
from pathlib import Path

import torch

from autosplit.backends.apart import apart
from autosplit.backends.workspace import threaded_reference
from autosplit.bundling.bundler import family_of
from autosplit.bundling.openbundle import load_bundle
from autosplit.deploying.checking import threads_of, worst_error
from autosplit.errors import BundleError
from autosplit.tracing.capturing import Traced
from autosplit.tracing.differing import NumericalError
from autosplit.tracing.family import Family
from autosplit.values.plan import Plan

MOST_CHECKED = 16
"""Variants of a network that are compared; of more, some at equal distances, the largest among them."""


def check_bundle(path: Path, networks: Mapping[str, tuple[Traced | Family, Plan]]) -> dict[str, NumericalError]:
    """The largest error of each network against the unsplit model, over several inputs of its sizes.

    Native code in the bundle is run, in a process apart: this is for its maker.
    Raises: BundleError: an error is above the tolerance of the plan's backends and precision. BackendError: the bundle ended the
        process.
    """
    found, path = {}, path.absolute()  # the process apart has another current folder
    for name, (model, plan) in networks.items():
        variants = family_of(model, plan).variants
        references = [threaded_reference(one, threads_of(plan)) for one in variants[:: -(-len(variants) // MOST_CHECKED)]]
        doing, work = f"while network '{name}' of bundle '{path}' was checked", [one for each in references for one in each.work]
        answers = iter(torch.load(BytesIO(apart(_answers, path, name, _packed(work), doing=doing)), weights_only=True))
        errors = [worst_error(plan, each, list(islice(answers, len(each.work)))) for each in references]
        wrong = (pair for pair in errors if not pair[0].relative <= pair[1])
        worst, limit = next(wrong, max(errors, key=lambda pair: pair[0].relative))
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
