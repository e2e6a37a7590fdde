"""``generator``: a language model on the devices of a machine, as an object that goes on with sequences of tokens."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from torch import nn

from autosplit.api import measure, search
from autosplit.arguments import checked
from autosplit.deploying.setup import BUDGET, SETUP, Budget, Setup
from autosplit.devices.discovering import Devices, as_machine
from autosplit.errors import UsageError
from autosplit.generating.generators import Generator
from autosplit.generating.sampling import SAMPLE
from autosplit.generating.sequences import Capacity
from autosplit.generating.steps import step_family, step_traffic
from autosplit.generating.texts import load_texts
from autosplit.progress import progress_shown
from autosplit.running.engine import Engine
from autosplit.shapes.pipelines import open_engine
from autosplit.shapes.service import measured
from autosplit.tracing.family import Family
from autosplit.tracing.loading import load_model
from autosplit.tracing.programs import weight
from autosplit.values.constraints import Constraints
from autosplit.values.plan import Plan
from autosplit.values.sequences import Sequences


@checked
def generator(
    model: str | Path | nn.Module,
    devices: Devices | None = None,
    constraints: Constraints | None = None,
    *,
    max_sequences: int = 16,
    max_length: int = 1024,
    prompt: int = 128,
    new: int = 64,
    setup: Setup = SETUP,
    budget: Budget | float = BUDGET,
) -> Generator:
    """Trace, measure and plan a language model for the traffic, and open the plan: keys and values stay in its stages.

    ::

        with autosplit.generator("transformers:LlamaForCausalLM?num_hidden_layers=4", devices="cpu:0,cpu:1") as generator:
            for token in generator.stream(prompt_ids):
                ...

    Args:
        model: a spec, a causal language model of transformers, or a module that calls ``autosplit.KVCache``.
        devices: the devices, or their names, as a list or with commas between; by default all of this machine.
        constraints: demands on the plan. Stages have no replicas, as a sequence belongs to the caches of one.
        max_sequences: sequences side by side; others wait.
        max_length: tokens of a sequence, those of its prompt included.
        prompt, new: tokens of a usual prompt and of its answer, for which the plan is made.
        setup: backends, precision, store, and the progress function.
        budget: limits of time, or seconds for the planner.
    Raises: ModelError: the model has no caches that stages can keep. UsageError: a number is below 1, or there are hosts.
        Others as ``search`` and ``open_pipeline``.
    """
    if setup.hosts is not None:
        raise UsageError("the caches of a generator are on this machine; leave out the hosts of the setup")
    wanted, machine = replace(constraints or Constraints(), max_replicas=1), as_machine(devices)
    wanted.require_consistent(machine)
    with progress_shown(setup.progress) as progress:
        setup = replace(setup, progress=progress)
        progress("trace", 0.0, "loading the model and capturing its graph")
        family = step_family(module_of(model), max_sequences, max_length)
        progress("trace", 1.0, "done")
        prompt = min(prompt, max_length)
        traffic = step_traffic(prompt, new, max_sequences)
        profile = measure(family, machine, traffic=traffic, setup=setup, then_search=True)
        found = search(family, profile, machine, wanted, setup=setup, budget=budget)
        spec = "" if isinstance(model, nn.Module) else str(model)
        sequences = Sequences(prompt, max(1, min(new, max_length - prompt + 1)), max_sequences, max_length)
        plan = replace(found.plan, source=replace(found.plan.source, spec=spec), sequences=sequences)
        return open_generator(family, plan, machine)


@checked
def open_generator(family: Family, plan: Plan, devices: Devices | None = None) -> Generator:
    """A plan of ``step_family`` as a running generator; errors as for ``open_pipeline``."""
    engine, opened = open_engine(family.variants, plan, devices)
    kept = ExitStack()
    with opened:
        generator = generator_on(engine, family, plan, kept)
        kept.push(opened.pop_all())  # not before: a generator that cannot be made leaves its engine to this block
        return generator


def generator_on(engine: Engine, family: Family, plan: Plan, opened: ExitStack | None = None) -> Generator:
    """A generator over a network that runs the plan; ``opened`` closes it, by default others do."""
    num_devices = len({device for stage in plan.stages for device in stage.devices})
    capacity, texts = _capacity(family), load_texts(plan.source.spec)
    buckets = measured(family, engine)
    return Generator(engine, buckets, capacity, num_devices, plan=plan, graph=family.graph, texts=texts, opened=opened)


def module_of(model: str | Path | nn.Module) -> nn.Module:
    """The module that a spec names, or that is given. Raises: as ``load_model``. UsageError: an exported program."""
    if isinstance(model, nn.Module):
        return model
    if str(model).endswith(".pt2"):
        raise UsageError(f"'{model}' is an exported program, which computes whole sequences; give the module that it was made of")
    module = load_model(model).module
    assert isinstance(module, nn.Module)  # only a .pt2 file holds anything else
    return module


def _capacity(family: Family) -> Capacity:
    """What the caches of a model hold."""
    traced = family.variants[0]
    [sample] = [node for node in traced.program.graph.nodes if node.target is SAMPLE]
    logits, history = sample.all_input_nodes[:2]
    num_slots, max_length = weight(traced.program, str(history.target)).shape
    return Capacity(num_slots - 1, max_length, traced.specs[logits.name].shape[1])
