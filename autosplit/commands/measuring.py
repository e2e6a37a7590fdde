"""Show the devices of this machine, and measure a model on them."""

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from autosplit.commands import options
from autosplit.commands.console import err, say, say_notes, say_reused, show, trace
from autosplit.commands.machines import opened_machine
from autosplit.commands.report import table
from autosplit.commands.starting import start
from autosplit.errors import UsageError
from autosplit.progress import StepTimes, bars

SHOWN = 40
"""Number of runs that are listed; --json gives all."""


DETAILS = ("precision", "op_scale", "cut_per_MiB_s", "max_error", "source", "date")
"""Columns of a profile that only ``-v`` shows."""


@dataclass(frozen=True, kw_only=True)
class Shown(options.Clustered):
    """Devices and backends."""

    conformance: Annotated[bool, typer.Option("--conformance", help="List what backends compute otherwise than eager.")] = False


def devices(given: Shown) -> None:
    """List the devices of this machine, its limits, and the backends that are installed; or the hosts of a cluster."""
    if given.conformance:
        _conformance(given)
        return
    if given.cluster is not None:
        _hosts(given, given.cluster)
        return
    from autosplit.backends.base import states
    from autosplit.devices.discovering import describe

    found = describe(states())
    facts = [{"fact": key.replace("_", " "), "value": value} for key, value in found.facts.items()]
    views = table(facts, "machine"), table(found.devices, "devices"), table(found.backends, "backends")
    show(given, found.to_dict(), *views)


def _conformance(given: Shown) -> None:
    """The operators that were tried for the installed versions, and what backends compute otherwise than eager."""
    from autosplit.backends import faultstore
    from autosplit.backends.base import installed

    tables = {backend: faultstore.table(backend) for backend in faultstore.TRIED if backend in installed()}
    rows = faultstore.rows(tables)
    tried = [
        {"backend": backend, "cases": len(cases), "with_faults": sum(map(bool, cases.values()))}
        for backend, cases in tables.items()
    ]
    show(
        given,
        {"tried": tried, "faults": rows},
        table(tried, "operators tried alone"),
        table(rows, "computed otherwise than eager"),
    )


def _hosts(given: options.Clustered, name: str) -> None:
    """The hosts of a cluster, their devices, and the links between them."""
    from autosplit.clusters.cluster import Cluster
    from autosplit.costs.wires import Wires

    say(f"cluster {name}: looking for its nodes")
    with Cluster(name) as cluster:
        hosts, machine = cluster.rows(), cluster.machine
    wires = Wires(machine.wires)
    links = [
        {"from": a, "to": b, "latency_s": one.latency_s, "bytes_per_s": 1 / wires.s_per_byte(a, b)}
        for (a, b), one in machine.links.items()
    ]
    shared = [
        {"card": wire.name, "bytes_per_s": 1 / wire.s_per_byte} for wire in wires.all if len(wire.sources + wire.targets) > 2
    ]
    views = table(hosts, "hosts"), table(machine.rows(), "devices"), table(links, "links"), table(shared, "cards")
    show(given, {"hosts": hosts, "devices": machine.rows(), "links": links, "cards": shared}, *views)


def profile(given: options.Measure) -> None:
    """Measure every op of a model on every device and backend, and the links between them; or show how runs were predicted."""
    if given.accuracy:
        if given.model:
            raise UsageError(f"--accuracy shows the runs of all models in the store; leave out '{given.model}'")
        others = options.flags_of(options.Clustered, options.Devices, options.MeasuredModel, options.Profile)
        given.require_default(
            (one for one in others if one not in ("model", "profiles")),
            "--accuracy shows all runs of the store, and measures nothing",
        )
        _accuracy(given)
        return
    if not given.model:
        raise UsageError("no model is named: autosplit profile MODEL measures one, autosplit profile --accuracy needs none")
    start_s = start(lambda: given.backends)
    from autosplit import api, keeping

    started = keeping.now()
    with opened_machine(given) as (machine, hosts), bars(err) as progress:
        timed = StepTimes(progress, start_s)
        setup = given.setup(timed, hosts=hosts)
        traced = trace(given, timed, given.model)
        measured = api.measure(traced, machine, setup=setup)
    say_reused(measured, given.store, started)
    say(f"seconds of each step: {', '.join(f'{text} {seconds:.1f}' for text, seconds in timed.seconds.items())}")
    notes = [*traced.notes, *measured.notes]
    say_notes(measured.notes)
    data = {"model": traced.graph.name, "graph": traced.graph.hash, "profile": measured.hash, "ops": len(traced.graph.ops)}
    rows = measured.summary()
    data |= {"settings": rows, "links": [asdict(link) for link in measured.links], "notes": notes}
    data["step_seconds"] = timed.seconds
    hide = () if given.verbose else DETAILS
    show(given, data, table(rows, f"{traced.graph.name}: {len(traced.graph.ops)} ops", hide=hide))


def _accuracy(given: options.Measure) -> None:
    """All runs of the store, predicted against measured."""
    from autosplit.measuring.store import open_store

    found = open_store(given.store).accuracy()
    if not found.runs:
        raise UsageError(f"the store '{given.store}' holds no run yet: autosplit auto, search or run adds some")
    runs = [{key: value for key, value in row.items() if key != "date"} for row in found.rows()[-SHOWN:]]
    title = f"the last {SHOWN} of {len(found.runs)} runs" if len(found.runs) > SHOWN else f"{len(found.runs)} runs"
    views = table(runs, title), table(found.summary(), "size of the error: predicted over measured, less one")
    show(given, found.to_dict(), *views)
