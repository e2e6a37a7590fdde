"""Rules of accelerators: a largest number of subgraphs, and a least number of ops in each. Ops that break a rule fall back.

If a device has few ops, every subset of them is tried, so that as many ops as possible stay. If it has many, its smallest
parts go first, which is not always the best choice.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from math import prod

from autosplit.placing.parts import Part, parts_of
from autosplit.placing.sites import Choice, Site
from autosplit.values.constraints import unsupported
from autosplit.values.graph import Graph
from autosplit.values.machine import Device, Machine
from autosplit.values.plan import Plan

MAX_TRIED_OPS = 10
"""Most ops on a device for which every subset is tried."""

MAX_PLACEMENTS = 1024
"""Most placements that are tried one by one where the planner's answer breaks a rule."""


def keep_rules(
    graph: Graph, choices: Mapping[str, Choice], fallback: Site | None, machine: Machine
) -> tuple[dict[str, Choice], list[str]]:
    """The choices with ops moved to the fallback where a rule binds, and a sentence for each rule that binds without one.

    Args:
        choices: op name to choice, for every op.
        fallback: the site to which ops go; None if there is none.
    """
    found, faults = dict(choices), []
    for device in machine.devices:
        broken = broken_rules(device, parts_on(graph, found, device))
        if not broken:
            continue
        if fallback is None or fallback.device == device.name:
            faults += [f"{reason}; give a fallback that may run it" for reason in dict.fromkeys(broken.values())]
            continue
        kept = _largest_kept(graph, found, fallback, device)
        for op, choice in found.items():
            if choice.site.device == device.name and op not in kept:
                reason = broken.get(op) or next(iter(broken.values()))
                found[op] = Choice(fallback, "fallback", f"fallback: {reason}; op '{op}' runs on {fallback.device}")
    return found, faults


def every_placement(
    graph: Graph, choices: Mapping[str, Choice], options: Mapping[str, Sequence[Site]], machine: Machine
) -> Iterator[dict[str, Choice]]:
    """Every placement that keeps the rules; none where there are more than ``MAX_PLACEMENTS`` to try.

    Args:
        choices: op name to choice, for every op.
        options: op name to the sites to try.
    """
    reason = "the planner, which tried every placement within the rules"
    excluded = {device.name: unsupported(graph, device) for device in machine.devices}
    sites = {op: [site for site in options[op] if op not in excluded[site.device]] for op in choices}
    if prod(map(len, sites.values())) > MAX_PLACEMENTS:
        return
    for picked in product(*sites.values()):
        placed = {
            op: choices[op] if len(options[op]) == 1 else Choice(site, "planner", reason)
            for op, site in zip(sites, picked, strict=True)
        }
        if not any(broken_rules(device, parts_on(graph, placed, device)) for device in machine.devices):
            yield placed


def choices_of(plan: Plan) -> dict[str, Choice]:
    """The choices of all ops, by the planner."""
    reason = f"the planner ({plan.status}, gap {plan.prediction.gap:.1%})"
    return {op: Choice(Site(stage.devices[0], stage.backend), "planner", reason) for stage in plan.stages for op in stage.ops}


def broken_by(plan: Plan, graph: Graph, machine: Machine) -> list[str]:
    """A sentence for each rule of an accelerator on subgraphs that a plan breaks: solvers do not know these rules."""
    ruled = [device for device in machine.devices if device.min_ops > 1 or device.max_subgraphs is not None]
    parts = [broken_rules(device, parts_on(graph, choices_of(plan), device)) for device in ruled]
    way_out = "'autosplit annotate --default auto' keeps this rule"
    return [f"{reason}; {way_out}" for broken in parts for reason in dict.fromkeys(broken.values())]


def parts_on(graph: Graph, choices: Mapping[str, Choice], device: Device) -> list[Part]:
    """The connected parts on a device."""
    return [part for part in parts_of(graph, choices) if part.site.device == device.name]


def broken_rules(device: Device, parts: Iterable[Part]) -> dict[str, str]:
    """Op name to the rule that its part breaks, in words. The largest parts are within the number of subgraphs."""
    broken: dict[str, str] = {}
    for number, part in enumerate(sorted(parts, key=lambda part: -len(part.ops)), start=1):
        if len(part.ops) < device.min_ops:
            ops = "1 op" if len(part.ops) == 1 else f"{len(part.ops)} ops"
            reason = (
                f"the part of {ops} from '{part.ops[0]}' is too small for {device.name}, which takes {device.min_ops} or more"
            )
        elif device.max_subgraphs is not None and number > device.max_subgraphs:
            reason = f"the part from '{part.ops[0]}' is subgraph {number} for {device.name}, which takes {device.max_subgraphs}"
        else:
            continue
        broken |= dict.fromkeys(part.ops, reason)
    return broken


def _largest_kept(graph: Graph, choices: Mapping[str, Choice], fallback: Site, device: Device) -> frozenset[str]:
    """The ops that stay on the device: as many as keep its rules."""
    mine = [op for op, choice in choices.items() if choice.site.device == device.name]

    def without(kept: frozenset[str]) -> dict[str, Choice]:
        return {op: Choice(fallback, "fallback", "") if op in mine and op not in kept else one for op, one in choices.items()}

    if len(mine) <= MAX_TRIED_OPS:
        subsets = (frozenset(kept) for count in range(len(mine) - 1, -1, -1) for kept in combinations(mine, count))
        return next(kept for kept in subsets if not broken_rules(device, parts_on(graph, without(kept), device)))
    kept = frozenset(mine)
    while broken := broken_rules(device, parts_on(graph, without(kept), device)):
        kept -= broken.keys()
    return kept
