"""The cost of an op on its own device and on the other devices, while all other ops stay in place."""

from collections.abc import Mapping
from dataclasses import dataclass

from autosplit.placing.moves import homes_of
from autosplit.placing.sites import Choice
from autosplit.planning.predicting import charge, threads_on
from autosplit.tables import seconds_text
from autosplit.values.graph import Graph
from autosplit.values.machine import Machine
from autosplit.values.profile import Profile


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of an op on a device, and of the copies of its values to and from other devices."""

    device: str
    compute_s: float
    copy_s: float

    @property
    def seconds(self) -> float:
        """Seconds of compute and of copies together."""
        return self.compute_s + self.copy_s


def costs_of(graph: Graph, choices: Mapping[str, Choice], machine: Machine, profile: Profile, op: str) -> list[Cost]:
    """The costs of an op on each device where its backend was measured, the smallest first."""
    site, homes, found = choices[op].site, homes_of(graph, choices), []
    one = graph.ops[graph.index[op]]
    links, _ = charge(graph, machine, profile)
    for device in machine.devices:
        threads = threads_on(machine, device.name)
        backends = [name for where, name, count in profile.measured if (where, count) == (device.name, threads)]
        backend = site.backend if site.backend in backends else next(iter(backends), None)
        if backend is None:
            continue
        copy_s = sum(
            links.link(homes[value], device.name).seconds(graph.values[value].num_bytes)
            for value in dict.fromkeys(one.inputs)
            if value in graph.producer and machine[homes[value]].memory != device.memory
        )
        for value in one.outputs:
            targets = {machine[choices[reader].site.device].memory for reader in graph.consumers[value]} - {device.memory}
            copy_s += sum(links.link(device.name, target).seconds(graph.values[value].num_bytes) for target in sorted(targets))
        found.append(Cost(device.name, profile.op_s(op, device.name, backend, threads), copy_s))
    return sorted(found, key=lambda cost: cost.seconds)


def cost_text(graph: Graph, choices: Mapping[str, Choice], machine: Machine, profile: Profile | None, op: str) -> str:
    """The cost of the op on its device and on the next best one, as the end of a sentence; '' if nothing was measured."""
    costs = costs_of(graph, choices, machine, profile, op) if profile is not None else []
    here = next((cost for cost in costs if cost.device == choices[op].site.device), None)
    if here is None:
        return ""
    text = f"; it takes {seconds_text(here.compute_s)} there, and its copies {seconds_text(here.copy_s)}"
    others = [cost for cost in costs if cost.device != here.device]
    if others:
        text += f"; on {others[0].device} {seconds_text(others[0].compute_s)}, and its copies {seconds_text(others[0].copy_s)}"
    return text
