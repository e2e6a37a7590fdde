"""The options of each command, as frozen values: their fields are the flags, the keys of a YAML file, and the help.

``command`` turns a function of one such value into a function that typer understands. A YAML file given with
``--config`` sets flags by their names (``-`` or ``_``); the command line wins over the file.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import typer

from autosplit.commands.configfile import read_config
from autosplit.commands.pairs import device_lists, pins_of
from autosplit.errors import UsageError, names
from autosplit.progress import Progress
from autosplit.values.constraints import ANY_NUMBER, Constraints
from autosplit.values.plan import MAX_QUEUE_DEPTH, QUEUE_DEPTH
from autosplit.values.samples import Precision, backend_fault, backends
from autosplit.values.shapes import Sizes, parse_sizes

if TYPE_CHECKING:
    from autosplit.deploying.setup import Budget, Hosts, Setup

BACKENDS_DEFAULT = "usual"
PLAN_FILE = Path("plan.yaml")

BACKEND_HELP = (
    "eager, onnxruntime, openvino, inductor, with commas between; "
    "'usual': all installed ones except inductor, which compiles for long (auto runs it as a baseline); 'all': inductor too."
)

MODEL_HELP = (
    "transformers:ClassName, transformers:FOLDER, hub:ORG/NAME, file.py:function, or a .pt2 file; ClassName?field=value&... sets "
    "its config, package.module:function is installed. A function is called, and returns (module, inputs)."
)

GENERATE_HELP = (
    "Plan a language model for sequences: prompt=128,new=64; further max_sequences=16 (side by side) and max_length=1024 "
    "(tokens); what is left out is as here. Limits: first_token_s=2, per_token_s=0.05."
)

MEMORY_HELP = (
    "Most that a device may hold: 300MB for each, or cpu:0=1GB with commas between; weights, values, what the backend packs, "
    "rings and the worker itself count ('autosplit memory' shows them)."
)

PlansModel = Annotated[
    str | None, typer.Option(help="The plan's model, if it is code of your own: naming it says that you trust it.")
]

Profiles = Annotated[
    Path | None, typer.Option(help="Folder of the profile store; default: autosplit/profiles in the user's cache folder.")
]

ProfileOf = Annotated[
    str, typer.Option(help="Without a run: another machine's stored profile for devices that are not here, such as H100.")
]

Dot = Annotated[Path | None, typer.Option(help="Write the ops in their stages as a Graphviz file (.dot).")]


def seconds(text: str | float) -> float:
    """Seconds from ``60s``, ``500ms``, ``250us``, ``2m`` or a number. Raises: UsageError: no duration.

    >>> seconds("500ms"), seconds("250us"), seconds("2m"), seconds("7")
    (0.5, 0.00025, 120.0, 7.0)
    """
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d+)?)\s*(us|ms|s|m|)\s*", str(text))
    if not match:
        raise UsageError(f"'{text}' is not a duration; write 500ms, 60s or 2m")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0}[match[2]]


def _sizes(text: str | None) -> str | None:
    """The callback of flags with sizes. Raises: BadParameter: they are none."""
    try:
        parse_sizes(text or "1")
    except UsageError as failure:
        raise typer.BadParameter(str(failure)) from None
    return text


def flag_name(field: str) -> str:
    """The name of a field as a flag of the command line."""
    return f"--{field.replace('_', '-')}"


def flags_of(*kinds: type) -> tuple[str, ...]:
    """The names of the flags that some classes of options have, without those of their bases."""
    return tuple(name for kind in kinds for name in vars(kind)["__annotations__"])


PLANNER_TIME = "10s"
"""Longest time of the planner for each set of backends, if no limit is given."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """Output."""

    json: Annotated[bool, typer.Option("--json", help="Write the result, or the failure, to stdout as JSON.")] = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the solver's log, and tracebacks.")] = False
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", is_eager=True, callback=read_config, help="YAML file of flags; the command line wins."),
    ] = None
    given: frozenset[str] = frozenset()
    """Names of the flags that the user gave; not a flag itself."""

    def is_given(self, flag: str) -> bool:
        """Whether the user gave a flag, on the command line or in an options file, also with the text of its default."""
        return flag in self.given

    @property
    def store(self) -> Path:
        """The folder where measurements are kept: ``--profiles``, or the user's own. Raises: UsageError: the user has no home."""
        from autosplit.measuring.store import user_root

        return getattr(self, "profiles", None) or user_root()

    def require_default(self, flags: Iterable[str], why: str) -> None:
        """Raises: UsageError: one of these flags is given."""
        given = [flag_name(flag) for flag in flags if self.is_given(flag)]
        if given:
            raise UsageError(f"{why}; leave out {', '.join(given)}")


@dataclass(frozen=True, kw_only=True)
class Clustered(Output):
    """Hosts."""

    cluster: Annotated[
        str | None, typer.Option(help="Hosts on Ray: auto, HOST:PORT, or local:3 for three nodes on this machine.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Devices(Clustered):
    """Devices."""

    devices: Annotated[str | None, typer.Option(help="cpu:0,cpu:1 or cpu:0-1 or cuda:0; default: each usable core.")] = None
    machine: Annotated[Path | None, typer.Option(help="YAML file of devices, memory caps and links.")] = None
    memory: Annotated[str | None, typer.Option(help=MEMORY_HELP)] = None


@dataclass(frozen=True, kw_only=True)
class MeasuredModel(Devices):
    """Model and measurement."""

    model: Annotated[str, typer.Argument(help=MODEL_HELP)]
    backend: Annotated[str, typer.Option(help=BACKEND_HELP)] = BACKENDS_DEFAULT
    profiles: Profiles = None
    remeasure: Annotated[bool, typer.Option(help="Measure again what the store already has.")] = False
    precision: Annotated[
        Precision, typer.Option(help="f32: the model's own dtypes; tf32, bf16, f16: the report says how far the outputs are off.")
    ] = "f32"

    @property
    def backends(self) -> tuple[str, ...]:
        """The backend names, in the order given; those installed for ``usual`` and ``all``. Raises: UsageError: none, unknown."""
        from autosplit.backends.base import installed, usual

        if self.backend in (BACKENDS_DEFAULT, "all"):
            return tuple(usual() if self.backend == BACKENDS_DEFAULT else installed())
        named = names("backend", self.backend)
        fault = backend_fault(*named) if named else f"--backend names none, the backends are {', '.join(backends())}"
        if fault:
            raise UsageError(f"{fault}; give names with commas between, or 'usual' or 'all' alone")
        return named

    def setup(self, progress: Progress, log: Callable[[str], None] | None = None, hosts: "Hosts | None" = None) -> "Setup":
        """How to measure. Raises: UsageError: a backend that does not exist. MissingExtraError: it is not installed."""
        from autosplit.deploying.setup import Setup

        return Setup(
            backends=None if self.backend == BACKENDS_DEFAULT else self.backends,
            precision=self.precision,
            store=self.store,
            remeasure=self.remeasure,
            progress=progress,
            log=log,
            hosts=hosts,
        )


@dataclass(frozen=True, kw_only=True)
class Profile(MeasuredModel):
    """Model and measurement."""

    batch: Annotated[
        str, typer.Option(callback=_sizes, help="Items in one request; search and auto also take a range: 1..16, or 1,2,4.")
    ] = "1"
    seq_len: Annotated[
        str | None,
        typer.Option(callback=_sizes, help="Tokens in one item, or a range like --batch: 16..512; default: the model's example."),
    ] = None
    trust: Annotated[bool, typer.Option("--trust", help="Read a .pt2 file, which can run code of its maker.")] = False
    values: Annotated[
        Literal["finite", "any"],
        typer.Option(help="any: requests may hold NaN, infinity, huge integers, ids beyond their tables."),
    ] = "finite"
    trust_backend: Annotated[str, typer.Option(help="Backends that get ops even where they compute otherwise than eager.")] = ""

    @property
    def sizes(self) -> dict[str, Sizes]:
        """The sizes of each dimension for requests of several sizes; empty for one size. Raises: UsageError: no sizes."""
        texts = {"batch": self.batch, "seq": self.seq_len}
        found = {dim: parse_sizes(text) for dim, text in texts.items() if text is not None}
        several = any(len(sizes) > 1 for sizes in found.values())
        return {dim: sizes for dim, sizes in found.items() if len(sizes) > 1 or sizes[0] > 1} if several else {}

    @property
    def request(self) -> dict[str, int | None]:
        """Items and tokens of each request, where all have one size. Raises: UsageError: they have several."""
        if self.sizes:
            raise UsageError("requests of several sizes are for search, auto and run; give one number")
        [batch] = parse_sizes(self.batch)
        return {"batch": batch, "seq_len": None if self.seq_len is None else parse_sizes(self.seq_len)[0]}

    @property
    def trusted(self) -> tuple[str, ...]:
        """The backends that are trusted."""
        return names("trust_backend", self.trust_backend)


@dataclass(frozen=True, kw_only=True)
class Measure(Profile):
    """Accuracy."""

    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = ""
    accuracy: Annotated[
        bool, typer.Option("--accuracy", help="Show predicted against measured of all runs in the store; takes no MODEL.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class Search(Profile):
    """Plan and search."""

    OBJECTIVES: ClassVar[tuple[str, ...]] = ("throughput", "latency")
    generate: Annotated[str | None, typer.Option(help=GENERATE_HELP)] = None
    traffic: Annotated[
        Path | None,
        typer.Option(help="File of the sizes that come, a row each (CSV: batch, seq, count); default: all in the range alike."),
    ] = None
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The plan file to write; for a workload, its answer as JSON.")
    ] = PLAN_FILE
    stages: Annotated[int | None, typer.Option(min=1, help="Number of stages.")] = None
    max_stages: Annotated[int | None, typer.Option(min=1, help="Most stages.")] = None
    objective: Annotated[
        str, typer.Option(help="throughput, latency, or (search only) pareto; that is the front of both and memory.")
    ] = "throughput"
    pin: Annotated[list[str] | None, typer.Option(help="PATTERN=DEVICE: these ops on that device (again for more).")] = None
    forbid: Annotated[list[str] | None, typer.Option(help="PATTERN=DEVICE: these ops never on that device.")] = None
    allow: Annotated[list[str] | None, typer.Option(help="PATTERN=DEVICE: that device supports these ops, and no others.")] = None
    together: Annotated[list[str] | None, typer.Option(help="PATTERN: these ops in one stage.")] = None
    max_replicas: Annotated[int | None, typer.Option(min=1, help="Most replicas of a stage; 1 forbids replication.")] = None
    any_sets: Annotated[
        bool, typer.Option("--any-sets", help="A device may hold any set of ops; of a model, as several stages.")
    ] = False
    max_latency: Annotated[str | None, typer.Option(help="Most that one request may take, such as 50ms.")] = None
    min_stage: Annotated[str | None, typer.Option(help="Shortest stage, such as 1ms.")] = None
    queue_depth: Annotated[int, typer.Option(min=1, max=MAX_QUEUE_DEPTH, help="Slots of each ring.")] = QUEUE_DEPTH
    budget: Annotated[
        str, typer.Option(help="Time for running candidate plans; 0s runs none. Measuring and comparing come on top.")
    ] = "30s"
    time_limit: Annotated[
        str, typer.Option(help="Most time of the planner for a set of backends; a fifth of the budget for all.")
    ] = PLANNER_TIME
    profile_of: ProfileOf = ""
    max_error: Annotated[
        float | None,
        typer.Option(min=0, help="Stages on accelerators may be in lower precisions, off by at most this share of a value."),
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of every random choice.")] = 0
    dot: Dot = None
    isolate: Annotated[bool, typer.Option("--isolate", help="Keep the model out of the process that calls it.")] = False

    def setup(self, progress: Progress, log: Callable[[str], None] | None = None, hosts: "Hosts | None" = None) -> "Setup":
        """How to measure and plan; errors as for ``MeasuredModel.setup``."""
        setup = super().setup(progress, log, hosts)
        return dataclasses.replace(
            setup,
            queue_depth=self.queue_depth,
            seed=self.seed,
            isolate=self.isolate,
            profile_of=self.profile_of,
            max_error=self.max_error,
        )

    def spending(self) -> "Budget":
        """Limits of time for the search and the report."""
        from autosplit.deploying.setup import Budget

        planner_s = seconds(self.time_limit) if self.is_given("time_limit") else None
        return Budget(search_s=seconds(self.budget), planner_s=planner_s)

    def constraints(self) -> Constraints:
        """The demands as a value. Raises: UsageError: a pair without ``=``, an unknown objective, no duration."""
        if self.objective not in self.OBJECTIVES:
            raise UsageError(f"objective '{self.objective}' is not known; valid: {', '.join(self.OBJECTIVES)}")
        return Constraints(
            objective="latency" if self.objective == "latency" else "throughput",
            num_stages=self.stages,
            max_stages=self.max_stages,
            max_replicas=self.max_replicas or ANY_NUMBER,
            contiguous=not self.any_sets,
            pins=pins_of(self.pin),
            forbids=device_lists(self.forbid, "--forbid"),
            allows=device_lists(self.allow, "--allow"),
            together=tuple(self.together or ()),
            max_latency_s=math.inf if self.max_latency is None else seconds(self.max_latency),
            min_stage_s=0.0 if self.min_stage is None else seconds(self.min_stage),
        )


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Simulation."""

    simulate: Annotated[
        int | None,
        typer.Option(min=1, help="Requests to simulate through queues, replicas and links; 1000 with a rate."),
    ] = None
    arrival_rate: Annotated[
        float | None,
        typer.Option(help="Requests a second (a workload file's own time unit) that come by chance; default: all wait at once."),
    ] = None
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace of the simulation.")] = None

    @property
    def num_simulated(self) -> int:
        """Requests to simulate; 0 without a flag that asks for a simulation."""
        asked = self.arrival_rate is not None or self.trace is not None
        return self.simulate or (1000 if asked else 0)


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """PipeDream files, which name no devices."""

    num_devices: Annotated[int, typer.Option(min=1, help="For a pipedream file: how many equal devices there are.")] = 4
    bandwidth: Annotated[float, typer.Option(help="For a pipedream file: bytes a second between two of them.")] = 1e9
    overlap: Annotated[
        bool, typer.Option("--overlap", help="For a pipedream file: devices compute and transfer at the same time.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class Plans(Simulated, Assumed, Search):
    """Answer."""

    OBJECTIVES: ClassVar[tuple[str, ...]] = ("throughput", "latency", "pareto")
    more: Annotated[list[str] | None, typer.Argument(help="More models for the same host; MODEL may be a YAML of all.")] = None
    rates: Annotated[str | None, typer.Option(help="Requests a second of each model that shares the host: 100,20,5.")] = None
    explain: Annotated[bool, typer.Option("--explain", help="Show the bottleneck, and the gain of each change.")] = False
    front: Annotated[Path | None, typer.Option(help="Folder for the plans of a Pareto front; default: plan-front/.")] = None
    pick: Annotated[
        int | None,
        typer.Option(min=0, help="With pareto: the number of the plan to write as --output."),
    ] = None
    format: Annotated[str, typer.Option(help="What MODEL is: model, or a planner's workload: dnn-partitioning, pipedream.")] = (
        "model"
    )

    @property
    def front_folder(self) -> Path:
        """The folder for the plans of a Pareto front."""
        return self.front or self.output.with_name(f"{self.output.stem}-front")

    def require_for_models(self) -> None:
        """Raises: UsageError: a flag is given that has no effect on a model."""
        self.require_default(flags_of(Assumed), "a model is planned for the devices of this machine")
        if self.objective != "pareto":
            self.require_default(["front", "pick"], "a front is what --objective pareto finds")

    def spending(self) -> "Budget":
        """Limits of time for the search; with ``--explain`` the explanation has the planner's time limit."""
        found = super().spending()
        return dataclasses.replace(found, explain_s=seconds(self.time_limit)) if self.explain else found
