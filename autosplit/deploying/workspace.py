"""A plan becomes a running pipeline: stages saved once in a workspace, prepared for their backends, placed on devices."""

import atexit
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from autosplit.backends.base import Precision, get_backend, require_device, require_streams
from autosplit.devices.accelerators import is_accelerator
from autosplit.devices.discovering import as_machine
from autosplit.files import content_hash
from autosplit.planning.baselines import machine_of
from autosplit.running.modules import StageFolder
from autosplit.running.pipeline import Pipeline
from autosplit.running.wiring import StagePlacement
from autosplit.scratch import scratch_folder
from autosplit.serving.hostmanager import HostManager
from autosplit.tracing.capturing import Traced
from autosplit.tracing.splitting import StageProgram, save_stage, split
from autosplit.values.machine import Device, Machine
from autosplit.values.plan import Plan, Stage


class Workspace:
    """A temporary folder of saved stages; plans that share a stage share its files. Gone when it is closed."""

    def __init__(self) -> None:
        self._temporary = ExitStack()
        self.folder = self._temporary.enter_context(scratch_folder())
        self._saved: dict[str, Path] = {}
        self._prepared: set[tuple[str, str, str]] = set()

    def save(self, program: StageProgram, ops: Sequence[str], there: Path | None = None) -> Path:
        """The folder of a stage, saved if it was not; ``there``: where it is saved already, to be left there."""
        key = content_hash([[repr(spec) for spec in (*program.inputs, *program.outputs)], list(ops)])
        if key not in self._saved:
            self._saved[key] = there or self.folder / key
            if there is None:
                save_stage(program, self._saved[key])
        return self._saved[key]

    def add(
        self, program: StageProgram, ops: tuple[str, ...], backend: str, precision: Precision, devices: Sequence[Device] = ()
    ) -> StageFolder:
        """The stage as workers load it, saved and, if it runs on a CPU, prepared if it was not.

        Raises: BackendError: the backend refuses the stage, by op and with the reason.
        """
        folder = self.save(program, ops)
        for device in devices:
            require_device(get_backend(backend), device.name)
        if (folder.name, backend, precision) not in self._prepared and not (devices and all(map(is_accelerator, devices))):
            get_backend(backend).prepare(program, folder, precision)
            self._prepared.add((folder.name, backend, precision))
        return StageFolder(folder, backend, precision, program.packages, allow_native=True)

    def close(self) -> None:
        """Remove every file."""
        self._temporary.close()

    def __enter__(self) -> "Workspace":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def place(traced: Traced, plan: Plan, machine: Machine, workspace: Workspace) -> list[StagePlacement]:
    """The plan's stages as the runtime takes them.

    Raises: PlanError: the plan does not fit the model or the machine. BackendError: a backend refuses a stage.
    """
    machine = machine_of([plan], machine)
    plan.verify(traced.graph, machine)
    programs = split(traced, [stage.ops for stage in plan.stages])
    return [
        StagePlacement(
            name=stage.name,
            module=_module(workspace, program, stage, plan.precision, [machine[name] for name in stage.devices]),
            inputs=program.inputs,
            outputs=program.outputs,
            devices=tuple(machine[name] for name in stage.devices),
            threads=stage.threads,
            queue_depth=plan.queue_depth,
            streams=stage.streams,
        )
        for stage, program in zip(plan.stages, programs, strict=True)
    ]


def _module(
    workspace: Workspace, program: StageProgram, stage: Stage, precision: Precision, devices: Sequence[Device]
) -> StageFolder:
    """The stage's folder, to be loaded as the stage says. Raises: BackendError: the backend refuses the stage, or its streams."""
    if stage.streams > 1:
        require_streams(get_backend(stage.backend))
    return replace(workspace.add(program, stage.ops, stage.backend, precision, devices), streams=stage.streams)


def deploy(host: HostManager, name: str, traced: Traced, plan: Plan, machine: Machine, workspace: Workspace) -> Pipeline:
    """The plan as a network of a host, waiting for requests: flat tensors for ``graph.inputs``, answers for ``graph.outputs``.

    Raises: PlanError, BackendError as ``place``; WorkerError: a worker could not load its stage.
    """
    return host.add_network(name, place(traced, plan, machine, workspace), traced.graph.inputs, traced.graph.outputs)


def _cancel(whole: "Future[Any]", asked: "weakref.ref[Future[Any]]") -> None:
    running = asked()
    if whole.cancelled() and running is not None:
        running.cancel()


@contextmanager
def open_pipeline(traced: Traced, plan: Plan, machine: Machine | str) -> Iterator[Callable[..., Any]]:
    """The plan as a function that takes and returns what the model does; its workers live as long as the ``with`` block.

    Args:
        traced: the model, traced for the plan's microbatch.
        plan: the plan.
        machine: the devices, or their names with commas between.
    Yields: the function. Its attribute ``submit`` gives a future instead, so that several requests are in flight at once; one
        that is cancelled ends at the next stage border.
    Raises: PlanError, BackendError, WorkerError: as ``deploy``. DeviceError, UsageError: as ``machine_for``.
    """
    with ExitStack() as opened:
        workspace, host = opened.enter_context(Workspace()), opened.enter_context(HostManager())
        atexit.register(opened.close)  # a block that is never left would be at the very end, when no thread runs any more
        opened.callback(atexit.unregister, opened.close)
        pipeline = deploy(host, traced.graph.name, traced, plan, as_machine(machine), workspace)

        def submit(*args: Any, **kwargs: Any) -> "Future[Any]":
            answer: Future[Any] = Future()

            def deliver(done: "Future[Any]") -> None:
                if not answer.set_running_or_notify_cancel():
                    return
                try:
                    result = traced.unflatten_outputs(done.result())
                except Exception as failure:
                    answer.set_exception(failure)
                else:
                    answer.set_result(result)

            running = pipeline.submit(traced.flatten_inputs(*args, **kwargs))
            asked = weakref.ref(running)  # a circle would keep the answer in memory
            answer.add_done_callback(lambda whole: _cancel(whole, asked))
            running.add_done_callback(deliver)
            return answer

        def call(*args: Any, **kwargs: Any) -> Any:
            return submit(*args, **kwargs).result()

        call.submit = submit  # type: ignore[attr-defined]
        yield call
