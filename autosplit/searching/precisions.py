"""Lower precisions on accelerators: further backends of a search within the user's error, or the estimated gain of one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autosplit.deploying.setup import Setup
from autosplit.devices.accelerators import is_accelerator
from autosplit.errors import AutosplitError
from autosplit.measuring.profiler import measure
from autosplit.measuring.store import open_store
from autosplit.planning.predicting import predict
from autosplit.planning.question import Question
from autosplit.tables import number_text
from autosplit.tracing.capturing import Traced
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile
from autosplit.values.samples import Measured, Precision, Setting, backend_in, runtime_of

OTHERS: tuple[Precision, ...] = ("tf32", "bf16", "f16")

BUDGET_S = 0.5
"""Seconds of timing for each precision."""

Measurement = Mapping[Setting, Measured] | str
"""Measurements of a precision by setting, or the reason why there are none."""


def with_precisions(question: Question, traced: Traced, setup: Setup) -> Question:
    """The question with lower precisions on accelerators as further backends, where ``setup.max_error`` allows their errors.

    A precision that is not faster than another one with a smaller error is left out. Notes say how exact each is, or that there
    is no accelerator.

    Args:
        traced: the model, with the inputs on which errors are measured.
        setup: ``max_error``, and the store for the measurements.
    """
    allowed, profile, machine = setup.max_error, question.profile, question.machine
    names = [device.name for device in machine.devices if is_accelerator(device)]
    if allowed is None:
        return question
    if not names:
        note = "max_error changes nothing: no device is an accelerator, and stages on cores stay in f32"
        return replace(question, profile=replace(profile, notes=(*profile.notes, note)))
    there = {setting.backend for setting in profile.measured if setting.device in names}
    backends = [name for name in question.backends if name in there]
    found, notes = dict[Setting, Measured](), list[str]()
    for precision, measured in _others(traced, machine.only(names), backends, setup):
        if isinstance(measured, str):
            notes.append(measured)
            continue
        for setting, one in measured.items():
            if setting not in profile.measured:
                continue
            error = one.error
            fits, told = error is not None and error <= allowed, "an unknown share" if error is None else f"{error:.2g}"
            notes.append(
                f"{precision} with {setting.backend} on {setting.device}: outputs are off by {told} of the largest "
                f"value, {'within' if fits else 'beyond'} the {number_text(allowed)} of max_error"
            )
            if fits:
                found[setting._replace(backend=backend_in(setting.backend, precision))] = one
    measured = {**profile.measured, **found}
    kept = {setting: one for setting, one in found.items() if not _is_beaten(setting, measured)}
    profile = replace(profile, measured={**profile.measured, **kept}, notes=(*profile.notes, *notes)).verify()
    ways = dict.fromkeys((*question.backends, *(setting.backend for setting in kept)))
    return replace(question, profile=profile, backends=tuple(ways))


def without_worst(question: Question, plan: Plan, fault: str) -> Question:
    """The question without the least exact precision of the stages of a plan whose outputs are off too far, and a note of it."""
    measured = question.profile.measured
    errors = {
        stage.way: max((_error(one) for setting, one in measured.items() if setting.backend == stage.way), default=0.0)
        for stage in plan.stages
        if stage.precision is not None
    }
    if not errors:
        return question
    worst = max(errors, key=errors.__getitem__)
    noted = replace(question.profile, notes=(*question.profile.notes, f"{worst} is left out: {fault}"))
    others = tuple(name for name in question.backends if name != worst)
    return replace(question, profile=noted, backends=others or (runtime_of(worst)[0],))


def _is_beaten(setting: Setting, measured: Mapping[Setting, Measured]) -> bool:
    """Whether the same backend is as fast there with a smaller error, or an equal one that came first."""
    place = setting.device, setting.runtime, setting.threads
    alike = [one for one in measured if (one.device, one.runtime, one.threads) == place]
    ranks = {one: (_error(measured[one]), number) for number, one in enumerate(alike)}
    own_s = _seconds(measured[setting])
    return any(ranks[one] < ranks[setting] and _seconds(measured[one]) <= own_s for one in alike)


def _seconds(measured: Measured) -> float:
    """Seconds of the whole model."""
    return measured.whole.median_s if measured.whole else sum(one.median_s for one in measured.ops.values())


def _error(measured: Measured) -> float:
    return measured.error or 0.0


def _others(traced: Traced, machine: Machine, backends: Sequence[str], setup: Setup) -> Iterator[tuple[Precision, Measurement]]:
    """Each other precision, measured on accelerators."""
    store = None if setup.store is None else open_store(setup.store)
    for precision in OTHERS:
        try:
            found = measure(traced, machine, backends, store=store, budget_s=BUDGET_S, links=False, precision=precision)
            yield precision, found.measured
        except AutosplitError as failure:
            names = ", ".join(device.name for device in machine.devices)
            yield precision, f"{precision} on {names} could not be measured: {' '.join(str(failure).split())}"


def other_precisions(traced: Traced, plan: Plan, machine: Machine, profile: Profile, setup: Setup) -> Iterator[str]:
    """A sentence on each other precision: predicted throughput beside that of f32, error against f32 on the model's inputs.

    Only the accelerators that the plan uses are measured; its stages on cores are taken to stay in f32. Nothing is said of a plan
    without accelerators, in another precision, for several sizes, or over several hosts.

    Args:
        traced: the model, traced for the plan's microbatch.
        profile: seconds of the ops in f32.
    """
    stages = [stage for stage in plan.stages if any(is_accelerator(machine[name]) for name in stage.devices)]
    names = dict.fromkeys(name for stage in stages for name in stage.devices if is_accelerator(machine[name]))
    if not names or set(plan.precisions) != {"f32"} or plan.shapes is not None or setup.hosts is not None:
        return
    # Ops are compared: the stages were measured in f32 alone.
    known = replace(profile, stages=tuple(one for one in profile.stages if one.setting.device not in names))
    base = predict(plan, traced.graph, machine, known).prediction.throughput_per_s
    backends = tuple(dict.fromkeys(stage.backend for stage in stages))
    for precision, measured in _others(traced, machine.only(names), backends, setup):
        if isinstance(measured, str):
            yield measured
            continue
        there = {setting: one for setting, one in measured.items() if setting in known.measured}
        other = replace(known, measured={**known.measured, **there})
        times = predict(plan, traced.graph, machine, other).prediction.throughput_per_s / base
        error = max((_error(one) for one in there.values()), default=0.0)
        yield (
            f"{precision} on {', '.join(names)} would bring {times:.2f} times the throughput of f32, with outputs off by "
            f"{error:.2g} of the largest value: --max-error {1.1 * error:.2g}, or --precision {precision} for all stages"
        )
