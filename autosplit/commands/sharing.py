"""Plan several models for one host: those of the command line with their rates, or those of a YAML file."""

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from autosplit.commands import options
from autosplit.commands.console import err, log, require_equal, say_notes, show, trace, write_plan
from autosplit.commands.machines import opened_machine
from autosplit.commands.report import table
from autosplit.commands.starting import start
from autosplit.errors import UsageError
from autosplit.files import read_data, validated
from autosplit.planning.estimating import sources
from autosplit.progress import bars

FOR_ONE = (
    "cluster", "stages", "max_stages", "objective", "pin", "forbid", "allow", "together", "max_replicas", "any_sets",
    "max_latency", "min_stage", "dot", "isolate", "explain", "front", "pick",
    *options.flags_of(options.Simulated, options.Assumed),
)  # fmt: skip
"""Flags for one model."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")
    model: str
    rate_per_s: float = Field(gt=0, allow_inf_nan=False)
    max_latency: Annotated[float, BeforeValidator(options.seconds)] = inf
    weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    batch: int = Field(default=1, ge=1)
    seq_len: int | None = Field(default=None, ge=1)

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes of a request as flags."""
        return {"batch": str(self.batch), "seq_len": None if self.seq_len is None else str(self.seq_len)}


class _ModelsFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    models: dict[str, _Entry] = Field(min_length=1)


def is_for_several(given: options.Plans) -> bool:
    """Whether a search is for models that share a host."""
    return bool(given.more or given.is_given("rates") or Path(given.model).suffix in (".yaml", ".yml"))


def _entries(given: options.Plans) -> dict[str, _Entry]:
    """The models by name. Raises: UsageError: with every fault of the file, or of the command line."""
    path = Path(given.model)
    if path.suffix in (".yaml", ".yml"):
        given.require_default(["more", "rates", "batch", "seq_len"], f"'{path}' names the models and what is asked of each")
        data = read_data(path, "models", UsageError)
        return validated(_ModelsFile, data, UsageError, f"models file '{path}' is not understood").models
    specs, texts = [given.model, *(given.more or [])], [text for text in (given.rates or "").split(",") if text.strip()]
    if twice := sorted({spec for spec in specs if specs.count(spec) > 1}):
        raise UsageError(f"model '{twice[0]}' is given twice; name each in a YAML file, or give one of them another rate")
    if len(texts) != len(specs):
        raise UsageError(f"--rates has {len(texts)} rates for {len(specs)} models; give one for each, such as --rates 100,20,5")
    rows = {spec: {"model": spec, "rate_per_s": text, **given.request} for spec, text in zip(specs, texts, strict=True)}
    return validated(_ModelsFile, {"models": rows}, UsageError, "--rates cannot be used").models


def search_several(given: options.Plans) -> None:
    """Plan the models together, run them if the budget allows, and write a plan file for each."""
    given.require_default(FOR_ONE, "several models are planned by their rates, for the devices of one host")
    entries = _entries(given)
    start(lambda: given.backends)
    from autosplit.sharedhost import share

    budget = given.spending()
    with opened_machine(given, here=budget.search_s > 0) as (machine, _), bars(err) as progress:
        setup = given.setup(progress, log(given))
        weights = bool(sources(machine))
        models = {
            name: trace(replace(given, **entry.sizes), progress, entry.model, weights=weights) for name, entry in entries.items()
        }
        found = share(
            models,
            {name: entry.rate_per_s for name, entry in entries.items()},
            machine,
            max_latency_s={name: entry.max_latency for name, entry in entries.items()},
            weights={name: entry.weight for name, entry in entries.items()},
            setup=setup,
            budget=budget,
        )
    say_notes(found.notes)
    paths = {name: given.output.with_stem(f"{given.output.stem}-{number}") for number, name in enumerate(entries)}
    rows = found.rows()
    data: dict[str, Any] = {"factor": found.sharing.factor, "saturation": found.sharing.saturation}
    data |= {"best_of_ways": found.sharing.bound, "best_of_all_plans": found.sharing.relaxed, "sentences": found.sentences}
    data |= {"models": [{**row, "plan": str(paths[row["model"]])} for row in rows]}
    data |= {"notes": found.notes, "measured": found.measured, "rounds": found.rounds}
    try:
        show(given, data, table(rows, f"{len(rows)} models on one host", "\n".join(found.sentences)))
    finally:
        for name, plan in found.plans.items():
            write_plan(plan, found.traced[name].graph, paths[name])
    require_equal("; ".join(found.faults))
