"""Explain a plan's speed: its bottleneck, the limit behind it, the cost of other cuts, and the gain from changes.

Every figure is the evaluator's for a plan that exists: the plan itself, one with some ops moved over a border, or the solver's
answer to the problem with one thing changed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from autosplit.arguments import checked
from autosplit.costs.cost import CLOSED, TOLERANCE, Loads, streamed
from autosplit.costs.judge import Judged, judge
from autosplit.costs.problem import HOST, Block, Floats, Pool, Problem, Transfers
from autosplit.costs.streaming import waits_s
from autosplit.errors import InfeasibleError
from autosplit.planners.clock import halfway, now, time_limit
from autosplit.planners.portfolio import solve
from autosplit.planning.predicting import problem_of
from autosplit.planning.recutting import next_cuts
from autosplit.values.constraints import Constraints, Demands
from autosplit.values.explanation import Change, DeviceLoad, Explanation, Reason, time_text
from autosplit.values.graph import Graph
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile

WORTH = 0.01
"""Share of the time that lifting a limit must save at least, if the limit is to be named as the bottleneck of the plan."""


@checked
def explain(
    graph: Graph,
    plan: Plan,
    machine: Machine,
    profile: Profile,
    constraints: Constraints | None = None,
    *,
    time_limit_s: float = 10.0,
) -> Explanation:
    """The explanation of a plan for a model.

    Args:
        graph: the model, traced for the plan's microbatch.
        plan: the plan.
        machine: the devices.
        profile: seconds of the ops there.
        constraints: the demands that the plan was made for.
        time_limit_s: seconds for all solver calls together.
    Raises: ProfileError: the profile lacks a measurement that the plan needs. UsageError: the constraints do not fit.
    """
    wanted = (constraints or Constraints()).verify(graph, machine)
    problem, blocks = problem_of(plan, graph, machine, profile, wanted)
    fewer: dict[str, Constraints] = {}
    for pattern, device in wanted.pins.items():
        rest = {key: value for key, value in wanted.pins.items() if key != pattern}
        fewer[f"'{pattern}' not pinned to '{device}'"] = replace(wanted, pins=rest)
    for pattern, devices in wanted.forbids.items():
        kept = {key: value for key, value in wanted.forbids.items() if key != pattern}
        fewer[f"'{pattern}' allowed on '{', '.join(devices)}'"] = replace(wanted, forbids=kept)
    loosened = {words: problem_of(plan, graph, machine, profile, less)[0] for words, less in fewer.items()}
    demands = replace(wanted, objective="latency" if plan.objective == "latency" else "throughput")
    found = explain_blocks(problem, blocks, demands, loosened=loosened, time_limit_s=time_limit_s)
    return replace(found, plan=plan.hash)


def explain_blocks(
    problem: Problem,
    blocks: Sequence[Block],
    demands: Demands = Demands(),  # noqa: B008 (a frozen value)
    *,
    loosened: Mapping[str, Problem] | None = None,
    time_limit_s: float = 10.0,
    unit: str = "s",
    bound_s: float = 0.0,
) -> Explanation:
    """The explanation of a row of blocks.

    Args:
        demands: the demands under which ``solve`` found the blocks.
        loosened: problems without one constraint, by its name in words ("'embed' not pinned to 'cpu:0'").
        time_limit_s: seconds for everything; changes that find no time are listed as left out.
        unit: unit of the times.
        bound_s: a bound that is known under these demands. If the blocks meet it, no better ones are looked for.
    """
    objective = demands.objective
    judged = judge(problem, demands, blocks)
    value_s, loads = judged.objective_s, judged.loads
    device, wire = int(loads.device_s.argmax()), _full_wire(problem, loads)
    calls = {} if bound_s >= value_s * (1 - CLOSED) else {AGAIN: (problem, demands)}
    calls |= dict(_changes(problem, device, demands)) | {words: (other, demands) for words, other in (loosened or {}).items()}
    with time_limit(problem.num_ops * problem.num_devices, time_limit_s) as deadline:
        deadline = min(deadline, now() + time_limit_s)
        cuts = next_cuts(problem, blocks, demands, deadline=halfway(deadline))
        changes, left_out = _looked_at(calls, blocks, value_s, deadline)
    again = next((row for row in changes if row.change == AGAIN), None)
    if again is not None:
        bound_s = max(bound_s, again.bound_s)
        if again.times <= 1 + CLOSED:
            changes.remove(again)
    best_s = value_s if again is None else again.objective_s
    helped = {row.change: 1 - row.objective_s / best_s if best_s else 0.0 for row in changes}
    kinds: dict[Reason, list[str]] = {
        "memory": [words for words in helped if words == NO_CAPS],
        "constraint": [words for words in helped if words in (loosened or {}) or words in (NO_GROUPS, NO_COUNT)],
    }
    bound_by, because = _reason(judged, device, helped, kinds, unit)
    return Explanation(
        objective=objective,
        objective_s=value_s,
        bound_s=min(bound_s, value_s),
        bottleneck=wire or problem.devices[device],
        bound_by=bound_by,
        because=because,
        devices=tuple(_device_rows(judged)),
        cuts=tuple(cuts),
        changes=tuple(changes),
        unit=unit,
        left_out=left_out,
    )


def _device_rows(judged: Judged) -> Iterator[DeviceLoad]:
    problem, loads = judged.problem, judged.loads
    for device in sorted({device for block in judged.blocks for device in block.devices}):
        load_s, compute_s, transfer_s = (float(table[device]) for table in (loads.device_s, loads.compute_s, loads.transfer_s))
        moving = compute_s + transfer_s
        cap_bytes = float(problem.memory_bytes[device])
        yield DeviceLoad(
            device=problem.devices[device],
            load_s=load_s,
            compute_s=compute_s,
            transfer_s=transfer_s,
            compute_share=compute_s / moving if moving else 0.0,
            transfer_share=transfer_s / moving if moving else 0.0,
            held_bytes=float(loads.memory_bytes[device]),
            cap_bytes=cap_bytes if np.isfinite(cap_bytes) else None,
        )


def _reason(
    judged: Judged,
    device: int,
    helped: Mapping[str, float],
    kinds: Mapping[Reason, Sequence[str]],
    unit: str,
) -> tuple[Reason, str]:
    """The limit that bounds the plan, and a sentence about it."""
    problem, blocks, loads, value_s = judged.problem, judged.blocks, judged.loads, judged.objective_s
    objective = judged.demands.objective
    wire = _full_wire(problem, loads)
    name, load = wire or problem.devices[device], time_text(loads.bottleneck_s if wire else float(loads.device_s[device]), unit)
    start = f"'{name}' is the bottleneck: {load}"
    if objective == "latency":
        start = f"A sample takes {time_text(value_s, unit)}; '{name}' is the bottleneck with {load} a sample"
    start += "" if wire else _hosts_share(judged, device, unit) + _streams_share(judged, device, unit)
    limits = [(helped[words], kind, words) for kind, found in kinds.items() for words in found if helped[words] >= WORTH]
    compute_s, transfer_s = float(loads.compute_s[device]), float(loads.transfer_s[device])
    part = compute_s / (compute_s + transfer_s) if compute_s + transfer_s else 1.0
    if limits:
        share, kind, words = max(limits)
        return kind, f"{start}, and with {words} it would be {share:.1%} less, so the {kind} bounds it."
    stuck = _indivisible(problem, blocks, device)
    if stuck is not None and objective == "throughput":
        ops, least_s = stuck
        if least_s >= (1 - WORTH) * value_s:
            who = (
                f"op '{problem.ops[ops[0]]}'"
                if len(ops) == 1
                else f"{len(ops)} ops that stay together ('{problem.ops[ops[0]]}', ...)"
            )
            least = time_text(least_s, unit)
            return "indivisible", f"{start}, of which {who} takes {least} on the fastest device and cannot be cut."
    if wire:
        return "transfer", f"'{wire}' is the bottleneck: {time_text(loads.bottleneck_s, unit)} of bytes on it bound it."
    if part >= 0.5:
        return "compute", f"{start}, {part:.0%} of it is compute, so compute bounds it."
    return "transfer", f"{start}, {1 - part:.0%} of it is transfers, so transfers bound it."


def _full_wire(problem: Problem, loads: Loads) -> str:
    """The name of the wire that is busier than every device; empty if there is none."""
    full = loads.bottleneck_s > float(loads.device_s.max(initial=0.0))
    return problem.wires.all[int(loads.wire_s.argmax())].name if full else ""


def _hosts_share(judged: Judged, device: int, unit: str) -> str:
    """A clause about the host's share of a device, if the host has no core of its own; empty if the share is small."""
    problem, blocks = judged.problem, judged.blocks
    made = [net.producer for net in problem.nets if HOST in net.consumers]
    shares = [sum(op in block.ops for op in made) / len(block.devices) for block in blocks if device in block.devices]
    host_s = problem.host_s * sum(shares) / len(made) if made else 0.0
    if host_s <= WORTH * float(judged.loads.device_s[device]):
        return ""
    return f" ({time_text(host_s, unit)} of it is the host's work, because the host has no core of its own)"


def _streams_share(judged: Judged, device: int, unit: str) -> str:
    """A clause about the waits of a device for streamed weights; empty if they are short."""
    there = [block for block in judged.blocks if device in block.devices]
    waiting_s = sum(waits_s(judged.problem, block, device) / len(block.devices) for block in there)
    if waiting_s <= WORTH * float(judged.loads.device_s[device]):
        return ""
    return f" ({time_text(waiting_s, unit)} of it are waits for streamed weights)"


def _indivisible(problem: Problem, blocks: Sequence[Block], device: int) -> tuple[tuple[int, ...], float] | None:
    """The op or group of a device that takes longest even on the fastest device, and its seconds divided by its replicas."""
    found: list[tuple[float, tuple[int, ...]]] = []
    for block in blocks:
        if device in block.devices:
            inside = set(block.ops)
            parts = [group for group in problem.groups if inside.issuperset(group)]
            parts += [(op,) for op in block.ops if not any(op in group for group in parts)]
            for ops in parts:
                found.append((float(problem.compute_s[list(ops)].sum(axis=0).min()) / len(block.devices), tuple(ops)))
    if not found:
        return None
    least_s, ops = max(found)
    return ops, least_s


AGAIN = "another plan under the same demands"
NO_CAPS = "no memory caps"
NO_GROUPS = "nothing kept together"
NO_COUNT = "any number of stages"

Call = tuple[Problem, Demands]


def _changes(problem: Problem, device: int, demands: Demands) -> Iterator[tuple[str, Call]]:
    """Changes to the problem: each in words, with the problem and demands to solve."""
    yield f"one more device like '{problem.devices[device]}'", (_with_twin(problem, device), demands)
    t = problem.transfers
    if t.send_s_per_byte.any() or t.receive_s_per_byte.any():
        wide = replace(t, send_s_per_byte=t.send_s_per_byte / 2, receive_s_per_byte=t.receive_s_per_byte / 2)
        pinned = tuple(seconds / 2 for seconds in problem.pinned_s_per_byte)
        wires = replace(problem.wires, all=tuple(replace(one, s_per_byte=one.s_per_byte / 2) for one in problem.wires.all))
        yield "twice the bandwidth", (replace(problem, transfers=wide, pinned_s_per_byte=pinned, wires=wires), demands)
    if np.isfinite(problem.memory_bytes).any() or problem.pools:
        yield NO_CAPS, (replace(problem, memory_bytes=np.full(problem.num_devices, np.inf), pools=()), demands)
    if problem.groups:
        yield NO_GROUPS, (replace(problem, groups=()), demands)
    if demands.num_stages is not None or demands.max_stages is not None:
        yield NO_COUNT, (problem, replace(demands, num_stages=None, max_stages=None))


def _with_twin(problem: Problem, device: int) -> Problem:
    """The problem with one more device like a given one.

    The two reach each other over the link to another device of that kind, or else to the next device. Each of them pays the
    costs of its own end of that link, because the other end may pay nothing.
    """
    count, t = problem.num_devices, problem.transfers
    others = [d for d in range(count) if d != device]
    alike = [d for d in next(group for group in problem.device_classes if device in group) if d != device]
    alone = device if any(table[device, device] for table in t.arrays()) else HOST
    nearest = (alike or others or [alone])[0]

    def grown(table: Floats, between: float) -> Floats:
        order = [*range(count), device, count]
        larger = table[np.ix_(order, order)].copy()
        larger[device, count] = larger[count, device] = between
        return larger

    sent, received = (device, nearest), (nearest, device)
    ends = (sent, sent, received, received, sent)
    return replace(
        problem,
        devices=(*problem.devices, f"{problem.devices[device]} (one more)"),
        compute_s=np.hstack([problem.compute_s, problem.compute_s[:, [device]]]),
        transfers=Transfers(*(grown(table, table[pair]) for table, pair in zip(t.arrays(), ends, strict=True))),
        memory_bytes=np.append(problem.memory_bytes, problem.memory_bytes[device]),
        pinned_s_per_byte=problem.pinned_s_per_byte and (*problem.pinned_s_per_byte, problem.pinned_s_per_byte[device]),
        pools=tuple(Pool((*p.devices, count), p.num_bytes) if device in p.devices else p for p in problem.pools),
    )


def _looked_at(
    calls: Mapping[str, Call], blocks: Sequence[Block], value_s: float, deadline: float
) -> tuple[list[Change], tuple[str, ...]]:
    """The effect of each change, each in an equal share of the time left, and the changes that find no time.

    A solver call overruns its limit somewhat; the longest overrun so far is kept free for the next call.
    """
    changes: list[Change] = []
    left_out: list[str] = []
    late_s = 0.0
    for number, (words, (problem, demands)) in enumerate(calls.items()):
        begun = now()
        share_s = (deadline - begun - late_s) / (len(calls) - number)
        if share_s <= 0:
            left_out.append(words)
            continue
        changes.append(_change(words, problem, demands, blocks, value_s, share_s))
        late_s = max(late_s, now() - begun - share_s)
    return changes, tuple(left_out)


def _change(
    words: str, problem: Problem, demands: Demands, blocks: Sequence[Block], value_s: float, time_limit_s: float
) -> Change:
    """The best plan after a change. The plan itself counts too, so a change never makes things worse."""
    own_s = min(value_s, judge(problem, demands, blocks).objective_s)
    try:
        solution = solve(problem.with_streams(np.inf), demands, time_limit_s=time_limit_s, name_conflict=False)
    except InfeasibleError:
        return Change(words, own_s, value_s / own_s if own_s > 0 else 1.0, 0.0, proved=False)
    found = judge(problem, demands, streamed(problem, solution.blocks))
    best_s = own_s if found.faults else min(own_s, found.objective_s)
    proved = solution.gap == 0.0 and best_s <= solution.objective_s * (1 + TOLERANCE)
    return Change(words, best_s, value_s / best_s if best_s > 0 else 1.0, min(best_s, solution.bound_s), proved)
