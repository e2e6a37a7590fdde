"""``generator``: a language model on the devices of a machine, as an object that continues sequences of tokens."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from autosplit.api import measure, search, trace
from autosplit.arguments import checked
from autosplit.backends.apart import kept
from autosplit.backends.workspace import Workspace
from autosplit.deploying.footprints import Footprints
from autosplit.deploying.setup import BUDGET, SETUP, Budget, Setup
from autosplit.devices.discovering import Devices, as_machine
from autosplit.generating.generators import Generator
from autosplit.generating.opening import capacity_of, open_in
from autosplit.generating.phases import demands_of, require_caches_here
from autosplit.generating.sampling import Sampling
from autosplit.generating.sequences import new_generation
from autosplit.generating.trials import stats_of
from autosplit.keeping import keep_footprints
from autosplit.preloading import settle
from autosplit.progress import progress_shown
from autosplit.values.constraints import Constraints
from autosplit.values.machine import Machine
from autosplit.values.sequences import Sequences


@checked
def generator(
    model: str | Path | nn.Module,
    devices: Devices | None = None,
    constraints: Constraints | None = None,
    *,
    max_sequences: int = 16,
    max_length: int = 1024,
    prompt: int | None = None,
    new: int | None = None,
    prompts: Sequence[Sequence[int] | torch.Tensor] = (),
    max_new_tokens: int = 1,
    first_token_s: float | None = None,
    per_token_s: float | None = None,
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
        devices: the cores, or their names, as a list or with commas between; by default each core of this machine.
        constraints: demands on the plan. Stages have no replicas, as a sequence belongs to the caches of one; whole models may
            stand side by side. The objective ``latency`` is the time from one token of a sequence to its next one.
        max_sequences: sequences side by side; others wait.
        max_length: tokens of a sequence, those of its prompt included; with an encoder of an answer, and of a prompt.
        prompt, new: tokens of a usual prompt and of its answer, for which the plan is made; None for 128 and 64, or as many as
            fit.
        prompts: prompts that will come. One that the model cannot take, or without room for ``max_new_tokens``, is refused before
            anything is measured.
        max_new_tokens: new tokens after each of ``prompts``.
        first_token_s, per_token_s: limits, as for ``Sequences``.
        setup: backends, precision, store, and the progress function.
        budget: limits of time, or seconds for the planner.
    Raises: ModelError: the model has no caches that stages can keep. UsageError: numbers or prompts do not fit, or there are
        hosts or accelerators. Others as ``search`` and ``open_pipeline``.
    """
    require_caches_here(machine := as_machine("cpu" if devices is None else devices), setup)
    demands_of(constraints).require_consistent(machine)
    usual = Sequences()
    prompt = max(1, min(usual.prompt, max_length)) if prompt is None else prompt
    new = max(1, min(usual.new, max_length - prompt + 1)) if new is None else new
    sequences = Sequences(prompt, new, max_sequences, max_length, first_token_s, per_token_s)
    opened = _opened(model, machine, constraints, sequences, (prompts, Sampling(max_new_tokens)), setup, budget)
    settle()
    return opened


def _opened(
    model: str | Path | nn.Module,
    machine: Machine,
    constraints: Constraints | None,
    sequences: Sequences,
    asked: tuple[Sequence[Sequence[int] | torch.Tensor], Sampling],
    setup: Setup,
    budget: Budget | float,
) -> Generator:
    """The generator of a model, with the memory that its workers hold in its plan."""
    with progress_shown(setup.progress) as progress, ExitStack() as held, kept():
        workspace = held.enter_context(Workspace())  # the stages that are measured are those that run, or parts of them
        setup = replace(setup, progress=progress, workspace=workspace)
        progress("trace", 0.0, "loading the model and capturing its graph")
        family = trace(model, generate=sequences)
        progress("trace", 1.0, "done")
        for one in asked[0]:
            new_generation(one, None, asked[1], capacity_of(family))
        profile = measure(family, machine, setup=setup, then_search=demands_of(constraints))
        found = search(family, profile, machine, constraints, setup=setup, budget=budget)
        opened = open_in(workspace, family, found.plan, machine, held, progress)
        footprints = Footprints(machine, None, family.variants[1:])
        plan = opened.plan or found.plan
        footprints.note(family.variants[0], plan, stats_of(opened).stages)
        keep_footprints(family, profile, footprints, setup)
        opened.plan = footprints.account(family.variants[0], profile).counted(plan)
        return opened
