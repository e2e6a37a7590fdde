"""The interface of export targets, a target by its name, and the folder that appears whole or not at all."""

import contextlib
import importlib
import json
import platform
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from autosplit.backends.base import convert
from autosplit.backends.onnxfile import write_onnx
from autosplit.errors import MissingExtraError, TraceError, UsageError, close_names, raise_faults
from autosplit.files import drafted, unwritable
from autosplit.generating.steps import StepFamily
from autosplit.planning.predicting import predict
from autosplit.tracing.capturing import Traced
from autosplit.tracing.family import Family
from autosplit.tracing.freesizes import freed
from autosplit.tracing.loading import WITHOUT_WEIGHTS
from autosplit.tracing.programs import state_names
from autosplit.tracing.splitting import StageProgram, split
from autosplit.tracing.tensorspec import TensorSpec
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile
from autosplit.versions import makers

SCHEMA = 1
ABOUT = "export.json"
"""The file in each folder with its plan, the versions that made it, and the losses of the target."""


@dataclass(frozen=True, eq=False)
class Job:
    """A plan to export, with its model and machine.

    Attributes:
        profile: measured ops, from which the cost of a target's rules is computed; None if nothing was measured.
        family: the model at several sizes, for a plan of such requests.
    """

    traced: Traced
    plan: Plan
    profile: Profile | None = None
    family: Family | None = None

    @cached_property
    def programs(self) -> list[StageProgram]:
        """The program of each stage, for every size where the plan has several.

        Raises: PlanError: the stages do not fit the graph. TraceError: a stage cannot take every size.
        """
        found = split(self.traced, [stage.ops for stage in self.plan.stages])
        if self.family is None:
            return found
        if self.family.symbolic is None:
            raise TraceError(
                f"model '{self.traced.graph.name}' has no export with symbolic sizes, so its axes have one size each"
            )
        return [freed(program, self.family.symbolic) for program in found]

    @cached_property
    def ports(self) -> list[TensorSpec]:
        """The inputs and outputs of all stages, each once."""
        return list(dict.fromkeys(spec for program in self.programs for spec in (*program.inputs, *program.outputs)))

    def own_names(self, found: Mapping[str, int]) -> Mapping[str, int]:
        """A map of modules and weights by their names in the user's model, of which a generator's plan has a step."""
        return self.family.own_names(found) if isinstance(self.family, StepFamily) else found

    def not_in_numpy(self) -> list[str]:
        """A sentence for each value between stages, input and output with a dtype that numpy does not have."""
        return [f"'{spec.name}' is {spec.dtype}, which numpy does not have" for spec in self.ports if not spec.in_numpy]

    def untouched_outputs(self, target: str) -> list[str]:
        """A sentence for each output of the model that is one of its inputs, and for each that it returns twice."""
        outputs, made = self.traced.graph.outputs, {spec.name for program in self.programs for spec in program.outputs}
        given = dict.fromkeys(name for name in outputs if name not in made)
        faults = [f"output '{name}' is an input of the model, which {target} cannot pass on" for name in given]
        twice = sorted({name for name in outputs if outputs.count(name) > 1})
        return faults + [f"output '{name}' is returned twice, and {target} has one place for it" for name in twice]


@dataclass(frozen=True, slots=True)
class Target:
    """A runtime that a plan is written for.

    Attributes:
        writes: the files that it writes, in words.
        lacks: the parts of a plan that it cannot express, in words.
        checked: how the tests check the written files, in words.
        write: writes the files into an empty folder, and returns notes for the user, such as the cost of the target's rules.
            Exporters and compilers run in a process apart (``backends.base.convert``).
            Raises: PlanError: the connections of the stages cannot be expressed. BackendError: an op cannot be.
        missing: None if the files can be written here, else one line: the missing package and the way to install it.
        replicas: whether a stage may have several devices.
        streams: whether a replica may work on several requests at once.
        chain: whether each stage needs a device of its own.
        kinds: the kinds of devices that it has; None for all.
        refuses: a sentence for each other thing in a plan that the target cannot express.
        needs_weights: whether the files hold weights or programs; a map of modules needs the graph alone.
        sizes: whether its files take requests of several sizes.
    """

    name: str
    writes: str
    lacks: str
    checked: str
    write: Callable[[Job, Path], list[str]]
    missing: Callable[[], str | None] = lambda: None
    replicas: bool = False
    streams: bool = False
    chain: bool = False
    kinds: Collection[str] | None = None
    refuses: Callable[[Plan], list[str]] = lambda plan: []
    needs_weights: bool = True
    sizes: bool = False

    def accepts(self, plan: Plan) -> list[str]:
        """A sentence for each thing in a plan that the target lacks; every target computes in f32."""
        faults = []
        if plan.shapes is not None and not self.sizes and self.needs_weights:  # a map of modules holds for every size
            others = ", ".join(name for name in TARGETS if get_target(name).sizes)
            faults.append(
                f"the plan is for requests of several sizes, and {self.name} takes one; export it to {others}, or make a plan "
                "for one size (--seq-len 128, --batch 1)"
            )
        for stage in plan.stages:
            if len(stage.devices) > 1 and not self.replicas:
                faults.append(f"stage '{stage.name}' has {len(stage.devices)} replicas, and {self.name} runs each stage once")
            for name in stage.devices:
                if self.kinds is not None and parse_device(name).kind not in self.kinds:
                    faults.append(f"stage '{stage.name}' is on '{name}', and {self.name} takes {', '.join(self.kinds)} only")
            if stage.streams > 1 and not self.streams:
                one = f"{self.name} has one request in a stage at a time"
                faults.append(f"stage '{stage.name}' has {stage.streams} streams, and {one}")
        if self.chain:
            homes: dict[str, list[str]] = {}
            for stage in plan.stages:
                homes.setdefault(stage.devices[0], []).append(stage.name)
            faults += [
                f"device '{device}' has stages {', '.join(names)}, and {self.name} gives each device one stage"
                for device, names in homes.items()
                if len(names) > 1
            ]
        if set(plan.precisions) != {"f32"}:
            found = ", ".join(dict.fromkeys(plan.precisions))
            faults.append(f"the plan computes in {found}, and an export does in f32; plan again with --precision f32")
        return [*faults, *self.refuses(plan)]


TARGETS: Mapping[str, str] = {
    "onnxruntime": "onnxruntime_files",
    "onnxruntime-layers": "annotated_onnx",
    "vllm": "vllm_partition",
    "accelerate": "accelerate_map",
    "torch-pipelining": "torch_pipelining",
    "openvino": "openvino_ir",
    "aotinductor": "aotinductor_package",
    "triton": "triton_repository",
    "ray-serve": "ray_serve",
    "executorch": "executorch_programs",
}
"""Target name to its module in this folder."""


def get_target(name: str) -> Target:
    """The target with this name. Raises: UsageError: there is none."""
    if name not in TARGETS:
        raise UsageError(
            f"runtime '{name}' is not one that autosplit exports to{close_names(name, TARGETS)}; valid: {', '.join(TARGETS)}"
        )
    return cast(Target, importlib.import_module(f"autosplit.exporting.{TARGETS[name]}").TARGET)


def require_exportable(name: str, folder: Path) -> None:
    """Raises: UsageError: the target is unknown, or the folder holds something or cannot be written. MissingExtraError."""
    if absent := get_target(name).missing():
        raise MissingExtraError(absent)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"export folder '{folder}' holds something already: give another one, or remove it")
    if why := unwritable(folder):
        raise UsageError(f"export folder '{folder}' cannot be written: {why}; give another one")


def write_export(name: str, job: Job, folder: Path) -> list[str]:
    """Write a plan for a target into a folder, which appears whole or not at all.

    Returns: notes for the user.
    Raises: UsageError: as ``require_exportable``, or the target cannot express the plan; the message has every reason.
        MissingExtraError: as ``require_exportable``. PlanError, BackendError: as ``Target.write``.
    """
    require_exportable(name, folder)
    target = get_target(name)
    if job.plan.shapes is not None and job.family is None:
        raise UsageError("the plan is for requests of several sizes, and the model is traced for one; trace it with sizes=")
    if target.needs_weights and WITHOUT_WEIGHTS in job.traced.notes:
        raise UsageError(f"{name} writes programs with their weights, and {WITHOUT_WEIGHTS}; trace the model with its weights")
    if target.needs_weights and (states := state_names(job.traced.program.graph)):
        raise UsageError(f"{name} writes programs, which keep no state such as '{states[0]}' between calls; run the plan here")
    raise_faults(UsageError, f"{name} cannot express this plan", target.accepts(job.plan))
    with filled(folder) as building:
        notes = target.write(job, building)
        about = {
            "schema": SCHEMA,
            "target": name,
            "model": job.traced.graph.name,
            "spec": job.plan.source.spec,
            "plan": job.plan.hash,
            "notes": notes,
            "versions": {"python": platform.python_version(), **makers()},
        }
        write_json(building / ABOUT, about)
    return notes


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[Path]:
    """An empty folder to write into, which becomes ``folder`` at the end; after an error nothing is left.

    A folder that is there stays the same one, for it may be a link, a mount or the current one; ``export.json`` comes last.
    """
    there = folder.exists()
    with drafted(folder / "export" if there else folder) as building:
        yield building
        if there:
            for part in sorted(building.iterdir(), key=lambda part: part.name == ABOUT):
                part.rename(folder / part.name)
        else:
            building.replace(folder)


def relabelled(job: Job, places: Mapping[str, int]) -> Plan:
    """The plan with each op on another stage's device, as consecutive runs of ops; each run has the settings of that stage.

    ``places``: op name to the number of the stage whose device it runs on.
    """
    graph, stages = job.traced.graph, job.plan.stages
    runs = graph.runs(places, places)
    made = tuple(replace(stages[places[ops[0]]], name=f"stage{number}", ops=ops, load_s=0.0) for number, ops in enumerate(runs))
    return replace(job.plan, stages=made).unpredicted()


def loss_note(job: Job, moved: Plan, rule: str) -> str:
    """The cost of a target's rules: the plan as the target can express it, compared with the plan itself, both predicted.

    Args:
        moved: the plan as the target runs it.
        rule: the rule in words, such as "cuts only between modules".
    """
    if [stage.ops for stage in moved.stages] == [stage.ops for stage in job.plan.stages]:
        return f"{rule}: every cut of the plan is there already, so nothing is lost"
    homes = {op: stage.devices for stage in job.plan.stages for op in stage.ops}
    num_moved = sum(homes[op] != stage.devices for stage in moved.stages for op in stage.ops)
    changed = f"{rule}: {num_moved} of {len(homes)} ops move to another device"
    if job.profile is None:
        return f"{changed}; what that costs is not known, because nothing was measured here (autosplit profile measures)"
    machine = Machine.of(
        parse_device(name) for name in dict.fromkeys(name for stage in job.plan.stages for name in stage.devices)
    )
    graph = job.traced.graph
    own, theirs = (predict(plan, graph, machine, job.profile).prediction for plan in (job.plan, moved))
    gained = theirs.throughput_per_s / own.throughput_per_s - 1
    change = f"{gained:.1%} gained" if gained > 0 else f"{-gained:.1%} lost"
    unit = "items" if job.plan.sequences is None else "steps"
    return f"{changed}, {theirs.throughput_per_s:.4g} {unit}/s predicted instead of {own.throughput_per_s:.4g}: {change}"


def write_onnx_apart(program: StageProgram, path: Path) -> None:
    """Write a stage as an ONNX file of values in their logical shapes, in a process apart. Raises: as ``write_onnx``."""
    convert(write_onnx, program, path.absolute(), False, doing=f"while stage '{program.name}' was written as an ONNX file")


def port_names(program: StageProgram) -> dict[str, list[str]]:
    """The names of a stage's inputs and outputs, in order, for a file."""
    return {"inputs": [spec.name for spec in program.inputs], "outputs": [spec.name for spec in program.outputs]}


def write_json(path: Path, data: Any) -> None:
    """Write data as indented JSON."""
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
