"""Estimates: seconds of ops on a device that is not here, from a stated speed, a table, or the profile of another machine.

A roofline (Williams et al., 2009) per op: the larger of its floating-point operations over ``flops`` and its bytes over
``bytes_per_s``. Real ops reach a half of that or less, so an estimate compares plans better than it foretells seconds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod

from autosplit.errors import ProfileError, UsageError, raise_faults
from autosplit.values.constraints import matching_ops
from autosplit.values.graph import Graph, Op
from autosplit.values.machine import Device, Machine
from autosplit.values.plan import ON_ESTIMATES, Plan
from autosplit.values.profile import Profile
from autosplit.values.samples import ESTIMATED, Measured, Samples, Setting

PRODUCTS = ("linear", "addmm", "mm", "bmm", "matmul", "baddbmm")
ATTENTION = "scaled_dot_product"


def sources(machine: Machine) -> tuple[str, ...]:
    """The devices that must be measured for a machine: those without a stated speed, and those that a speed refers to."""
    stated = [device.speed for device in machine.devices if device.speed is not None]
    own = [device.name for device in machine.devices if device.speed is None]
    return tuple(dict.fromkeys([*own, *(speed.of for speed in stated if speed.of)]))


def estimated(profile: Profile, graph: Graph, machine: Machine) -> Profile:
    """The profile with the seconds of the devices whose speed the machine states, and notes that name them.

    Raises: ProfileError: the device that a speed refers to was not measured. UsageError: a table lacks ops.
    """
    told: dict[str, list[str]] = {}
    for device in machine.devices:
        if device.speed is not None and device.speed.of != device.name:
            found, rests_on = _measured(profile, graph, device)
            told.setdefault(f"were not measured; they are {rests_on}", []).append(device.name)
            profile = replace(profile, measured={**profile.measured, **found})
    return _noted(profile, told)


def _noted(profile: Profile, told: Mapping[str, Iterable[str]]) -> Profile:
    """The profile with a note for each kind of estimate, which names all devices of that kind."""
    notes = [f"ESTIMATE: the times on {', '.join(map(repr, names))} {words}" for words, names in told.items()]
    return replace(profile, notes=(*profile.notes, *notes)).verify()


def as_measured_elsewhere(profile: Profile, stored: Profile, devices: Iterable[Device], of: str, others: str = "") -> Profile:
    """The profile with the stored measurements of another machine for devices that are not here.

    A device takes those of its own name, else those of the first device of its kind with as many cores. ``others`` names the
    machines that are stored, for the message.

    Raises: ProfileError: the stored profile has no such device.
    """
    told: dict[str, list[str]] = {}
    for device in devices:
        threads = max(1, len(device.cores))
        alike = [s for s in stored.measured if s.device.partition(":")[0] == device.kind and s.threads == threads]
        names = dict.fromkeys(setting.device for setting in alike)
        if not names:
            reason = f"no stored profile of '{profile.graph_name}' of machine '{of}' has one{others}"
            raise ProfileError(_way_out(device.name, reason))
        name = device.name if device.name in names else next(iter(names))
        taken = {
            s._replace(device=device.name): replace(stored.measured[s], source=f"{ESTIMATED}: {stored.measured[s].source}")
            for s in alike
            if s.device == name
        }
        where = next(iter(taken.values())).provenance
        measured_on = where.accelerator.get("name", where.cpu)
        told.setdefault(f"are those of '{name}' on another machine ({measured_on}, {where.date})", []).append(device.name)
        profile = replace(profile, measured={**profile.measured, **taken})
    return _noted(profile, told)


def with_estimates(plan: Plan, profile: Profile) -> Plan:
    """The plan, whose method says for which of its devices the times were not measured."""
    guessed = {setting.device for setting, measured in profile.measured.items() if measured.is_estimate}
    named = [name for name in plan.devices if name in guessed]
    method = plan.method.partition(f", {ON_ESTIMATES}")[0]
    return replace(plan, method=f"{method}, {ON_ESTIMATES} {', '.join(named)}" if named else method)


def _way_out(name: str, reason: str) -> str:
    return (
        f"device '{name}' is not here, and {reason}; state its speed in the machine file (speed: 3.5 x cpu:0, or "
        "speed: {flops: 1e12, bytes_per_s: 1e11}, or speed: {table: seconds.json}), or take a stored profile with --profile-of"
    )


def require_costs(machine: Machine, absent: Iterable[str], of: str) -> None:
    """Raises: ProfileError: a device that is not here has no stated speed, and no profile of another machine is named."""
    faults = [name for name in absent if machine[name].speed is None and not of]
    if faults:
        raise ProfileError(_way_out(faults[0], "its times are not known"))


def _measured(profile: Profile, graph: Graph, device: Device) -> tuple[dict[Setting, Measured], str]:
    """The measurements of a device by its stated speed, and their source in words."""
    speed, counts = device.speed, sorted({1, max(1, len(device.cores))})
    assert speed is not None
    if speed.of:
        like: dict[str, Setting] = {}
        for setting in sorted(profile.measured, key=lambda setting: setting.threads):
            if setting.device == speed.of and (not device.backends or setting.backend in device.backends):
                like[setting.backend] = setting
        if not like:
            raise ProfileError(f"speed of '{device.name}' is {speed.times:g} x '{speed.of}', which was not measured; measure it")
        found = {backend: _scaled(profile, setting, speed.times) for backend, setting in like.items()}
        rests_on = f"those of '{speed.of}' over {speed.times:g}"
    else:
        if speed.op_s:
            op_s, rests_on = _tabulated(graph, device), "from a table of the user's"
        else:
            op_s = {op.name: _roofline_s(graph, op, speed.flops, speed.bytes_per_s) for op in graph.ops}
            rests_on = f"a roofline of {speed.flops:.3g} operations and {speed.bytes_per_s:.3g} bytes a second"
        one = Measured({op: Samples((seconds,)) for op, seconds in op_s.items()}, per="op", source=ESTIMATED)
        found = dict.fromkeys(device.backends or ("eager",), one)
    return {Setting(device.name, backend, n): one for backend, one in found.items() for n in counts}, rests_on


def _scaled(profile: Profile, setting: Setting, times: float) -> Measured:
    """The measurements of a setting, divided; of the ops that its backend takes."""
    measured = profile.measured[setting]
    ops = {op: Samples((profile.op_s(op, *setting) / times,)) for op in profile.accepted(setting)}
    return Measured(ops, per="op", source=ESTIMATED, refused=measured.refused, provenance=measured.provenance)


def _tabulated(graph: Graph, device: Device) -> dict[str, float]:
    assert device.speed is not None
    op_s = {op: seconds for pattern, seconds in device.speed.op_s for op in matching_ops(graph, pattern)}
    lost = [f"'{op.name}' ({op.operator}) has no seconds" for op in graph.ops if op.name not in op_s]
    raise_faults(UsageError, f"the table of '{device.name}' does not fit '{graph.name}'; '*' stands for all other ops", lost)
    return op_s


def _roofline_s(graph: Graph, op: Op, flops: float, bytes_per_s: float) -> float:
    """Seconds of one op, at least those of its operations and of its bytes, which pass the memory once."""
    read = sum(graph.values[name].num_bytes for name in op.inputs) + sum(graph.weights[name].num_bytes for name in op.weights)
    moved = read + sum(graph.values[name].num_bytes for name in op.outputs)
    return max(_operations(graph, op) / flops, moved / bytes_per_s)


def _operations(graph: Graph, op: Op) -> float:
    """Floating-point operations of an op: two for each product of a matrix product, one for each output elsewhere."""
    shapes: Mapping[str, tuple[int, ...]] = {
        **{name: graph.values[name].shape for name in (*op.inputs, *op.outputs)},
        **{name: graph.weights[name].shape for name in op.weights},
    }
    made = sum(prod(shapes[name]) for name in op.outputs)
    kind = op.operator.removeprefix("aten.").partition(".")[0]
    weights = [shapes[name] for name in op.weights if len(shapes[name]) > 1]
    if kind == "embedding" or not (op.inputs or weights):
        return float(made)
    if kind.startswith("conv") and weights:
        return 2.0 * made * prod(weights[0]) / weights[0][0]
    if kind in PRODUCTS:
        tensors = [shapes[name] for name in op.inputs if len(shapes[name]) > 1]
        inner = weights[0][-1] if kind == "linear" and weights else tensors[-1 if weights or len(tensors) == 1 else -2][-1]
        return 2.0 * made * inner
    if ATTENTION in kind and len(op.inputs) >= 2:
        query, key = shapes[op.inputs[0]], shapes[op.inputs[1]]
        return 4.0 * prod(query) * key[-2]
    return float(made)
