"""Write plans as a bundle: the parts of every network drafted, their weights written once, then their files and the manifest."""

import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from autosplit.arguments import checked
from autosplit.backends.conformance import require_right
from autosplit.bundling.containers import output_containers
from autosplit.bundling.drafting import Finish, draft
from autosplit.bundling.manifest import Manifest, Network, Part, file_of, write_manifest
from autosplit.bundling.nativedriver import write_native_driver
from autosplit.bundling.packing import pack
from autosplit.bundling.weightpool import WeightPool
from autosplit.devices.discovering import cpu_name, versions
from autosplit.errors import UsageError
from autosplit.files import hidden_beside, unwritable
from autosplit.progress import Progress, quiet
from autosplit.scratch import scratch_folder
from autosplit.tracing.capturing import Traced
from autosplit.tracing.splitting import split
from autosplit.values.machine import HOST, host_of
from autosplit.values.plan import Plan

HERE, DRIVER = Path(__file__).parent, "driver.py"


@checked
def write_bundle(
    networks: Mapping[str, tuple[Traced, Plan]],
    path: str | Path,
    *,
    zipped: bool = False,
    trust: bool = False,
    progress: Progress = quiet,
) -> Manifest:
    """Write plans as one bundle; weights of equal bytes are in it once. It appears whole or not at all.

    Args:
        networks: the entry points: the name of each, its model, and its plan, which was verified.
        path: the folder to make, or the file if ``zipped``; nothing may be there yet.
        zipped: one uncompressed file in place of a folder.
        trust: whether eager parts may call operators that need trust in their maker when the bundle is loaded.
        progress: called with the share of the parts that are made, for the step ``bundle``.
    Raises: UsageError: ``path`` is there or cannot be written, or a model returns what a bundle cannot hold. BackendError: a
        backend refuses a stage. MissingExtraError: a backend is not installed. PlanError: an operator needs ``trust``.
    """
    path = Path(path)
    require_absent(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _whole(path, zipped) as folder:
        return fill_bundle(networks, folder, progress, trust=trust)


def fill_bundle(
    networks: Mapping[str, tuple[Traced, Plan]], folder: Path, progress: Progress = quiet, *, trust: bool = False
) -> Manifest:
    """Write the files of a bundle into an empty folder; arguments and errors as for ``write_bundle``."""
    mixed = [name for name, (_, plan) in networks.items() if len(set(plan.precisions)) > 1]
    if mixed:
        raise UsageError(f"network '{mixed[0]}' computes in several precisions, and a network of a bundle in one")
    for name, (_, plan) in networks.items():
        plan.require_one_size(f"network '{name}' of a bundle")
        away = [device for stage in plan.stages for device in stage.devices if host_of(device) != HOST]
        if away:
            raise UsageError(
                f"the plan of network '{name}' is on hosts of a cluster ('{away[0]}'), and a bundle runs on one machine; "
                "make a plan without --cluster"
            )
    answers = {name: output_containers(traced) for name, (traced, _) in networks.items()}  # before anything is compiled
    with scratch_folder() as scratch:
        pool, drafts = WeightPool(), dict[str, list[tuple[Part, Finish]]]()
        num_parts = sum(len(plan.stages) for _, plan in networks.values())
        for name, (traced, plan) in networks.items():
            require_right(traced, plan)
            drafts[name] = []
            for program, stage in zip(split(traced, [stage.ops for stage in plan.stages]), plan.stages, strict=True):
                number = sum(map(len, drafts.values()))
                progress("bundle", number / num_parts, f"network '{name}', {stage.name} for {stage.backend}")
                place = scratch / f"part{number}"
                place.mkdir()
                drafts[name].append(draft(program, stage, plan.precision, pool, place, trust))
        key, starts = pool.write(folder)
        made: dict[str, Network] = {}
        for name, (traced, plan) in networks.items():
            stems = (f"n{len(made)}p{k}" for k in range(len(drafts[name])))
            finished = ((part, finish(folder, stem, starts)) for stem, (part, finish) in zip(stems, drafts[name], strict=True))
            parts = [replace(part, files=files) for part, files in finished]
            made[name] = _network(traced, plan, answers[name], parts)
        shutil.copyfile(HERE / DRIVER, folder / DRIVER)
        write_native_driver(folder, made, starts)
        backends = sorted({stage.backend for _, plan in networks.values() for stage in plan.stages})
        manifest = Manifest(
            networks=made,
            files={file.name: file_of(file) for file in sorted(folder.iterdir())},
            weights_key=key,
            versions={"python": platform.python_version(), **versions(backends)},
            cpu=cpu_name(),
        )
        write_manifest(manifest, folder)
    return manifest


def require_absent(path: Path) -> None:
    """Raises: UsageError: something is there, or it cannot be written."""
    if path.exists() or path.is_symlink():
        raise UsageError(f"'{path}' is there already: give another name for the bundle, or remove it")
    if why := unwritable(path):
        raise UsageError(f"bundle '{path}' cannot be written: {why}; give another name")


def _network(traced: Traced, plan: Plan, answer: Mapping[str, Any], parts: Sequence[Part]) -> Network:
    return Network(
        source=plan.source,
        graph=traced.graph.hash,
        plan=plan.hash,
        precision=plan.precision,
        microbatch=plan.microbatch,
        queue_depth=plan.queue_depth,
        inputs=traced.graph.inputs,
        outputs=traced.graph.outputs,
        parts=tuple(parts),
        answer=answer,
    )


@contextmanager
def _whole(path: Path, zipped: bool) -> Iterator[Path]:
    """A hidden folder beside ``path`` to build in, which becomes the bundle at the end."""
    building = hidden_beside(path)
    building.mkdir()
    try:
        yield building
        if zipped:
            packed = hidden_beside(path)
            try:
                pack(building, packed)
                packed.rename(path)
            finally:
                packed.unlink(missing_ok=True)
        else:
            building.rename(path)
    finally:
        shutil.rmtree(building, ignore_errors=True)
