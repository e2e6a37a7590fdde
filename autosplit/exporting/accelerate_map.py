"""Export for Hugging Face accelerate: a map from modules to devices for ``dispatch_model`` and ``device_map=``."""

from collections.abc import Sequence
from pathlib import Path

from autosplit.exporting.base import Job, Target, loss_note, relabelled, write_json
from autosplit.planning.moduleunits import is_under, joined, labels, module_units, snapped
from autosplit.values.graph import Graph

FILE = "device_map.json"


def write(job: Job, folder: Path) -> list[str]:
    """Write the map; modules whose values meet outside of them go where most of their weights are."""
    graph, stages = job.traced.graph, job.plan.stages
    units = module_units(graph)
    places = snapped(graph, units, [stage.ops for stage in stages])
    names = list(dict.fromkeys(stage.devices[0] for stage in stages))
    numbers = device_numbers(names)
    homes = labels(units, places)
    modules = {
        module: numbers[stages[place].devices[0]] for unit, place in zip(units, places, strict=True) for module in unit.modules
    }
    devices = {op: numbers[stages[n].devices[0]] for op, n in homes.items()}
    found = with_weights(graph, modules, devices, job.traced.unread)
    write_json(folder / FILE, job.own_names(found))
    note = loss_note(job, relabelled(job, homes), "accelerate cuts only between modules")
    return [f"devices: {', '.join(f'{number} is {name}' for name, number in numbers.items())}", note]


def device_numbers(names: list[str]) -> dict[str, int]:
    """Device name to the number that accelerate knows it by: that of ``cuda:N``, else the order of the devices.

    >>> device_numbers(["cuda:1", "cuda:0"]), device_numbers(["cpu:2", "cpu:0"])
    ({'cuda:1': 1, 'cuda:0': 0}, {'cpu:2': 0, 'cpu:0': 1})
    """
    if all(name.startswith("cuda:") for name in names):
        return {name: int(name.partition(":")[2]) for name in names}
    return {name: number for number, name in enumerate(names)}


def with_weights(graph: Graph, modules: dict[str, int], devices: dict[str, int], unread: Sequence[str] = ()) -> dict[str, int]:
    """The map with modules joined where everything in them is on one device, and with weights that no named module holds.

    Args:
        modules: module path to device number.
        devices: op name to device number.
        unread: weights that no op reads. accelerate wants a device for them too: that of a module beside them.
    """
    for op in graph.ops:
        for weight in op.weights:
            if not any(is_under(weight, name) for name in modules):
                modules = {**modules, weight: devices[op.name]}
    for weight in unread:
        if not any(is_under(weight, name) for name in modules):
            modules = {**modules, weight: _beside(weight, modules)}
    return joined(modules)


def _beside(weight: str, modules: dict[str, int]) -> int:
    """The device of the first named module in the innermost module around a weight that has one."""
    path = weight
    while path:
        path = path.rpartition(".")[0]
        if inside := [device for name, device in modules.items() if is_under(name, path)]:
            return inside[0]
    return 0


TARGET = Target(
    name="accelerate",
    writes=f"{FILE}: module path to the number of a device, for dispatch_model and from_pretrained(device_map=...)",
    lacks="cuts inside a module (moved, with what that costs), replicas, streams, bf16; it runs one request at a time",
    checked="accelerate's check_device_map, and dispatch_model on the CPU with equal outputs, where accelerate is installed",
    write=write,
    needs_weights=False,
)
