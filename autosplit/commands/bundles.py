"""Make a bundle of plans, show it, or verify it."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from autosplit.commands.console import err, load_plan, say, show
from autosplit.commands.options import Output, PlansModel
from autosplit.commands.report import table
from autosplit.errors import UsageError
from autosplit.progress import bars

NUM_WORDS = {"show": 1, "verify": 1, "run": 1, "compare": 2}
"""Action on bundles or dumps to the number of names that it takes."""


@dataclass(frozen=True, kw_only=True)
class Bundle(Output):
    """Bundle."""

    words: Annotated[
        list[str],
        typer.Argument(
            metavar="PLAN... BUNDLE | show|verify|run BUNDLE | compare DUMP DUMP",
            help="Plans, and the bundle to make of them (NAME=PLAN names an entry point); or what to do with a bundle.",
        ),
    ]
    zip: Annotated[bool, typer.Option("--zip", help="Write one file in place of a folder.")] = False
    trust: Annotated[
        bool,
        typer.Option(
            "--trust", help="Trust the maker of the bundle: its native code and all its operators run with your rights."
        ),
    ] = False
    network: Annotated[str | None, typer.Option(help="For run: the entry point, if there are several.")] = None
    policy: Annotated[Literal["serial", "threads", "processes"], typer.Option(help="For run: who computes.")] = "serial"
    devices: Annotated[str | None, typer.Option(help="For run: devices, as for the other commands; default: the plan's.")] = None
    inputs: Annotated[Path | None, typer.Option(help="For run: a dump with the inputs; default: random ones, seed 0.")] = None
    dump: Annotated[Path | None, typer.Option(help="For run: a new folder for every tensor on a cut.")] = None
    model: PlansModel = None


def bundle(given: Bundle) -> None:
    """Make a bundle of plans, which runs without the model; show, verify or run a bundle; compare the dumps of two runs."""
    action, *rest = given.words
    if action not in NUM_WORDS:
        if not rest:
            meant = f"show {action}" if action.endswith(".asb") else f"{action} app.asb"
            raise UsageError(f"'{action}' alone says too little; write: autosplit bundle {meant}")
        return _make(given, given.words[:-1], Path(given.words[-1]))
    if len(rest) != NUM_WORDS[action]:
        raise UsageError(
            f"'bundle {action}' takes {NUM_WORDS[action]} name{'s' * (NUM_WORDS[action] > 1)}, and {len(rest)} are given"
        )
    actions: dict[str, Callable[..., None]] = {"show": _show, "verify": _show, "run": _run, "compare": _compare}
    return actions[action](given, *map(Path, rest))


def _make(given: Bundle, plans: list[str], path: Path) -> None:
    from autosplit.bundling.bundler import require_absent, write_bundle
    from autosplit.bundling.crosscheck import check_bundle

    require_absent(path)
    networks: dict[str, Any] = {}
    with bars(err) as progress:
        for text in plans:
            name, equals, plan = text.rpartition("=")
            loaded = load_plan(plan, given.model, progress, len(networks) / len(plans))
            name = name if equals else loaded.traced.graph.name
            if name in networks:
                raise UsageError(f"two networks are named '{name}'; name each, as in first={plans[0]} second={text}")
            networks[name] = loaded.family or loaded.traced, loaded.plan.verify(loaded.traced.graph, loaded.machine)
        manifest = write_bundle(networks, path, zipped=given.zip, trust=given.trust, progress=progress)
        progress("check", 0.0, "comparing its outputs with the model's")
        errors = check_bundle(path, networks)
    for name, error in errors.items():
        say(f"network '{name}' is off by {error.relative:.3g} of the largest value from the model")
    _show_manifest(given, path, manifest)


def _show(given: Bundle, path: Path) -> None:
    from autosplit.bundling.manifest import check_files
    from autosplit.bundling.packing import unpacked

    verify = given.words[0] == "verify"
    with unpacked(path) as (folder, manifest):
        if verify:
            check_files(folder, manifest.files, hashed=True)
    _show_manifest(given, path, manifest)
    if verify:
        say(f"every file of '{path}' has the size and the hash that the manifest says")


def _run(given: Bundle, path: Path) -> None:
    from autosplit.bundling.dumps import example_inputs, read_dump, write_dump
    from autosplit.bundling.openbundle import load_bundle

    kept = read_dump(given.inputs) if given.inputs else None
    with bars(err) as progress:
        progress("load", 0.0, f"opening '{path}'")
        started = time.perf_counter()
        with load_bundle(
            path,
            network=given.network,
            policy=given.policy,
            devices=given.devices,
            trust=given.trust,
            cuts=given.dump is not None,
        ) as bundle:
            inputs = {name: kept.values[name] for name in kept.inputs} if kept else example_inputs(bundle.network)
            bundle.run(inputs)
            first_s = time.perf_counter() - started
            started = time.perf_counter()
            bundle.run(inputs)
            next_s = time.perf_counter() - started
            if given.dump is not None:
                write_dump(bundle, given.policy, inputs, given.dump)
    data = {
        "network": bundle.name,
        "policy": given.policy,
        "first_answer_s": first_s,
        "next_answer_s": next_s,
        "dump": given.dump,
    }
    where = f"; every tensor on a cut is in '{given.dump}'" if given.dump else ""
    text = (
        f"'{bundle.name}' ({given.policy}): first answer {first_s:.3f} s after loading began, the next in {next_s * 1e3:.3g} ms"
    )
    show(given, data, f"{text}{where}")


def _compare(given: Bundle, one: Path, other: Path) -> None:
    from autosplit.bundling.dumps import differences_of, read_dump

    found = differences_of(read_dump(one), read_dump(other))
    first = next((row for row in found if row.absolute), None)
    text = f"'{one}' and '{other}' are equal, bit for bit, in all {len(found)} parts that they have in common"
    if first is not None:
        text = (
            f"the first part that differs is '{first.part}' ({first.backend} and {first.other_backend}): '{first.value}' is "
            f"off by {first.absolute:.3g}, {first.relative:.3g} of its largest value"
        )
    rows = [asdict(row) for row in found]
    show(given, {"first": asdict(first) if first else None, "parts": rows}, table(rows, "", text))


def _show_manifest(given: Bundle, path: Path, manifest: Any) -> None:
    from autosplit.bundling.showing import rows, summary

    data = {"bundle": str(path), "summary": summary(path, manifest), "parts": rows(manifest), **asdict(manifest)}
    show(given, data, table(rows(manifest), summary(path, manifest)))
