"""A map of patterns becomes one choice for each op that a pattern or an explicit copy names, with every fault at once."""

import itertools
from collections.abc import Mapping, Sequence

from autosplit.errors import UsageError
from autosplit.placing.sites import Choice, Site, SiteText, parse_site
from autosplit.tracing.capturing import Traced
from autosplit.values.constraints import matches_nothing, matching_ops
from autosplit.values.machine import Machine
from autosplit.values.placement import ops_are


def by_pattern(
    traced: Traced, patterns: Mapping[str, SiteText], machine: Machine, priority: Sequence[str]
) -> tuple[dict[str, Choice], list[str]]:
    """The choices of ops that a pattern matches, and a sentence for each fault of the map.

    Args:
        patterns: op pattern to site.
        priority: patterns that win over the ones after them, and over patterns that are not listed.
    """
    graph = traced.graph
    faults = [f"priority names '{name}', which is not in the map" for name in priority if name not in patterns]
    sites: dict[str, Site] = {}
    named: dict[str, list[str]] = {}
    for pattern, text in patterns.items():
        try:
            sites[pattern] = parse_site(text, machine)
        except UsageError as failure:
            faults.append(f"'{pattern}': {failure}")
        found = matching_ops(graph, pattern)
        if not found:
            faults.append(matches_nothing(graph, pattern))
        for op in found if pattern in sites else ():
            named.setdefault(op, []).append(pattern)
    rank = {pattern: number for number, pattern in enumerate(priority)}
    choices: dict[str, Choice] = {}
    disputed: dict[tuple[str, str], list[str]] = {}
    for op, mine in named.items():
        best = min(rank.get(pattern, len(rank)) for pattern in mine)
        first, *others = [pattern for pattern in mine if rank.get(pattern, len(rank)) == best]
        for other in others:
            if sites[other] != sites[first]:
                disputed.setdefault((first, other), []).append(op)
        choices[op] = Choice(sites[first], "pattern", f"pattern '{first}'")
    for (one, other), ops in disputed.items():
        faults.append(
            ops_are(f"put on {sites[one]} by '{one}' and on {sites[other]} by '{other}'", ops)
            + "; name one of the two in priority"
        )
    return choices, faults


def by_explicit_copies(
    traced: Traced, named: Mapping[str, Choice], machine: Machine
) -> tuple[dict[str, Choice], list[str], list[str]]:
    """The choices of ops that explicit copies lead to a device.

    An op runs where its copied input is. An op that reads the result runs there too, up to the next copy. A pattern wins over a
    copy.

    Args:
        named: the choices by patterns.
    Returns: the choices; a sentence for each fault; a sentence for each copy that is removed because it changes nothing.
    """
    graph, choices = traced.graph, dict[str, Choice]()
    faults, removed = list[str](), list[str]()
    chains: dict[str, dict[str, tuple[str, ...]]] = {}
    for (op, value), chain in traced.copied.items():
        chains.setdefault(op, {})[value] = chain
    for one in graph.ops if chains else ():
        asked: dict[Site, str] = {}
        for value, chain in chains.get(one.name, {}).items():
            reason = f"the explicit copy of '{value}' to {chain[-1]}"
            removed += [f"the explicit copy of '{value}' to {device}: a copy to {chain[-1]} follows" for device in chain[:-1]]
            led = [device for device, _ in itertools.groupby(chain)]  # a second copy to the same device changes nothing
            if len(set(led)) < len(led):
                faults.append(f"explicit copies take '{value}' in a circle ({' -> '.join(led)}); keep the last one")
            try:
                asked[parse_site(host_name(chain[-1], machine), machine)] = reason
            except UsageError as failure:
                faults.append(f"{reason}: {failure}")
            if one.name in named and named[one.name].site.device != chain[-1]:
                removed.append(f"{reason}: {named[one.name].reason} puts its reader '{one.name}' on {named[one.name].site}")
        if one.name in named:
            continue
        makers = [graph.producer[value] for value in one.inputs if value in graph.producer]
        asked = asked or {choices[maker].site: choices[maker].reason for maker in makers if maker in choices}
        if len(asked) > 1:
            reasons = "; ".join(f"{site.device} by {reason}" for site, reason in asked.items())
            faults.append(f"op '{one.name}' has inputs on two devices ({reasons}); name its device in the map")
        elif asked:
            [(site, reason)] = asked.items()
            choices[one.name] = Choice(site, "copy", reason)
    return choices, faults, list(dict.fromkeys(removed))


def host_name(device: str, machine: Machine) -> str:
    """The machine's name of a device that torch names without a number: the first one of its kind.

    >>> from autosplit.values.machine import parse_device
    >>> host_name("cpu", Machine.of([parse_device("cuda:0"), parse_device("cpu:2")]))
    'cpu:2'
    """
    alike = [known.name for known in machine.devices if known.kind == device]
    return alike[0] if alike else device
