"""What runs beside a plan: the simple ways with each backend that may win, predicted where the profile can."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from autosplit.backends.base import get_backend, has_streams
from autosplit.deploying.compiling import compile_whole
from autosplit.deploying.workspace import Workspace
from autosplit.devices.accelerators import is_accelerator
from autosplit.errors import AutosplitError, ProfileError, UsageError, refusals
from autosplit.planning.alternatives import (
    ALL_CORES,
    REPLICAS,
    every_way,
    machine_of,
    out_of_reach,
    today,
    with_streams_predicted,
)
from autosplit.tracing.capturing import Traced
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile

COMPILE_SHARE = 0.25
"""Of a run's progress, where something is compiled."""

LEAST_COMPILE_S = 10.0
"""Compiling is not begun where less is allowed: a small model took 7 s, one of 450 ops 23 s."""

MOST_TIMES_EAGER = 2.5
"""TorchInductor calls eager's kernels for matrix products and convolutions. With a process a core, where another backend was
further ahead of eager, it stayed 10 to 66 % behind that one (MobileNetV2, ResNet-50, GPT-2), on BERT 5 %; where it was 2.1 to
2.4 times as fast, inductor was ahead of it on ConvNeXt and level on T5 (``benchmarks/models.json``)."""


def measured_backends(profile: Profile, machine: Machine) -> tuple[str, ...]:
    """The backends that the profile has on every device of a kind. Raises: ProfileError: a device has none."""
    found: dict[str, set[str]] = {}
    for setting in profile.measured:
        found.setdefault(setting.backend, set()).add(setting.device)
    backends: dict[str, None] = {}
    for kind in dict.fromkeys(device.kind for device in machine.devices):
        names = {device.name for device in machine.devices if device.kind == kind}
        there = [backend for backend, devices in found.items() if names <= devices]
        if not there:
            raise ProfileError(
                f"the profile of '{profile.graph_name}' has no backend on all of {', '.join(sorted(names))}; measure it"
            )
        backends |= dict.fromkeys(there)
    return tuple(backends)


def compiled(
    backends: Sequence[str],
    traced: Traced,
    plan: Plan,
    machine: Machine,
    profile: Profile | None,
    workspace: Workspace,
    limit_s: float,
    tell: Callable[[float, str], None],
) -> tuple[list[str], dict[str, str]]:
    """Compile the unsplit model for backends that no search considers because they compile for long.

    Args:
        backends: their names.
        traced: the model, traced for the plan's microbatch.
        plan: what it is to run beside.
        machine: the devices.
        profile: says where another backend is too far ahead.
        workspace: where the model is saved and prepared.
        limit_s: seconds for each backend.
        tell: called with the share done and what is being done.
    Returns: the backends that are ready; and the reasons why the others are not.
    Raises: UsageError: there is no such backend.
    """
    ready, reasons = [], {}
    for number, backend in enumerate(backends):

        def told(share: float, before: int = number, name: str = backend) -> None:
            tell((before + share) / len(backends), f"compiling the model for {name}")

        told(0.0)
        try:
            get_backend(backend)
            if reason := _not_worth_it(plan, machine, profile, limit_s):
                reasons[f"{backend} alone"] = reason
                continue
            if not all(is_accelerator(device) for device in machine.devices):
                compile_whole(traced, backend, plan.precision, workspace, limit_s, told)
            ready.append(backend)
        except UsageError:
            raise
        except (AutosplitError, OSError) as failure:
            reasons[f"{backend} alone"] = str(failure)
    return ready, reasons


def _not_worth_it(plan: Plan, machine: Machine, profile: Profile | None, limit_s: float) -> str:
    """Why nothing is compiled, if that is so."""
    if limit_s < LEAST_COMPILE_S:
        return f"compiling takes {LEAST_COMPILE_S:.0f} s and more, and {limit_s:.3g} s are allowed; give a larger budget"
    if profile is None or plan.objective != "throughput":
        return ""
    times = []
    for device in machine.devices:
        backends = {setting.backend for setting in profile.measured if setting.device == device.name}
        if "eager" in backends:
            whole_s = {backend: profile.whole_s(device.name, backend) for backend in backends}
            times.append(whole_s["eager"] / min(whole_s.values()))
    if min(times, default=0.0) > MOST_TIMES_EAGER:
        return f"another backend is {min(times):.1f} times as fast as eager, which compiling has not caught up with"
    return ""


def simple_ways(
    traced: Traced, plan: Plan, machine: Machine, profile: Profile | None, compiled: Sequence[str] = ()
) -> tuple[dict[str, Plan], dict[str, str]]:
    """The simple ways with every backend of the plan and the profile, with those compiled, and with eager, predicted if possible.

    Returns: the ways; and the names of those that cannot be the fastest by the profile, with the reason.
    """
    from autosplit.planning.plans import bounded, predict

    graph = traced.graph
    known = measured_backends(profile, machine) if profile is not None else ()
    refusing = {name: found for name in known if profile is not None and (found := profile.refused(name))}
    alone = {f"{name} alone": f"it refuses {refusals(found)}" for name, found in refusing.items()}
    known = tuple(name for name in known if name not in refusing)
    used = [stage.backend for stage in plan.stages for _ in stage.ops if stage.backend not in refusing] or ["eager"]
    main = max(used, key=used.count)
    fastest, alone_s = machine.devices[0].name, {}
    if profile is not None and main in known:
        there = [device.name for device in machine.devices if _measured(profile, device.name, main)]
        fastest = min(there, key=lambda name: profile.whole_s(name, main))
        alone_s = {b: profile.whole_s(fastest, b, busy=False) for b in known if _measured(profile, fastest, b)}
    backends = [*known, *used, *compiled, "eager"]
    ways = every_way(graph, machine, plan.source, backends, main, fastest, [name for name in backends if has_streams(name)])
    same = {key: getattr(plan, key) for key in ("microbatch", "objective", "precision", "profile_hash", "versions")}
    ways = {name: replace(way, **same, status="measured") for name, way in ways.items()}
    for name, way in ways.items():
        devices, first = {device for stage in way.stages for device in stage.devices}, way.stages[0]
        one_at_a_time = first.streams == 1  # so was everything that the profile has
        if profile is not None and one_at_a_time and all(_measured(profile, device, first.backend) for device in devices):
            ways[name] = predict(way, graph, machine_of([way], machine), profile)
            if devices <= {device.name for device in machine.devices} and first.backend in known:
                ways[name] = bounded(ways[name], plan.prediction.bound_s)
    ways = with_streams_predicted(ways)
    if plan.objective != "throughput":
        return ways, alone
    reasons = out_of_reach(ways, plan.prediction.throughput_per_s, alone_s)
    for name in (today(ways), f"{ALL_CORES} ({main})", f"{REPLICAS} ({main})"):
        reasons.pop(name, None)
    return {name: way for name, way in ways.items() if name not in reasons}, alone | reasons


def uncut_ways(
    traced: Traced, plan: Plan, machine: Machine, profile: Profile | None, ways: tuple[dict[str, Plan], dict[str, str]]
) -> tuple[dict[str, Plan], dict[str, str]]:
    """The simple ways of a plan that cuts requests, and those that do not: what a user has before autosplit is one of these.

    Args:
        traced: the model, traced for whole requests.
        plan: the plan, which cuts them.
        machine: the devices.
        profile: of whole requests.
        ways: what ``simple_ways`` gave for the plan.
    Returns: as ``simple_ways``; the names of those that cut requests say so.
    """
    uncut = replace(plan, microbatch=plan.source.batch, prediction=replace(plan.prediction, bound_s=0.0))
    plans, reasons = simple_ways(traced, uncut, machine, profile)
    cut = f", {plan.microbatch} at a time"
    return plans | {f"{n}{cut}": way for n, way in ways[0].items()}, reasons | {f"{n}{cut}": why for n, why in ways[1].items()}


def _measured(profile: Profile, device: str, backend: str) -> bool:
    return any((setting.device, setting.backend) == (device, backend) for setting in profile.measured)
