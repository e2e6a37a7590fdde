"""Swap the weights of running stages: load new ones beside the old ones, then switch all stages at the same request."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import fx

from autosplit.backends.base import get_backend
from autosplit.errors import BackendError, UsageError, WorkerError, raise_faults
from autosplit.running.executor import Executor
from autosplit.running.lanes import Lanes
from autosplit.running.messages import Version
from autosplit.running.modules import Module, StageFolder
from autosplit.running.provisioner import LOAD_TIMEOUT_S, Deployment
from autosplit.running.stageworker import StageWorker
from autosplit.tracing.splitting import StageProgram, load_stage, save_stage
from autosplit.tracing.tensorspec import differences, laid_out, spec_of


def swap_weights(
    deployment: Deployment,
    executor: Executor,
    groups: Mapping[str, Sequence[str]],
    group: str,
    weights: Mapping[str, torch.Tensor],
    folder: Path,
) -> int:
    """See ``Pipeline.swap``."""
    if not isinstance(weights, Mapping):
        raise UsageError(f"weights must be a mapping of names to tensors, but are {type(weights).__name__}")
    if not isinstance(folder, Path):
        raise UsageError(f"folder must be the path of an empty folder, but is {folder!r}")
    if group not in groups:
        raise UsageError(f"there is no parameter group '{group}'; the groups are: {', '.join(groups) or 'none'}")
    stages = {stage.name: stage for stage in deployment.wiring.stages if stage.name in groups[group]}
    present = {config.stage.name: config.module for config in deployment.worker_configs if config.stage.name in stages}
    programs = {
        name: load_stage(module.folder, trust=module.trust) for name, module in present.items() if isinstance(module, StageFolder)
    }
    raise_faults(UsageError, f"the weights do not fit group '{group}'", _faults(programs, weights))
    modules: dict[str, Module] = {}
    for name, program in programs.items():
        module = present[name]
        if isinstance(module, StageFolder) and program.weights.keys() & weights.keys():
            changed = with_weights(program, weights)
            save_stage(changed, folder / name)
            get_backend(module.backend).prepare(changed, folder / name, module.precision)
            modules[name] = replace(module, folder=folder / name)
    return swap_modules(deployment, executor, modules)


def with_weights(program: StageProgram, weights: Mapping[str, torch.Tensor]) -> StageProgram:
    """The stage with those of ``weights`` that it reads, in the layout of the weights that they replace."""
    merged = dict(program.weights)
    for name in merged.keys() & weights.keys():
        old = merged[name]
        new = laid_out(weights[name].detach(), replace(spec_of(name, old), offset_bytes=0))
        merged[name] = new.detach().requires_grad_(old.requires_grad)
    return replace(program, module=fx.GraphModule(merged, program.module.graph, class_name=type(program.module).__name__))


def swap_modules(deployment: Deployment, executor: Executor, modules: Mapping[str, Module]) -> int:
    """Let stages run other modules from the next request on; return its number. Raises: BackendError, WorkerError."""
    numbers = [number for number, config in enumerate(deployment.worker_configs) if config.stage.name in modules]
    switched = []

    def switch(lanes: Lanes, fed: int) -> None:
        """Tell every worker the new version before the first request for it is fed."""
        for number in numbers:
            config = deployment.worker_configs[number]
            base, first = lanes.base(config.replica), lanes.next(config.replica)
            versions = (*config.versions, Version(first, modules[config.stage.name]))
            kept = [
                one for one, after in zip(versions, (*versions[1:], None), strict=True) if after is None or after.first > base
            ]
            deployment.worker_configs[number] = replace(config, versions=tuple(kept))
            with contextlib.suppress(WorkerError):  # if the worker died, its successor loads both versions
                call = deployment.call(number, "during a swap", StageWorker.use, first)
                call.result(LOAD_TIMEOUT_S, stop=deployment.stopping)
        switched.append(fed)

    doing = "during loading new weights"
    with deployment.control_lock:
        calls = [
            deployment.call(number, doing, StageWorker.load, modules[deployment.worker_configs[number].stage.name])
            for number in numbers
        ]
        for call in calls:
            try:
                call.result(LOAD_TIMEOUT_S, stop=deployment.stopping)
            except BackendError as failure:
                raise BackendError(f"the new weights could not be loaded, and the old ones stay in use: {failure}") from None
        executor.at_next_request(switch)
        deployment.keep_files()
    return switched[0]


def _faults(programs: Mapping[str, StageProgram], weights: Mapping[str, torch.Tensor]) -> list[str]:
    known = {name: tensor for program in programs.values() for name, tensor in program.weights.items()}
    faults = [f"no stage of the group reads '{name}'" for name in weights if name not in known]
    for name, tensor in weights.items():
        if name in known:
            faults += differences([spec_of(name, known[name])], [tensor])
    return faults
