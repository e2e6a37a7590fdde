"""Stages of a plan: saved once in a workspace, prepared for their backends, placed on devices, loaded as a network."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from torch.fx import GraphModule

from autosplit.backends.apart import end_idle
from autosplit.backends.base import Precision, get_backend, require_device, require_streams
from autosplit.backends.conformance import require_right
from autosplit.compat.torchparts import num_writes
from autosplit.deploying.checking import Reference
from autosplit.devices.accelerators import is_accelerator
from autosplit.devices.discovering import Devices, as_machine, check_here
from autosplit.errors import BackendError
from autosplit.files import content_hash
from autosplit.memory.stages import count
from autosplit.planning.baselines import machine_of
from autosplit.running.engine import Engine
from autosplit.running.modules import StageFolder
from autosplit.running.stage import StagePlacement
from autosplit.scratch import scratch_folder
from autosplit.serving.hostmanager import HostManager
from autosplit.tracing.aliasing import values_of
from autosplit.tracing.capturing import Traced
from autosplit.tracing.programs import weight, weight_names
from autosplit.tracing.splitting import StageProgram, save_stage, split
from autosplit.values.machine import Device, Machine
from autosplit.values.plan import Plan, Stage, held_on


class Workspace:
    """A temporary folder of saved stages, and the outputs that plans are checked against. Gone when it is closed.

    Plans that share a stage share its files. Plans of one traced model share the outputs of the unsplit model.
    """

    def __init__(self) -> None:
        self._temporary = ExitStack()
        self.folder = self._temporary.enter_context(scratch_folder())
        self._saved: dict[str, tuple[Path, StageProgram]] = {}
        """The program keeps its weights in memory, so that no other weight gets the address of one."""
        self._prepared: set[tuple[str, str, str]] = set()
        self._references: list[tuple[Reference, list[tuple[int, int]]]] = []

    def save(self, program: StageProgram, there: Path | None = None) -> Path:
        """The folder of a stage, saved if it was not; ``there``: where it is saved already, to be left there."""
        specs = [repr(spec) for spec in (*program.inputs, *program.outputs)]
        key = content_hash([specs, program.module.code, _state(program.module)])
        if key not in self._saved:
            self._saved[key] = there or self.folder / key, program
            if there is None:
                save_stage(program, self._saved[key][0])
        return self._saved[key][0]

    def add(
        self, program: StageProgram, backend: str, precision: Precision, devices: Sequence[Device] = (), streams: int = 1
    ) -> StageFolder:
        """The stage as workers load it, saved and, if it runs on a CPU, prepared if it was not.

        Raises: BackendError: the backend refuses the stage (by op and with the reason), a device, or several streams.
        """
        if streams > 1:
            require_streams(get_backend(backend))
        folder = self.save(program)
        for device in devices:
            require_device(get_backend(backend), device.name)
        if (folder.name, backend, precision) not in self._prepared and not (devices and all(map(is_accelerator, devices))):
            try:
                get_backend(backend).prepare(program, folder, precision)
            except BackendError as failure:
                raise BackendError(str(failure), failure.refused, backend) from failure
            self._prepared.add((folder.name, backend, precision))
        return StageFolder(folder, backend, precision, program.packages, trust=True)

    def reference(self, traced: Traced, threads: Mapping[str, int]) -> Reference:
        """The outputs of the unsplit model, for which it runs once with these threads: see ``Reference.of``."""
        state = _state(traced.program)
        for known, then in self._references:
            if known.traced is traced and known.threads == threads and then == state:
                return known
        self._references.append((Reference.of(traced, threads), state))
        return self._references[-1][0]

    def close(self) -> None:
        """Remove every file, and end the processes that compiled stages."""
        end_idle()
        self._temporary.close()

    def __enter__(self) -> "Workspace":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _state(program: GraphModule) -> list[tuple[int, int]]:
    """The address of each weight, and how often it was changed in place; two models of one shape differ in nothing else."""
    weights = [weight(program, name) for name in weight_names(program.graph)]
    return [(tensor.data_ptr(), num_writes(tensor)) for tensor in weights]


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
            module=workspace.add(program, stage.backend, precision, [machine[name] for name in stage.devices], stage.streams),
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


def deploy(host: HostManager, name: str, traced: Traced, plan: Plan, machine: Machine, workspace: Workspace) -> Engine:
    """The plan as a network of a host, waiting for requests: flat tensors for ``graph.inputs``, answers for ``graph.outputs``.

    Raises: PlanError, BackendError as ``place``; WorkerError: a worker could not load its stage.
    """
    stages = place(traced, plan, machine, workspace, capped=host.capped)
    return host.add_network(name, stages, traced.graph.inputs, traced.graph.outputs, process=plan.process)


def machine_of_plan(plan: Plan, devices: Devices | None = None) -> Machine:
    """The devices that are named, or else those of the plan. Raises: DeviceError, UsageError: as ``machine_for``."""
    return as_machine(devices or ",".join(dict.fromkeys(name for stage in plan.stages for name in stage.devices)))
