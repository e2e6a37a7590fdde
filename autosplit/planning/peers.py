"""The rules by which other tools split a model, as named baselines."""

from collections.abc import Sequence
from dataclasses import replace

from autosplit.errors import ProfileError
from autosplit.planning.baselines import ONE_DEVICE, Baselines, baseline_plan, fits, most_used
from autosplit.planning.moduleunits import Unit, labels, layer_lists, layer_units, module_units
from autosplit.planning.predicting import predict
from autosplit.values.graph import Graph
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan, Source
from autosplit.values.profile import Profile

EVEN_LAYERS = "even by layers (vLLM)"
EVEN_BYTES = "even by bytes (accelerate)"
BY_MEMORY = "by memory (exo, ollama)"
FASTEST_ONLY = "fastest device only"
TOO_LARGE = "its part of the weights does not fit a device"

BUFFER = 1.25
"""Number of average modules that accelerate lets a device hold beyond its share."""


def peer_baselines(graph: Graph, machine: Machine, source: Source, backend: str, fastest: str) -> Baselines:
    """The splits of other tools with one backend, and those that the model or the machine does not allow, with the reason.

    - even by layers: vLLM gives each rank the same number of layers, and layers left over to the ranks before the last;
    - even by bytes: accelerate fills one device after the other with modules, up to an equal share of the weights;
    - by memory: exo and ollama give each device layers in proportion to its memory;
    - fastest device only.

    Args:
        machine: its devices, in the order in which the tools fill them.
        fastest: the device that is fastest on the whole model.
    """
    whole = (tuple(op.name for op in graph.ops), [machine[fastest]])
    plans, left_out = {FASTEST_ONLY: baseline_plan(graph, source, ONE_DEVICE, backend, [whole])}, dict[str, str]()
    if not fits(graph, whole[0], machine[fastest]):
        del plans[FASTEST_ONLY]
        left_out[FASTEST_ONLY] = TOO_LARGE
    count, lists = len(machine.devices), layer_lists(graph)
    places: dict[str, tuple[Sequence[Unit], list[int]]] = {}
    if count < 2:
        left_out |= dict.fromkeys((EVEN_LAYERS, EVEN_BYTES, BY_MEMORY), "there is one device")
    else:
        units = module_units(graph)
        places[EVEN_BYTES] = units, even_by_bytes([graph.stage_bytes(unit.ops) for unit in units], count)
        if len(lists) != 1:
            why = f"the model has {len(lists) or 'no'} list{'s' if lists else ''} of layers"
            left_out |= {EVEN_LAYERS: why, BY_MEMORY: why}
        else:
            [(path, num_layers)] = lists.items()
            layers = layer_units(graph, path)
            places[EVEN_LAYERS] = layers, even_by_layers(num_layers, count)
            caps = [device.memory_bytes for device in machine.devices]
            if None in caps:
                left_out[BY_MEMORY] = "the memory of the devices is not given (--memory)"
            else:
                places[BY_MEMORY] = layers, by_memory(num_layers, [cap or 0 for cap in caps])
    for name, (parts, numbers) in places.items():
        label = labels(parts, numbers)
        placed = [(ops, [machine.devices[label[ops[0]]]]) for ops in graph.runs(label, label)]
        held = {number: tuple(op for op in label if label[op] == number) for number in set(numbers)}
        if not all(fits(graph, ops, machine.devices[number]) for number, ops in held.items()):
            left_out[name] = TOO_LARGE
        elif len(held) < 2:
            left_out[name] = "it puts the whole model on one device"
        else:
            plans[name] = baseline_plan(graph, source, name, backend, placed)
    return Baselines(plans, left_out)


def predicted_peers(graph: Graph, plan: Plan, machine: Machine, profile: Profile) -> Baselines:
    """The splits of other tools with a plan's main backend, as a profile predicts them, and those left out with the reason.

    Args:
        machine: the devices; if some are alternatives to others, the first layout counts.
    """
    backend = most_used([stage.backend for stage in plan.stages for _ in stage.ops])
    machine = machine.layouts[0]
    try:
        fastest = min(machine.devices, key=lambda device: profile.whole_s(device.name, backend)).name
        found = peer_baselines(graph, machine, plan.source, backend, fastest)
        shared = {key: getattr(plan, key) for key in ("microbatch", "precision", "profile_hash")}
        plans = {name: predict(replace(peer, **shared), graph, machine, profile) for name, peer in found.plans.items()}
    except ProfileError as failure:
        return Baselines({}, dict.fromkeys((EVEN_LAYERS, EVEN_BYTES, BY_MEMORY, FASTEST_ONLY), str(failure)))
    refused = {name: f"{backend} refuses an op" for name, peer in plans.items() if not peer.prediction.throughput_per_s}
    return Baselines({name: peer for name, peer in plans.items() if name not in refused}, {**found.left_out, **refused})


def even_by_layers(num_layers: int, num_devices: int) -> list[int]:
    """The device of each layer by vLLM's rule: layers that are left over go to the ranks before the last one, from the back.

    >>> even_by_layers(7, 2), even_by_layers(8, 3)
    ([0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1, 2, 2])
    """
    counts = [num_layers // num_devices] * num_devices
    for extra in range(num_layers % num_devices):
        counts[-2 - extra] += 1
    return [device for device, count in enumerate(counts) for _ in range(count)]


def even_by_bytes(sizes: Sequence[int], num_devices: int) -> list[int]:
    """The device of each module by accelerate's rule: each device is filled up to an equal share and a buffer, in order.

    >>> even_by_bytes([10, 10, 10, 10], 2), even_by_bytes([40, 1, 1], 2)
    ([0, 0, 0, 1], [0, 1, 1])
    """
    share = sum(sizes) / num_devices + BUFFER * sum(sizes) / max(1, len(sizes))
    devices, device, held = [], 0, 0
    for size in sizes:
        if held and held + size > share and device < num_devices - 1:
            device, held = device + 1, 0
        held += size
        devices.append(device)
    return devices


def by_memory(num_layers: int, caps: Sequence[int]) -> list[int]:
    """The device of each layer in proportion to memory, rounded so that the largest remainders gain, as exo does.

    >>> by_memory(6, [200, 100]), by_memory(4, [1000, 1])
    ([0, 0, 0, 0, 1, 1], [0, 0, 0, 0])
    """
    exact = [num_layers * cap / sum(caps) for cap in caps]
    counts = [int(share) for share in exact]
    for device in sorted(range(len(caps)), key=lambda d: counts[d] - exact[d])[: num_layers - sum(counts)]:
        counts[device] += 1
    return [device for device, count in enumerate(counts) for _ in range(count)]
