"""What another precision would bring to a plan in f32 on accelerators: measured there, said, and left to the user."""

from collections.abc import Iterator
from dataclasses import replace

from autosplit.deploying.setup import Setup
from autosplit.devices.accelerators import is_accelerator
from autosplit.errors import AutosplitError
from autosplit.measuring.profiler import measure
from autosplit.measuring.store import open_store
from autosplit.planning.predicting import predict
from autosplit.tracing.capturing import Traced
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile
from autosplit.values.samples import Precision

OTHERS: tuple[Precision, ...] = ("tf32", "bf16", "f16")

BUDGET_S = 0.5
"""Seconds of timing for each precision."""


def other_precisions(traced: Traced, plan: Plan, machine: Machine, profile: Profile, setup: Setup) -> Iterator[str]:
    """A sentence on each other precision: predicted throughput beside that of f32, error against f32 on the model's inputs.

    Only the accelerators that the plan uses are measured; its stages on cores are taken to stay in f32. Nothing is said of a plan
    without accelerators, in another precision, for several sizes, or over several hosts.

    Args:
        traced: the model, traced for the plan's microbatch.
        plan: the plan.
        machine: its devices.
        profile: seconds of the ops in f32.
        setup: the store that keeps what is measured.
    """
    stages = [stage for stage in plan.stages if any(is_accelerator(machine[name]) for name in stage.devices)]
    names = dict.fromkeys(name for stage in stages for name in stage.devices if is_accelerator(machine[name]))
    if not names or set(plan.precisions) != {"f32"} or plan.shapes is not None or setup.hosts is not None:
        return
    # the stages were measured in f32 alone, and ops are comparable
    known = replace(profile, stages=tuple(one for one in profile.stages if one.setting.device not in names))
    base = predict(plan, traced.graph, machine, known).prediction.throughput_per_s
    store = None if setup.store is None else open_store(setup.store)
    there, backends = machine.only(names), tuple(dict.fromkeys(stage.backend for stage in stages))
    for precision in OTHERS:
        try:
            found = measure(traced, there, backends, store=store, budget_s=BUDGET_S, links=False, precision=precision)
            measured = {setting: one for setting, one in found.measured.items() if setting in known.measured}
            other = replace(known, measured={**known.measured, **measured})
            times = predict(plan, traced.graph, machine, other).prediction.throughput_per_s / base
        except AutosplitError as failure:
            yield f"{precision} on {', '.join(names)} could not be measured: {' '.join(str(failure).split())}"
            continue
        error = max((one.error or 0.0 for one in measured.values()), default=0.0)
        yield (
            f"{precision} on {', '.join(names)} would bring {times:.2f} times the throughput of f32, with outputs off by "
            f"{error:.2g} of the largest value: --precision {precision}"
        )
