"""``open_generator``: a plan of steps as a running generator."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch

from autosplit.arguments import checked
from autosplit.backends.apart import kept
from autosplit.backends.workspace import Workspace
from autosplit.devices.discovering import Devices
from autosplit.errors import UsageError
from autosplit.generating.forecast import devices_of, replicas_of
from autosplit.generating.generators import Generator
from autosplit.generating.sampling import SAMPLE
from autosplit.generating.sequences import Capacity
from autosplit.generating.steps import StepFamily
from autosplit.generating.texts import load_texts
from autosplit.progress import Progress, progress_shown
from autosplit.running.engine import Engine
from autosplit.running.modules import StageFolder
from autosplit.shapes.pipelines import open_engine
from autosplit.shapes.service import measured
from autosplit.tracing.family import Family
from autosplit.tracing.splitting import saved_weight
from autosplit.values.plan import Plan

PREPARING = 0.85
"""The share of the time of opening in which stages are prepared; then workers load them."""


@checked
def open_generator(family: Family, plan: Plan, devices: Devices | None = None, *, progress: bool | Progress = False) -> Generator:
    """A plan of ``step_family`` as a running generator.

    Where each stage has the same number of devices above 1, so many pipelines run side by side, each with its share of the
    sequences. ``progress`` is as in ``Setup``.

    Raises: UsageError: the family has no steps. PlanError: the stages have different numbers of devices. Others as
        ``open_pipeline``.
    """
    with progress_shown(progress) as shown, ExitStack() as held:
        return open_in(held.enter_context(Workspace()), family, plan, devices, held, shown)


def open_in(
    workspace: Workspace, family: Family, plan: Plan, devices: Devices | None, held: ExitStack, progress: Progress
) -> Generator:
    """``open_generator`` of stages in a workspace, where some may be prepared; the generator also closes what ``held`` holds."""
    its, number, replicas = ExitStack(), count(1), replicas_of(plan)
    num_stages = sum(len(one.stages) for one in replicas) * len(family.variants)

    def prepared() -> None:
        done = next(number)
        text = "loading the stages" if done == num_stages else f"preparing stages at each size, {done} of {num_stages}"
        progress("load", PREPARING * done / num_stages, text)

    progress("load", 0.0, "preparing stages at each size")
    with kept(), ExitStack() as opened:
        opened.push(held.pop_all())

        def opened_engine(one: Plan) -> Engine:
            engine, resources = open_engine(family, one, devices, shared=workspace)
            opened.push(resources)
            return engine

        workspace.watch = prepared
        generator = generator_on(opened_engine, family, plan, its)
        progress("load", 1.0, "done")
        workspace.keep_files_only([folder for one in generator.pipelines if isinstance(one, Engine) for folder in _folders(one)])
        its.push(opened.pop_all())  # not before: a generator that cannot be made leaves its engines to this block
        generator.notes = family.notes
        return generator


def generator_on(open_one: Callable[[Plan], Engine], family: Family, plan: Plan, opened: ExitStack | None = None) -> Generator:
    """A generator over networks that run one of a plan's replicas each.

    ``open_one`` opens a replica; ``opened`` closes all, by default others do. Raises: UsageError: the family has no steps.
    """
    capacity, texts = capacity_of(family), load_texts(plan.source.spec)
    engines = list(map(open_one, replicas_of(plan)))
    table = _mapped(engines[0], family.table) if isinstance(family, StepFamily) and family.table else None
    capacity = replace(capacity, max_sequences=-(-capacity.max_sequences // len(engines)), table=table)
    (engine, buckets), *beside = [(one, measured(family, one)) for one in engines]
    num_devices, graph = len(devices_of(replicas_of(plan)[0])), family.graph
    return Generator(engine, buckets, capacity, num_devices, beside=beside, plan=plan, graph=graph, texts=texts, opened=opened)


def _mapped(engine: Engine, name: str) -> torch.Tensor:
    """A weight in the file of the stage that holds it, of which all processes on this machine share one copy."""
    return next(found for folder in _folders(engine) if (found := saved_weight(folder, name)) is not None)


def _folders(engine: Engine) -> list[Path]:
    """The folders of the stages at each size."""
    modules = [one.module for stage in engine.wiring.stages for one in stage.at_each_size()]
    return [module.folder for module in modules if isinstance(module, StageFolder)]


def capacity_of(family: Family) -> Capacity:
    """The capacity of the caches of a model. Raises: UsageError: it was not traced as steps."""
    if not isinstance(family, StepFamily):
        raise UsageError(f"'{family.graph.name}' was not traced to generate; trace it with generate='prompt=128,new=64'")
    traced, sequences = family.variants[0], family.sequences
    [sample] = [node for node in traced.program.graph.nodes if node.target is SAMPLE]
    vocabulary = traced.specs[sample.all_input_nodes[0].name].shape[1]
    return Capacity(sequences.max_sequences, sequences.max_length, vocabulary, family.source)
