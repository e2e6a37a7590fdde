"""The main job in five calls: ``trace``, ``measure``, ``search``, ``run``, ``export``; ``auto`` makes the first four."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.export import ExportedProgram

from autosplit import measuring
from autosplit.backends.base import Precision, get_backend, has_streams, installed, usual
from autosplit.deploying.comparing import Observe, Progress, run_report
from autosplit.deploying.compiling import COMPILE_SHARE, compile_baselines
from autosplit.deploying.microbatching import require_independent
from autosplit.deploying.workspace import Workspace
from autosplit.devices.discovering import as_machine
from autosplit.devices.processes import prepare_to_spawn
from autosplit.errors import UsageError, listed
from autosplit.exporting import bundle
from autosplit.planning.baselines import Baselines, baselines_of, unmet_demands, with_whole_requests, without_autosplit
from autosplit.planning.predicting import measured_backends
from autosplit.reports.accuracy import run_of, runs_of_report
from autosplit.reports.runreport import PLAN, RunReport
from autosplit.tracing import capturing, loading
from autosplit.tracing.capturing import Traced
from autosplit.tracing.loading import Inputs
from autosplit.tracing.splitting import split
from autosplit.values.constraints import Constraints
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import Plan
from autosplit.values.planfile import read_plan
from autosplit.values.profile import Profile

if TYPE_CHECKING:
    # Solvers and Optuna take 1.3 s to load; measuring needs none of them.
    from autosplit.planning.plans import Log
    from autosplit.searching.candidates import Subject
    from autosplit.searching.loop import SearchResult

TRUSTED = ("transformers:", "autosplit.examples.")
"""Specs that a plan file may name by itself; reading a plan must not run code that the user did not ask for."""

COMPILE_BUDGETS = 2.0
"""In ``auto`` compiling may take so many times the seconds for running candidates."""

Model = str | Path | nn.Module | ExportedProgram


def trace(
    model: Model,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    inputs: Inputs | None = None,
    batch: int = 1,
    seq_len: int | None = None,
    trust: bool = False,
) -> Traced:
    """Trace a model to one flat graph for one batch size.

    Args:
        model: a spec (see ``autosplit.tracing.loading``), a module, an ``fx.GraphModule`` or an ``ExportedProgram``.
        args, kwargs: example inputs, as in ``torch.export.export``; a module needs some, a spec brings its own.
        inputs: example inputs that are all positional (a tensor or a sequence) or all by name (a mapping).
        batch, seq_len: items in one request, and tokens in one item for text models.
        trust: True to read a ``.pt2`` file, which can run code of its maker.
    Raises: ModelError: the model cannot be loaded. TraceError: it cannot be captured as one graph.
    """
    return capturing.trace(loading.load_model(model, batch, seq_len, inputs=loading.call_of(args, kwargs, inputs), trust=trust))


def measure(
    traced: Traced,
    machine: Machine | str,
    backends: Sequence[str] = ("eager",),
    *,
    profiles: Path | None = None,
    remeasure: bool = False,
    precision: Precision = "f32",
    workspace: Workspace | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Seconds of every op on every device and backend, from the store in ``profiles`` where nothing changed.

    A backend that cannot compute in ``precision``, refuses the model, or gives wrong numbers is left out; a note says why.
    ``machine`` may be names with commas between. In ``workspace`` the model is saved and prepared for those that follow.
    Raises: DeviceError, BackendError, MissingExtraError, WorkerError: as ``autosplit.measuring.measure``.
    """
    from autosplit.measuring.profiler import measure as measure_ops

    machine = as_machine(machine)
    store = measuring.Store(profiles) if profiles is not None else None
    threads = {device.name: sorted({1, max(1, len(device.cores))}, reverse=True) for device in machine.devices}
    return measure_ops(
        traced, machine, backends, threads=threads, store=store,
        remeasure=remeasure, precision=precision, workspace=workspace, progress=progress,
    )  # fmt: skip


def search(
    traced: Traced,
    profile: Profile,
    machine: Machine | str,
    constraints: Constraints | None = None,
    *,
    backends: Sequence[str] | None = None,
    budget_s: float = 30.0,
    queue_depth: int = 4,
    time_limit_s: float = 10.0,
    seed: int = 0,
    storage: Path | None = None,
    subject_for: "Callable[[int], Subject] | None" = None,
    explain_s: float | None = None,
    workspace: Workspace | None = None,
    log: "Log | None" = None,
    progress: Progress | None = None,
) -> "SearchResult":
    """The plan that measures best within the budget; with a budget of 0 the planner's answer from the profile alone.

    Args:
        traced: the model.
        profile: its measured ops; what it was measured in, f32 or bf16, is what the plan computes in.
        machine: the devices, or their names with commas between.
        constraints: what a plan must be like; free by default.
        backends: those to consider; by default all that the profile has on every device.
        budget_s: seconds for running candidates.
        queue_depth: slots of each ring, to begin with.
        time_limit_s: most seconds for each question to the planner; with a budget a fifth of that, if a plan is found by then.
        seed: of every random choice.
        storage: a journal of the trials, so that a search that was stopped goes on.
        subject_for: the traced model and profile for a microbatch, or an AutosplitError; without it requests are not cut.
        explain_s: seconds for what ``plan.explain()`` says, 0 for nothing; by default 1 where throughput is the objective.
        workspace: where stages are saved and prepared, if a run of the same model is to find them there.
        log: called with the lines of the solver's log.
        progress: called with the share of the budget spent and what is being done.
    Raises: InfeasibleError: no plan meets the constraints. ProfileError: a measurement is missing.
    """
    from autosplit.searching import candidates, loop

    machine, wanted = as_machine(machine), constraints or Constraints()
    chosen = listed("backends", backends or measured_backends(profile, machine), str)
    job = candidates.Job(
        machine, traced.source, wanted.verify(traced.graph, machine), chosen,
        queue_depth, time_limit_s, seed, log, subject_for, explain_s,
    )  # fmt: skip
    result = loop.search(job, (traced, profile), budget_s=budget_s, storage=storage, workspace=workspace, progress=progress)
    versions = {name: version(name) for name in ("autosplit", "torch")}
    return replace(result, plan=replace(result.plan, versions=versions))


def run(
    traced: Traced,
    plan: Plan,
    machine: Machine | str,
    *,
    profile: Profile | None = None,
    profiles: Path | None = None,
    baselines: bool = True,
    forced: bool = False,
    wanted: Constraints | None = None,
    backends: Sequence[str] | None = None,
    whole: "Subject | None" = None,
    num_requests: int | None = None,
    num_rounds: int = 5,
    also: Sequence[str] = (),
    compile_s: float = 60.0,
    workspace: Workspace | None = None,
    progress: Progress | None = None,
    observe: Observe | None = None,
) -> RunReport:
    """Run a plan, checked against the unsplit model, beside the baselines to run the same model.

    Args:
        traced: the model, traced for the plan's microbatch.
        plan: the plan.
        machine: the devices, or their names with commas between.
        profile: gives the baselines their prediction, and says which device is the fastest.
        profiles: the store where predicted is kept beside measured; see ``autosplit profile --accuracy``.
        baselines: whether the baselines run too.
        forced: whether the plan is to be kept even where a baseline is faster.
        wanted: demands that a baseline must meet to become the plan.
        backends: those that it may run on; None for any.
        whole: the model traced for whole requests with its profile, where the plan cuts them: some baselines then do not.
        num_requests: requests of the plan, over all rounds; slower ways get as long. By default about 2 s a round.
        num_rounds: interleaved rounds.
        also: backends whose baselines run too, though plan and profile do not know them; the model is compiled for them first.
        compile_s: seconds that this may take for each of them.
        workspace: where stages are saved and prepared, if a search of the same model left them there.
        progress: called with the share done and what is being done.
        observe: called once with the host on which all of them run, to look at it meanwhile.
    Raises: PlanError, BackendError, WorkerError, StageError: the plan cannot be run. UsageError: ``also`` names no backend.
    """
    machine, tell = as_machine(machine), progress or (lambda share, text: None)
    with ExitStack() as stack:
        workspace = workspace or stack.enter_context(Workspace())
        ready, failed = compile_baselines(
            listed("also", also, str) if baselines else (), traced, plan, machine, profile, workspace, compile_s,
            lambda share, text: tell(COMPILE_SHARE * share, text),
        )  # fmt: skip
        begun = COMPILE_SHARE if also else 0.0
        streaming = [name for name in installed() if has_streams(name)]
        beside = Baselines()
        if baselines:
            beside = baselines_of(traced.graph, plan, machine, profile, compiled=ready, streaming=streaming)
        if baselines and whole is not None:
            beside = with_whole_requests(beside, whole[0].graph, plan, machine, whole[1], streaming)
        of = {one.source.batch: one for one in (traced, *([whole[0]] if whole is not None else []))}
        report = run_report(
            traced,
            plan,
            beside.plans,
            machine,
            whole=whole[0] if whole is not None else None,
            keep=without_autosplit(beside.plans),
            left_out={**beside.left_out, **failed},
            forced=forced,
            unfit=lambda way, latency_s: unmet_demands(
                way, latency_s, of.get(way.microbatch, traced).graph, machine, wanted or Constraints(), backends
            ),
            num_requests=num_requests,
            num_rounds=num_rounds,
            workspace=workspace,
            tell=lambda share, text: tell(begun + (1 - begun) * share, text),
            observe=observe,
        )
    notes: list[str] = []
    if profiles is not None:
        with measuring.Store(profiles).noted(notes) as store:
            store.add_runs(runs_of_report(report, now()))
    return replace(report, notes=tuple(notes))


@dataclass(frozen=True)
class AutoResult:
    """What ``auto`` made: the devices, the profile, the search, the report, and the traced model of the plan to use."""

    machine: Machine
    profile: Profile
    search: "SearchResult"
    report: RunReport
    traced: Traced

    @property
    def plan(self) -> Plan:
        """The plan to use: the searched one, or the baseline that measured better."""
        return self.report.best.plan

    def __repr__(self) -> str:
        return f"AutoResult({self.report!r})"

    def _repr_html_(self) -> str:
        return self.report._repr_html_()


def auto(
    model: Model,
    devices: str | Machine | None = None,
    batch: int = 1,
    seq_len: int | None = None,
    *,
    inputs: Inputs | None = None,
    backends: Sequence[str] | None = None,
    constraints: Constraints | None = None,
    profiles: Path | None = None,
    remeasure: bool = False,
    budget_s: float = 30.0,
    queue_depth: int = 4,
    time_limit_s: float = 10.0,
    seed: int = 0,
    num_requests: int | None = None,
    num_rounds: int = 5,
    precision: Precision = "f32",
    log: "Log | None" = None,
    progress: Callable[[str], Progress] | None = None,
) -> AutoResult:
    """Trace, measure, search and run a model on devices: the arguments are those of the four calls.

    Without ``backends`` all that are installed are considered: of those that compile for long (see ``backends.base.usual``) the
    baselines run beside the plan, if compiling the unsplit model once takes no longer than twice the budget.
    ``progress`` is called with the name of each step and gives the step's progress function.
    """
    wanted = constraints or Constraints()
    names = listed("backends", usual() if backends is None else backends, str)
    for backend in names:
        get_backend(backend)
    machine = as_machine(devices)
    step = progress or (lambda name: lambda share, text: None)
    prepare_to_spawn()
    traced = trace(model, inputs=inputs, batch=batch, seq_len=seq_len)
    wanted = wanted.verify(traced.graph, machine)
    with Workspace() as workspace:
        same: dict[str, Any] = {"profiles": profiles, "precision": precision, "workspace": workspace}
        profile = measure(traced, machine, names, remeasure=remeasure, progress=step("profile"), **same)

        def subject_for(microbatch: int) -> "Subject":
            smaller = trace(model, batch=microbatch, seq_len=seq_len)
            require_independent(traced, smaller)
            return smaller, measure(smaller, machine, names, **same)

        cut = inputs is None and isinstance(model, str) and batch > 1 and measuring.shortest_measurement_s(profile) < budget_s
        found = search(
            traced,
            profile,
            machine,
            wanted,
            backends=[backend for backend in names if backend in measured_backends(profile, machine)],
            budget_s=budget_s,
            queue_depth=queue_depth,
            time_limit_s=time_limit_s,
            seed=seed,
            subject_for=subject_for if cut else None,
            workspace=workspace,
            log=log,
            progress=step("search"),
        )
        report = run(
            found.traced,
            found.plan,
            machine,
            profile=found.profile,
            profiles=profiles,
            wanted=wanted,
            backends=backends,
            whole=(traced, profile) if found.plan.microbatch < batch else None,
            num_requests=num_requests,
            num_rounds=num_rounds,
            also=[name for name in installed() if name not in names] if backends is None and not wanted.forced else (),
            compile_s=COMPILE_BUDGETS * budget_s,
            workspace=workspace,
            progress=step("run"),
        )
    kept = keep_search(found, profiles) if profiles is not None else ()
    notes = (*traced.notes, *wanted.notes(traced.graph), *report.notes, *kept)
    report = replace(report, notes=notes)
    used = found.traced if report.best.plan.microbatch == found.plan.microbatch else traced
    return AutoResult(machine, found.profile, found, report, used)


def keep_search(found: "SearchResult", profiles: Path) -> tuple[str, ...]:
    """Store what a search measured, its stages and runs, for the next one to begin with. Returns why that failed, if it did."""
    notes: list[str] = []
    ran = [(trial.plan, trial.outcome) for trial in found.trials if trial.outcome is not None]
    runs = [run_of("searched", found.traced.graph.name, PLAN, plan, outcome, now()) for plan, outcome in ran]
    with measuring.Store(profiles).noted(notes) as store:
        store.save(found.traced.graph, found.profile, dict.fromkeys(stage.setting for stage in found.profile.stages))
        store.add_runs(run for run in runs if run is not None)
    return tuple(notes)


def now() -> str:
    """The date and time, as measurements and runs are stamped with it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def load_plan(
    path: str | Path, model: Model | None = None, *, inputs: Inputs | None = None, trust: bool = False
) -> tuple[Plan, Traced, Machine]:
    """Read a plan file, trace its model, and parse the devices that it names.

    ``model`` is the module, which a plan made from a Python object needs, or the plan's spec, where that names the user's code.
    Raises: PlanError: the file is not a plan, or was made for another graph. UsageError: ``model`` is missing or another one.
    """
    file = read_plan(Path(path))
    spec = file.source.spec
    source = spec if model is None else model
    made_for = f"plan '{path}' is for {f'model {spec!r}' if spec else 'a Python object'}"
    if model is None and not spec:
        raise UsageError(f"{made_for}, which a file cannot hold; use autosplit.load_plan(path, model=module, inputs=...)")
    if model is None and not spec.startswith(TRUSTED):
        raise UsageError(f"{made_for}, code that autosplit does not run unasked; pass --model '{spec}' if you trust it")
    if isinstance(source, str | Path) and str(source) != spec:
        raise UsageError(f"{made_for}, and not for '{source}'")
    sizes: dict[str, Any] = {"batch": file.microbatch, "seq_len": file.source.seq_len} if source == spec else {}
    traced = trace(source, inputs=inputs, trust=trust, **sizes)
    return file.resolve(traced.graph), traced, Machine.of(map(parse_device, file.devices))


def require_exportable(folder: Path, to: str) -> None:
    """What ``export`` can refuse before there is a model. Raises: UsageError, MissingExtraError: as ``export``."""
    if to != "onnxruntime":
        raise UsageError(f"runtime '{to}' is not one that autosplit exports to; valid: onnxruntime")
    bundle.require_free(Path(folder))


def export(traced: Traced, plan: Plan, folder: Path, to: str = "onnxruntime") -> Path:
    """Write the plan's stages for another runtime, with a manifest and a short loader.

    Raises: UsageError: unknown runtime, a plan in bf16, or a folder that holds something or cannot be written. BackendError: an
        op cannot be expressed there.
    """
    require_exportable(folder, to)
    if plan.precision != "f32":
        raise UsageError(f"the plan computes in {plan.precision}, and an export does in f32; plan again with --precision f32")
    programs = split(traced, [stage.ops for stage in plan.stages])
    inputs = [traced.specs[name] for name in traced.graph.inputs]
    return bundle.export(programs, inputs, traced.graph.outputs, folder, model=traced.graph.name)
