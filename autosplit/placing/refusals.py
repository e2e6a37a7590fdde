"""Ops that their device cannot run: unsupported operators and dtypes, refusals of a backend, memory caps. They fall back."""

from collections.abc import Mapping

from autosplit.backends import conformance
from autosplit.backends.base import get_backend, require_precision
from autosplit.errors import BackendError
from autosplit.placing.sites import Choice, Site
from autosplit.tables import bytes_text
from autosplit.tracing.capturing import Traced
from autosplit.values.constraints import unsupported
from autosplit.values.machine import Machine


def fall_back(
    traced: Traced, choices: Mapping[str, Choice], fallback: Site | None, machine: Machine
) -> tuple[dict[str, Choice], list[str]]:
    """The choices with each op that its site cannot run on the fallback, and a sentence for each that cannot run there either.

    Args:
        choices: op name to choice, for the ops that are placed already.
        fallback: the site of ops that their own site refuses; None if there is none.
    """
    refused = _refused(traced, choices, machine)
    moved, faults = dict(choices), []
    for op, reason in refused.items():
        if fallback is None:
            faults.append(f"{reason}, where {choices[op].reason} puts it; give a fallback")
        else:
            moved[op] = Choice(fallback, "fallback", f"fallback: {reason}; it runs on {fallback.device}")
    again = _refused(traced, {op: moved[op] for op in refused}, machine) if fallback is not None else {}
    for op, reason in again.items():
        behind = "and the fallback is the same" if choices[op].site == fallback else f"and on the fallback {reason}"
        faults.append(f"{refused[op]}, {behind}; give another fallback")
    moved, over = _within_caps(traced, moved, fallback, machine)
    return moved, faults + over


def _refused(traced: Traced, choices: Mapping[str, Choice], machine: Machine) -> dict[str, str]:
    """Op name to the reason, for each op that its site cannot run."""
    reasons: dict[str, str] = {}
    for site in dict.fromkeys(choice.site for choice in choices.values()):
        mine = [op for op, choice in choices.items() if choice.site == site]
        foreign = unsupported(traced.graph, machine[site.device])
        try:
            require_precision(get_backend(site.backend), site.precision)
        except BackendError as failure:
            reasons |= dict.fromkeys(mine, str(failure))
            continue
        refusals = conformance.refused(traced, site.backend)
        for op in mine:
            if op in foreign:
                reasons[op] = f"op '{op}' is not supported on {site.device} ({foreign[op]})"
            elif op in refusals:
                reasons[op] = f"op '{op}' is refused by {site.backend} on {site.device} ({refusals[op]})"
    return {op: reasons[op] for op in choices if op in reasons}


def _within_caps(
    traced: Traced, choices: Mapping[str, Choice], fallback: Site | None, machine: Machine
) -> tuple[dict[str, Choice], list[str]]:
    """The choices with ops moved to the fallback, in graph order, once the weights of their device would exceed its cap.

    A weight that several ops read counts once. An op's own need is its weights with its inputs and outputs.
    """
    graph, moved, faults = traced.graph, dict(choices), []
    held: dict[str, set[str]] = {device.name: set() for device in machine.devices}
    for op in graph.ops:
        if op.name not in choices:
            continue
        needs = sum(graph.weights[name].num_bytes for name in op.weights)
        needs += sum(graph.values[value].num_bytes for value in dict.fromkeys((*op.inputs, *op.outputs)))
        site, cap = moved[op.name].site, machine[moved[op.name].site.device].memory_bytes
        after = sum(graph.weights[name].num_bytes for name in held[site.device].union(op.weights))
        if cap is None or max(needs, after) <= cap:
            held[site.device].update(op.weights)
            continue
        reason = f"op '{op.name}' needs {bytes_text(needs)} by itself"
        if needs <= cap:
            reason = f"with op '{op.name}' {site.device} would hold {bytes_text(after)} of weights"
        reason += f", and the cap of {site.device} is {bytes_text(cap)}"
        if fallback is None or fallback == site:
            faults.append(f"{reason}; raise the cap{', or give a fallback' if fallback is None else ''}")
            continue
        spare = machine[fallback.device].memory_bytes
        behind = sum(graph.weights[name].num_bytes for name in held[fallback.device].union(op.weights))
        if spare is not None and max(needs, behind) > spare:
            faults.append(f"{reason}; the cap of the fallback {fallback.device} is {bytes_text(spare)}")
            continue
        held[fallback.device].update(op.weights)
        moved[op.name] = Choice(fallback, "fallback", f"fallback: {reason}; it runs on {fallback.device}")
    return moved, faults
