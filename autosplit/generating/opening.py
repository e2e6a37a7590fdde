"""``open_generator``: a plan of steps as a running generator."""

from contextlib import ExitStack

from autosplit.arguments import checked
from autosplit.devices.discovering import Devices
from autosplit.generating.forecast import num_stages_of, replicas_of
from autosplit.generating.generators import Generator
from autosplit.generating.sampling import SAMPLE
from autosplit.generating.sequences import Capacity
from autosplit.generating.sidebyside import SideBySide
from autosplit.shapes.pipelines import open_engine
from autosplit.shapes.service import measured
from autosplit.tracing.family import Family
from autosplit.tracing.programs import weight
from autosplit.values.plan import Plan


@checked
def open_generator(family: Family, plan: Plan, devices: Devices | None = None) -> Generator:
    """A plan of ``step_family`` as a running generator.

    Where each stage has the same number of devices above 1, so many pipelines run side by side, each with its share of the
    sequences.

    Raises: PlanError: its stages have different numbers of devices. Others as ``open_pipeline``.
    """
    plans, capacity = replicas_of(plan), capacity_of(family)
    most = -(-capacity.max_sequences // len(plans))
    capacity = Capacity(most, capacity.max_length, capacity.vocabulary)
    with ExitStack() as opened:
        found = [opened.enter_context(_opened(family, one, devices, capacity)) for one in plans]
        opened.pop_all()  # from here on the caller closes them
        return found[0] if len(plans) == 1 else SideBySide(found, plan)


def _opened(family: Family, plan: Plan, devices: Devices | None, capacity: Capacity) -> Generator:
    """One pipeline as a generator."""
    engine, opened = open_engine(family.variants, plan, devices)
    with opened:
        buckets = measured(family, engine)
        return Generator(engine, buckets, capacity, num_stages_of(plan), plan=plan, opened=opened.pop_all())


def capacity_of(family: Family) -> Capacity:
    """What the caches of a model hold."""
    traced = family.variants[0]
    [sample] = [node for node in traced.program.graph.nodes if node.target is SAMPLE]
    logits, history = sample.all_input_nodes[:2]
    num_slots, max_length = weight(traced.program, str(history.target)).shape
    return Capacity(num_slots - 1, max_length, traced.specs[logits.name].shape[1])
