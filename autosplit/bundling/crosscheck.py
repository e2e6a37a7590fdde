"""Compare the answers of a bundle with those of the model it was made of."""

from collections.abc import Mapping
from pathlib import Path

from autosplit.bundling.openbundle import load_bundle
from autosplit.deploying.checking import Reference, is_exact, limit_of
from autosplit.errors import BundleError
from autosplit.tracing.capturing import Traced
from autosplit.tracing.differing import NumericalError, compare
from autosplit.values.plan import Plan


def check_bundle(path: Path, networks: Mapping[str, tuple[Traced, Plan]]) -> dict[str, NumericalError]:
    """The largest error of each network against the unsplit model in f32 eager, over several inputs.

    Native code in the bundle is run: this is for its maker.
    Raises: BundleError: an error is beyond what the backends and the precision of the plan allow.
    """
    found = {}
    for name, (traced, plan) in networks.items():
        threads = {op: stage.threads for stage in plan.stages for op in stage.ops} if is_exact(plan) else {}
        reference = Reference.of(traced, threads)
        with load_bundle(path, network=name, allow_native=True, verify=False) as bundle:
            errors = [
                compare(traced.graph.outputs, bundle.run(inputs), expected)
                for inputs, expected in zip(reference.work, reference.expected, strict=True)
            ]
        worst = max(errors, key=lambda error: error.relative)
        limit = limit_of(plan, traced, reference.work, reference.expected)
        if not worst.relative <= limit:
            raise BundleError(
                f"network '{name}' of bundle '{path}' gives wrong numbers: output '{worst.output}' is off by "
                f"{worst.relative:.3g} of the largest value, and the tolerance is {limit:.3g}. Plan it with another "
                "backend, such as eager."
            )
        found[name] = worst
    return found
