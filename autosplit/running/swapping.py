"""Stages with other weights, for ``Engine.swap``."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import fx

from autosplit.backends.base import get_backend
from autosplit.errors import UsageError, raise_faults
from autosplit.running.modules import Module, StageFolder
from autosplit.running.stage import StagePlacement
from autosplit.running.wiring import Wiring
from autosplit.tracing.splitting import StageProgram, load_stage, save_stage
from autosplit.tracing.tensorspec import differences, laid_out, spec_of


def with_swapped_weights(
    wiring: Wiring, names: Sequence[str], group: str, weights: Mapping[str, torch.Tensor], folder: Path
) -> Wiring:
    """Save the stages of a group with their new weights, and return the wiring with them.

    Args:
        names: the stages of the group.
        weights: new tensors by weight name; other weights stay.
        folder: an empty folder for the stages with their new weights.
    Raises: UsageError: a weight is unknown, or a tensor does not fit. BackendError: a backend cannot run a stage.
    """
    if not isinstance(weights, Mapping):
        raise UsageError(f"weights must be a mapping of names to tensors, but are {type(weights).__name__}")
    if not isinstance(folder, Path):
        raise UsageError(f"folder must be the path of an empty folder, but is {folder!r}")
    members = {stage.name: stage for stage in wiring.stages if stage.name in names and isinstance(stage.module, StageFolder)}
    programs = {name: _program(stage) for name, stage in members.items()}
    raise_faults(UsageError, f"the weights do not fit group '{group}'", _faults(programs, weights))
    for name, program in programs.items():
        if program.weights.keys() & weights.keys():
            members[name] = _swapped(members[name], weights, folder / name)
    return replace(wiring, stages=tuple(members.get(stage.name, stage) for stage in wiring.stages))


def _program(stage: StagePlacement) -> StageProgram:
    module = cast(StageFolder, stage.module)
    return load_stage(module.folder, trust=module.trust)


def _swapped(stage: StagePlacement, weights: Mapping[str, torch.Tensor], folder: Path) -> StagePlacement:
    """The stage with other weights, saved once for all of its variants; variants of one module keep one."""
    made: dict[Module, StageFolder] = {}
    for number, one in enumerate(stage.at_each_size()):
        if one.module in made:
            continue
        module, changed = cast(StageFolder, one.module), with_weights(_program(one), weights)
        target = folder.with_name(f"{folder.name}-{number}") if number else folder
        first = folder if number else None
        save_stage(changed, target, first)
        get_backend(module.backend).prepare(changed, target, module.precision, first)
        made[module] = replace(module, folder=target)
    variants = [replace(one, module=made[one.module]) for one in stage.variants]
    return replace(stage, module=made[stage.module], variants=tuple(variants))


def with_weights(program: StageProgram, weights: Mapping[str, torch.Tensor]) -> StageProgram:
    """The stage with those of ``weights`` that it reads, in the layout of the weights that they replace."""
    merged = dict(program.weights)
    for name in merged.keys() & weights.keys():
        old = merged[name]
        new = laid_out(weights[name].detach(), replace(spec_of(name, old), offset_bytes=0))
        merged[name] = new.detach().requires_grad_(old.requires_grad)
    return replace(program, module=fx.GraphModule(merged, program.module.graph, class_name=type(program.module).__name__))


def _faults(programs: Mapping[str, StageProgram], weights: Mapping[str, torch.Tensor]) -> list[str]:
    known = {name: tensor for one in programs.values() for name, tensor in one.weights.items() if name not in one.states}
    faults = [f"no stage of the group reads '{name}'" for name in weights if name not in known]
    for name, tensor in weights.items():
        if name in known:
            faults += differences([spec_of(name, known[name])], [tensor])
    return faults
