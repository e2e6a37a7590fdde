"""Place the stages of a plan on devices, and open them as a network of a host."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from autosplit.backends.base import get_backend, require_streams
from autosplit.backends.conformance import require_right
from autosplit.backends.simplifying import is_custom
from autosplit.backends.workspace import Workspace
from autosplit.devices.discovering import Devices, as_machine, check_here
from autosplit.errors import PlanError, TraceError
from autosplit.memory.account import Account
from autosplit.memory.stages import SHARING
from autosplit.planning.baselines import machine_of
from autosplit.running.engine import Engine
from autosplit.running.modules import StageFolder
from autosplit.running.stage import StagePlacement, Variant
from autosplit.running.wiring import Replan
from autosplit.serving.hostmanager import HostManager
from autosplit.tracing.aliasing import values_of
from autosplit.tracing.capturing import Traced
from autosplit.tracing.family import Family, as_family
from autosplit.tracing.freesizes import at_sizes, freed
from autosplit.tracing.resizing import Resizable
from autosplit.tracing.splitting import StageProgram, split
from autosplit.tracing.tensorspec import spec_of
from autosplit.values.machine import Device, Machine
from autosplit.values.plan import Plan, Stage, held_on
from autosplit.values.samples import FROM_ONNX, Precision
from autosplit.values.shapes import Shapes


def place(
    model: Traced | Family, plan: Plan, machine: Machine, workspace: Workspace, *, capped: bool = False
) -> list[StagePlacement]:
    """The plan's stages as the runtime takes them.

    Args:
        model: the model; of a family, each size is a variant of every stage over the same weights. A stage on one of the plan's
            ``dynamic`` backends takes all sizes in one program.
        capped: whether the host has memory caps. If it or the machine has, the memory of a plan is counted first.
    Raises: PlanError: the plan does not fit the model or the machine, a variant has other ops or weights, or a stage with states
        has replicas. BackendError: a backend refuses a stage. DeviceError: a device is not here. TraceError: a stage cannot take
        all sizes.
    """
    check_here(machine)
    family = as_family(model)
    traced = family.variants[0]
    machine = machine_of([plan], machine)
    capped = capped or any(device.memory_bytes is not None for device in machine.devices)
    if capped and any(stage.memory is None for stage in plan.stages):
        plan = Account(traced.graph, values_of(traced, further_sizes(family, plan.shapes, plan.backends))).counted(plan)
    plan.verify(traced.graph, machine)
    programs = split_each_size(family, plan)
    found = []
    for number, (stage, precision, (program, *others)) in enumerate(zip(plan.stages, plan.precisions, programs, strict=True)):
        devices = tuple(machine[name] for name in stage.devices)
        if program.states and len(devices) > 1:
            raise PlanError(
                f"stage '{stage.name}' has {len(devices)} replicas and keeps states such as '{program.states[0]}', of which each "
                "replica would know a part; plan with Constraints(max_replicas=1), and open the plan several times"
            )
        module = _module(workspace, program, stage, precision, devices)
        in_pieces = any(map(is_custom, program.module.graph.nodes))  # no file holds such a stage whole
        fixes = others and not program.free and stage.backend in FROM_ONNX and not in_pieces
        free = _saved_free(workspace, program, family.symbolic, module.folder) if fixes else None
        sizes = [
            Variant(
                module if program.free else _module(workspace, other, stage, precision, devices, module.folder, free),
                other.inputs,
                other.outputs,
            )
            for other in others
        ]
        as_stored = in_pieces and stage.backend in FROM_ONNX and precision == "f32"  # as ``simplifying`` makes products
        # counted where a cap is
        anew = stage.memory is None and not program.free and stage.backend not in SHARING and not as_stored
        own_bytes = len(others) * program.weight_bytes * anew
        found.append(
            StagePlacement(
                name=stage.name,
                module=module,
                inputs=program.inputs,
                outputs=program.outputs,
                devices=devices,
                threads=stage.threads,
                queue_depth=plan.queue_depth,
                streams=stage.streams,
                memory_bytes={
                    name: own_bytes + _added_bytes(plan.stages[: number + 1], machine[name], traced) for name in stage.devices
                },
                variants=tuple(sizes),
            )
        )
    return found


def further_sizes(family: Family, shapes: Shapes | None, backends: Iterable[str]) -> Sequence[Traced]:
    """The model at the sizes below the largest for which a stage on one of the backends has a program of its own."""
    further: Sequence[Traced] = () if shapes is not None and {*backends} <= {*shapes.dynamic} else family.variants[1:]
    return further


def split_each_size(family: Family, plan: Plan) -> list[tuple[StageProgram, ...]]:
    """The program of each stage at the sizes of each variant, the largest first; of a stage that takes all sizes, one program.

    Raises: PlanError: a variant has other ops or weights. BackendError: a backend refuses a stage. TraceError: a stage cannot
        take all sizes.
    """
    dynamic, symbolic = () if plan.shapes is None or len(family.sizes) == 1 else plan.shapes.dynamic, family.symbolic
    if dynamic and symbolic is None:
        raise TraceError(f"model '{family.graph.name}' has no export with symbolic sizes, so a stage takes one size")
    traced = (family.variants[0], *further_sizes(family, plan.shapes, plan.backends))
    for one in traced:
        require_right(one, plan)
    found = list[tuple[StageProgram, ...]]()
    parts = zip(*(split(one, [stage.ops for stage in plan.stages]) for one in traced), strict=True)
    for stage, (first, *others) in zip(plan.stages, parts, strict=True):
        if symbolic is not None and stage.backend in dynamic:
            found.append(at_sizes(freed(first, symbolic), symbolic, family.sizes))
            continue
        for other in others:
            _require_same_weights(first, other)
        found.append((first, *others))
    return found


def _require_same_weights(program: StageProgram, other: StageProgram) -> None:
    """Raises: PlanError: a weight of another variant differs from that of the largest one."""
    for name in other.weights.keys() - set(program.states):  # it may read fewer
        own, its = program.weights.get(name), other.weights[name]
        if own is its:  # all but weights that a model makes of a size; torch would read them for NaN
            continue
        if own is None or spec_of(name, own) != spec_of(name, its) or not torch.equal(own, its):
            raise PlanError(
                f"weight '{name}' of '{program.name}' is another one at other sizes: the model makes it of a size, and variants "
                "share their weights; run the model at one size, or make the tensor in forward"
            )


def _added_bytes(stages: Sequence[Stage], device: Device, traced: Traced) -> int:
    """Bytes that the last of the stages adds to a device. A weight that an earlier stage holds there is not added."""
    with_it, without = (held_on(device, some, [device], traced.graph) for some in (stages, stages[:-1]))
    return sum(with_it) - sum(without)


def _saved_free(workspace: Workspace, program: StageProgram, symbolic: Resizable | None, weights_of: Path) -> Path | None:
    """The folder of a stage at every size, of which its files at single sizes can be made; None where it is not known."""
    with suppress(TraceError):
        return None if symbolic is None else workspace.save(freed(program, symbolic), weights_of=weights_of)
    return None


def _module(
    workspace: Workspace,
    program: StageProgram,
    stage: Stage,
    precision: Precision,
    devices: Sequence[Device],
    first: Path | None = None,
    free: Path | None = None,
) -> StageFolder:
    """The stage's folder, to be loaded as the stage says. Raises: BackendError: the backend refuses the stage, or its streams.

    ``first`` and ``free``: the folders of the stage at the largest size and at every size, for ``Workspace.add``.
    """
    if stage.streams > 1:
        require_streams(get_backend(stage.backend))
    folder = workspace.add(program, stage.backend, precision, devices, first, free)
    return StageFolder(folder, stage.backend, precision, program.packages, trust=True, resident_bytes=stage.resident_bytes)


def deploy(
    host: HostManager,
    name: str,
    model: Traced | Family,
    plan: Plan,
    machine: Machine,
    workspace: Workspace,
    replan: Replan | None = None,
) -> Engine:
    """The plan as a network of a host, waiting for requests: flat tensors for ``graph.inputs``, answers for ``graph.outputs``.

    Requests may have the shapes of each variant of a family; ``replan`` as for ``Pipeline``.
    Raises: PlanError, BackendError, TraceError as ``place``; WorkerError: a worker could not load its stage.
    """
    stages = place(model, plan, machine, workspace, capped=host.capped)
    return host.add_network(name, stages, model.graph.inputs, model.graph.outputs, process=plan.process, replan=replan)


def machine_of_plan(plan: Plan, devices: Devices | None = None) -> Machine:
    """The devices that are named, or else those of the plan. Raises: DeviceError, UsageError: as ``machine_for``."""
    return as_machine(devices or ",".join(dict.fromkeys(name for stage in plan.stages for name in stage.devices)))
