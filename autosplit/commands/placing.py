"""Place the ops of a model on devices, and show the memory of a plan."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from autosplit.commands.console import err, load_plan, log, say, show, trace, write, write_plan
from autosplit.commands.machines import opened_machine
from autosplit.commands.options import Output, PlansModel, Profile
from autosplit.commands.pairs import pins_of
from autosplit.commands.report import table
from autosplit.errors import UsageError
from autosplit.progress import bars


@dataclass(frozen=True, kw_only=True)
class Annotate(Profile):
    """Places."""

    place: Annotated[
        list[str] | None,
        typer.Option(help="PATTERN=DEVICE, PATTERN=DEVICE,BACKEND or PATTERN=DEVICE,BACKEND,PRECISION (again for more)."),
    ] = None
    default: Annotated[str | None, typer.Option(help="Device of all other ops, or 'auto'; default: the first device.")] = None
    fallback: Annotated[str | None, typer.Option(help="Device of the ops that their own device cannot run.")] = None
    max_error: Annotated[
        float | None, typer.Option(min=0, help="Largest error against f32, as a share of the largest value.")
    ] = None
    priority: Annotated[list[str] | None, typer.Option(help="A pattern that wins over others (again for more).")] = None
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the parts as a plan file.")] = None
    picture: Annotated[Path | None, typer.Option(help="Draw the placed graph as an SVG file.")] = None
    dot: Annotated[Path | None, typer.Option(help="Write the placed graph as a Graphviz file (.dot).")] = None

    def places(self) -> dict[str, str | tuple[str, ...]]:
        """Pattern to site. Raises: UsageError: a pair without ``=``, or a pattern with two sites."""
        return {pattern: _site(text) for pattern, text in pins_of(self.place, "--place").items()}

    def site(self, text: str | None, flag: str) -> str | tuple[str, ...] | None:
        """The site that a flag names. Raises: UsageError: it names none."""
        if text is not None and not text.strip():
            raise UsageError(f"{flag} names no device; write {flag} cpu:0")
        return _site(text) if text is not None else None


@dataclass(frozen=True, kw_only=True)
class Memory(Output):
    """Memory."""

    plan: Annotated[Path, typer.Argument(help="A plan.yaml.")] = Path("plan.yaml")
    model: PlansModel = None
    measure: Annotated[bool, typer.Option("--measure", help="Run the plan, and show the peak memory of each worker.")] = False


def _site(text: str) -> str | tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split(","))
    return parts if len(parts) > 1 else parts[0]


def annotate(given: Annotate) -> None:
    """Put every op of a model on a device: by patterns, by a default, or by cost."""
    import autosplit.annotation as annotation
    from autosplit.placing.precisions import errors_of
    from autosplit.placing.sites import AUTO

    places = given.places()
    with opened_machine(given, here=False, timed=given.default == AUTO) as (machine, hosts), bars(err) as progress:
        traced = trace(given, progress, given.model)
        placed = annotation.annotate(
            traced,
            places,
            given.site(given.default, "--default"),
            given.site(given.fallback, "--fallback"),
            machine,
            priority=given.priority or (),
            setup=given.setup(progress, log(given), hosts),
            max_error=given.max_error,
        )
    for removed in placed.removed:
        say(f"note: removed: {removed}")
    data: dict[str, Any] = {"summary": placed.summary(), "ops": placed.rows(), "removed": list(placed.removed)}
    data["memory"] = {
        name: {"peak_bytes": plan.peak_bytes, "bound_bytes": plan.bound_bytes} for name, plan in placed.memory.items()
    }
    data["why"] = {op.name: placed.why(op.name) for op in placed.graph.ops}
    views: list[Any] = [placed.text()] if given.verbose else []
    rows = [{"device": name, **plan} for name, plan in data["memory"].items()]
    views += [table(rows, "memory of the values"), placed.summary()]
    if any(part.site.precision != "f32" for part in placed.parts):
        data["errors"] = [asdict(error) for error in errors_of(placed)]
        views.append(table(data["errors"], "error against f32"))
    try:
        show(given, data, *views)
    finally:
        write(given.picture, lambda: placed.picture().svg())
        write(given.dot, placed.dot)
        if given.output is not None:
            write_plan(placed.plan(), traced.graph, given.output)


def memory(given: Memory) -> None:
    """Show the memory of each stage of a plan: weights, values, its backend, slots of rings, its process."""
    from autosplit.deploying.footprints import Footprints
    from autosplit.deploying.networks import further_sizes
    from autosplit.memory.stages import stage_memories
    from autosplit.tracing.aliasing import values_of
    from autosplit.tracing.family import as_family

    with bars(err) as progress:
        loaded = load_plan(given.plan, given.model, progress, weights=given.measure)
        plan = loaded.plan
        variants = further_sizes(as_family(loaded.family or loaded.traced), plan.shapes, plan.backends)
        footprints = Footprints(loaded.machine, None, variants)
        counted = stage_memories(loaded.traced.graph, plan, values_of(loaded.traced, variants))
        known = [stage.memory or one for stage, one in zip(plan.stages, counted, strict=True)]
        if given.measure:
            progress("measure", 0.0, "running the plan")
            footprints.measure(loaded.traced, plan)
    rows = []
    for stage, one in zip(plan.stages, known, strict=True):
        row = {"stage": stage.name, "devices": " ".join(stage.devices), **asdict(one)}
        row["source"] = "measured" if row.pop("measured") else "counted"
        row["total_bytes"] = one.weight_bytes + one.beside_bytes
        found = footprints.footprint(loaded.traced, plan, stage)
        if found is not None:
            row |= {"held_bytes": found.held_bytes, "of_held": one.held_bytes / max(1, found.held_bytes)}
            row |= {"measured_base_bytes": found.base_bytes}
        rows.append(row)
    show(given, {"stages": rows}, table(rows, "memory of each replica"))
