"""Place the stages of a plan on devices, and open them as a network of a host."""

from collections.abc import Sequence

from autosplit.backends.base import get_backend, require_streams
from autosplit.backends.conformance import require_right
from autosplit.backends.workspace import Workspace
from autosplit.devices.discovering import Devices, as_machine, check_here
from autosplit.memory.stages import count
from autosplit.planning.baselines import machine_of
from autosplit.running.engine import Engine
from autosplit.running.modules import StageFolder
from autosplit.running.stage import StagePlacement
from autosplit.serving.hostmanager import HostManager
from autosplit.tracing.aliasing import values_of
from autosplit.tracing.capturing import Traced
from autosplit.tracing.splitting import StageProgram, split
from autosplit.values.machine import Device, Machine
from autosplit.values.plan import Plan, Stage, held_on
from autosplit.values.samples import Precision


def place(traced: Traced, plan: Plan, machine: Machine, workspace: Workspace, *, capped: bool = False) -> list[StagePlacement]:
    """The plan's stages as the runtime takes them.

    Where the machine, or with ``capped`` the host, has memory caps, a plan whose memory nobody counted is counted first.

    Raises: PlanError: the plan does not fit the model or the machine. BackendError: a backend refuses a stage. DeviceError: a
        device is not here.
    """
    check_here(machine)
    machine = machine_of([plan], machine)
    capped = capped or any(device.memory_bytes is not None for device in machine.devices)
    if capped and any(stage.memory is None for stage in plan.stages):
        plan = count(traced.graph, plan, values_of(traced))
    plan.verify(traced.graph, machine)
    require_right(traced, plan)
    programs = split(traced, [stage.ops for stage in plan.stages])
    return [
        StagePlacement(
            name=stage.name,
            module=_module(workspace, program, stage, precision, [machine[name] for name in stage.devices]),
            inputs=program.inputs,
            outputs=program.outputs,
            devices=tuple(machine[name] for name in stage.devices),
            threads=stage.threads,
            queue_depth=plan.queue_depth,
            streams=stage.streams,
            memory_bytes={name: _added_bytes(plan.stages[: number + 1], machine[name], traced) for name in stage.devices},
        )
        for number, (stage, precision, program) in enumerate(zip(plan.stages, plan.precisions, programs, strict=True))
    ]


def _added_bytes(stages: Sequence[Stage], device: Device, traced: Traced) -> int:
    """Bytes that the last of the stages adds to a device. A weight that an earlier stage holds there is not added."""
    with_it, without = (held_on(device, some, [device], traced.graph) for some in (stages, stages[:-1]))
    return sum(with_it) - sum(without)


def _module(
    workspace: Workspace, program: StageProgram, stage: Stage, precision: Precision, devices: Sequence[Device]
) -> StageFolder:
    """The stage's folder, to be loaded as the stage says. Raises: BackendError: the backend refuses the stage, or its streams."""
    if stage.streams > 1:
        require_streams(get_backend(stage.backend))
    folder = workspace.add(program, stage.backend, precision, devices)
    return StageFolder(folder, stage.backend, precision, program.packages, trust=True)


def deploy(host: HostManager, name: str, traced: Traced, plan: Plan, machine: Machine, workspace: Workspace) -> Engine:
    """The plan as a network of a host, waiting for requests: flat tensors for ``graph.inputs``, answers for ``graph.outputs``.

    Raises: PlanError, BackendError as ``place``; WorkerError: a worker could not load its stage.
    """
    stages = place(traced, plan, machine, workspace, capped=host.capped)
    return host.add_network(name, stages, traced.graph.inputs, traced.graph.outputs, process=plan.process)


def machine_of_plan(plan: Plan, devices: Devices | None = None) -> Machine:
    """The devices that are named, or else those of the plan. Raises: DeviceError, UsageError: as ``machine_for``."""
    return as_machine(devices or ",".join(dict.fromkeys(name for stage in plan.stages for name in stage.devices)))
