"""``open_generator``: a plan of steps as a running generator."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from autosplit.arguments import checked
from autosplit.backends.apart import kept
from autosplit.devices.discovering import Devices
from autosplit.devices.limits import available_bytes
from autosplit.errors import UsageError
from autosplit.generating.forecast import devices_of, replicas_of
from autosplit.generating.generators import Generator
from autosplit.generating.sampling import SAMPLE
from autosplit.generating.sequences import Capacity
from autosplit.generating.sidebyside import SideBySide
from autosplit.generating.steps import StepFamily
from autosplit.generating.texts import load_texts
from autosplit.memory.account import Account
from autosplit.running.engine import Engine
from autosplit.running.modules import StageFolder
from autosplit.shapes.pipelines import open_engine
from autosplit.shapes.service import measured
from autosplit.tracing.aliasing import values_of
from autosplit.tracing.family import Family
from autosplit.tracing.splitting import saved_weight
from autosplit.values.plan import Plan
from autosplit.values.samples import FROM_ONNX


@checked
def open_generator(family: Family, plan: Plan, devices: Devices | None = None) -> Generator:
    """A plan of ``step_family`` as a running generator.

    Where each stage has the same number of devices above 1, so many pipelines run side by side, each with its share of the
    sequences. Where twice the weights exceed the free memory, stages hold them in one form, which the generator's plan says.

    Raises: UsageError: the family has no steps. PlanError: the stages have different numbers of devices. Others as
        ``open_pipeline``.
    """
    plan = _in_free_memory(family, plan)
    plans = replicas_of(plan)
    with kept(), ExitStack() as opened:
        found = [opened.enter_context(_opened(family, one, devices, len(plans))) for one in plans]
        opened.pop_all()  # from here on the caller closes them
        generator = side_by_side(found, plan)
        generator.notes = family.notes
        return generator


def _in_free_memory(family: Family, plan: Plan) -> Plan:
    """The plan, in one form where twice the weights of its stages that could be in two exceed the free memory of this machine."""
    ops = [op for stage in plan.stages if stage.backend in FROM_ONNX for op in stage.ops if op in family.graph.index]
    if 2 * family.graph.stage_bytes(tuple(ops)) <= available_bytes():
        return plan
    return Account(family.graph, values_of(family.variants[0], family.variants[1:])).in_one_form(plan, plan.devices)


def side_by_side(generators: Sequence[Generator], plan: Plan) -> Generator:
    """The generators of a plan's replicas as one."""
    return generators[0] if len(generators) == 1 else SideBySide(generators, plan)


def _opened(family: Family, plan: Plan, devices: Devices | None, num_replicas: int) -> Generator:
    """One pipeline as a generator."""
    capacity_of(family)  # before any process starts
    engine, opened = open_engine(family, plan, devices)
    its = ExitStack()
    with opened:
        generator = generator_on(engine, family, plan, num_replicas, its)
        its.push(opened.pop_all())  # not before: a generator that cannot be made leaves its engine to this block
        return generator


def generator_on(engine: Engine, family: Family, plan: Plan, num_replicas: int = 1, opened: ExitStack | None = None) -> Generator:
    """A generator over a network that runs one of a plan's replicas; ``opened`` closes it, by default others do."""
    capacity, texts = capacity_of(family), load_texts(plan.source.spec)
    table = _mapped(engine, family.table) if isinstance(family, StepFamily) and family.table else None
    capacity = replace(capacity, max_sequences=-(-capacity.max_sequences // num_replicas), table=table)
    buckets, num_devices = measured(family, engine), len(devices_of(plan))
    return Generator(engine, buckets, capacity, num_devices, plan=plan, graph=family.graph, texts=texts, opened=opened)


def _mapped(engine: Engine, name: str) -> torch.Tensor:
    """A weight in the file of the stage that holds it, of which all processes on this machine share one copy."""
    folders = [stage.module.folder for stage in engine.wiring.stages if isinstance(stage.module, StageFolder)]
    return next(found for folder in folders if (found := saved_weight(folder, name)) is not None)


def capacity_of(family: Family) -> Capacity:
    """The capacity of the caches of a model. Raises: UsageError: it was not traced as steps."""
    if not isinstance(family, StepFamily):
        raise UsageError(f"'{family.graph.name}' was not traced to generate; trace it with generate='prompt=128,new=64'")
    traced, sequences = family.variants[0], family.sequences
    [sample] = [node for node in traced.program.graph.nodes if node.target is SAMPLE]
    vocabulary = traced.specs[sample.all_input_nodes[0].name].shape[1]
    return Capacity(sequences.max_sequences, sequences.max_length, vocabulary, family.source)
