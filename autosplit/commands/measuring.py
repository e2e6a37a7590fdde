"""What there is and how fast it is: the devices of this machine, and a profile of a model on them."""

from dataclasses import asdict

from autosplit import options
from autosplit.commands.console import err, json_safe, show


def devices(given: options.Output) -> None:
    """List the devices of this machine, its limits, and the backends that are installed."""
    from autosplit.discovering import describe
    from autosplit.report import table

    found = describe()
    facts = [{"fact": key.replace("_", " "), "value": value} for key, value in found.facts.items()]
    views = table(facts, "machine"), table(found.devices, "devices"), table(found.backends, "backends")
    show(given, found.to_dict(), *views)


def profile(given: options.Profile) -> None:
    """Measure every op of a model on every device and backend, and the links between them."""
    from autosplit import api
    from autosplit.discovering import machine_for
    from autosplit.progress import bars
    from autosplit.report import table

    machine = machine_for(given.devices, given.machine, given.memory)
    with bars(err) as start:
        start("trace")
        traced = api.trace(given.model, given.batch, given.seq_len)
        measured = api.measure(
            traced,
            machine,
            given.backends,
            profiles=given.profiles,
            remeasure=given.remeasure,
            precision=given.precision,
            progress=start("profile"),
        )
    for note in measured.notes:
        err.print(f"note: {note}", highlight=False)
    data = {"model": traced.graph.name, "graph": traced.graph.hash, "profile": measured.hash, "ops": len(traced.graph.ops)}
    rows = measured.summary()
    data |= {"settings": rows, "links": [asdict(link) for link in measured.links], "notes": list(measured.notes)}
    show(given, json_safe(data), table(rows, f"{traced.graph.name}: {len(traced.graph.ops)} ops"))
