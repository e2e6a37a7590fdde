"""Write plans as a bundle: the parts of every network drafted, their weights written once, then their files and the manifest."""

import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from autosplit.arguments import checked
from autosplit.bundling.drafting import Draft, draft_each_size, written
from autosplit.bundling.manifest import File, Manifest, Network, Part, Ranges, write_manifest
from autosplit.bundling.nativedriver import write_native_driver
from autosplit.bundling.packing import pack
from autosplit.bundling.weightpool import WeightPool
from autosplit.deploying.networks import split_each_size
from autosplit.devices.discovering import cpu_name, versions
from autosplit.errors import UsageError
from autosplit.files import drafted, file_hash, unwritable
from autosplit.progress import Progress, quiet
from autosplit.scratch import scratch_folder
from autosplit.tracing.capturing import Traced
from autosplit.tracing.family import Family, as_family
from autosplit.values.machine import HOST, host_of
from autosplit.values.plan import Plan
from autosplit.values.shapes import sizes_text

HERE, DRIVER = Path(__file__).parent, ("driver.py", "bundlecheck.py")


@checked
def write_bundle(
    networks: Mapping[str, tuple[Traced | Family, Plan]],
    path: str | Path,
    *,
    zipped: bool = False,
    trust: bool = False,
    progress: Progress = quiet,
) -> Manifest:
    """Write plans as one bundle; weights of equal bytes are in it once. It appears whole or not at all.

    Args:
        networks: the entry points: the name of each, its model (traced with sizes for a plan of several), and its plan, which was
            verified.
        path: the folder to make, or the file if ``zipped``; nothing may be there yet.
        zipped: one uncompressed file in place of a folder.
        trust: whether eager parts may call operators that need trust in their maker when the bundle is loaded.
        progress: called with the share of the parts that are made, for the step ``bundle``.
    Raises: UsageError: ``path`` exists or cannot be written, or a bundle cannot hold the model's outputs. BackendError: a
        backend refuses a stage. TraceError: a stage cannot take every size in one program. MissingExtraError: a backend is not
        installed. PlanError: an operator needs ``trust``.
    """
    path = Path(path)
    require_absent(path)
    with _whole(path, zipped) as folder:
        return fill_bundle(networks, folder, progress, trust=trust)


def fill_bundle(
    networks: Mapping[str, tuple[Traced | Family, Plan]], folder: Path, progress: Progress = quiet, *, trust: bool = False
) -> Manifest:
    """Write the files of a bundle into an empty folder; arguments and errors as for ``write_bundle``."""
    mixed = [name for name, (_, plan) in networks.items() if len(set(plan.precisions)) > 1]
    if mixed:
        raise UsageError(f"network '{mixed[0]}' computes in several precisions, and a network of a bundle in one")
    for name, (_, plan) in networks.items():
        away = [device for stage in plan.stages for device in stage.devices if host_of(device) != HOST]
        if away:
            raise UsageError(
                f"the plan of network '{name}' is on hosts of a cluster ('{away[0]}'), and a bundle runs on one machine; "
                "make a plan without --cluster"
            )
    families = {name: family_of(model, plan) for name, (model, plan) in networks.items()}
    answers = {name: output_containers(family.variants[0]) for name, family in families.items()}  # before anything is compiled
    with scratch_folder() as scratch:
        pool, drafts = WeightPool(), dict[str, list[Draft]]()
        num_parts = sum(len(plan.stages) for _, plan in networks.values())
        for name, (_, plan) in networks.items():
            drafts[name] = []
            for programs, stage in zip(split_each_size(families[name], plan), plan.stages, strict=True):
                number = sum(map(len, drafts.values()))
                progress("bundle", number / num_parts, f"network '{name}', {stage.name} for {stage.backend}")
                place = scratch / f"part{number}"
                drafts[name].append(draft_each_size(programs, stage, plan.precision, pool, place, trust))
        key, starts = pool.write(folder)
        made: dict[str, Network] = {}
        for name, (_, plan) in networks.items():
            parts = [written(drafted, folder, f"n{len(made)}p{k}", starts) for k, drafted in enumerate(drafts[name])]
            made[name] = _network(families[name], plan, answers[name], parts)
        for module in DRIVER:
            shutil.copyfile(HERE / module, folder / module)
        write_native_driver(folder, made, starts)
        backends = sorted({stage.backend for _, plan in networks.values() for stage in plan.stages})
        manifest = Manifest(
            networks=made,
            files={file.name: File(file.stat().st_size, file_hash(file)) for file in sorted(folder.iterdir())},
            weights_key=key,
            versions={"python": platform.python_version(), **versions(backends)},
            cpu=cpu_name(),
        )
        write_manifest(manifest, folder)
    return manifest


def require_absent(path: Path) -> None:
    """Raises: UsageError: the path exists, or cannot be written."""
    if path.exists() or path.is_symlink():
        raise UsageError(f"'{path}' is there already: give another name for the bundle, or remove it")
    if why := unwritable(path):
        raise UsageError(f"bundle '{path}' cannot be written: {why}; give another name")


def family_of(model: Traced | Family, plan: Plan) -> Family:
    """The model at the sizes of the plan; of a plan for one size, one variant without dimensions.

    Raises: UsageError: the plan is for several sizes, and the model is traced for one. TraceError: as ``Family.at``.
    """
    if isinstance(model, Family):
        return model if plan.shapes is None else model.only(plan.shapes.variants)
    if plan.shapes is not None:
        raise UsageError("the plan is for requests of several sizes, and the model is traced for one; trace it with sizes=")
    return as_family(model)


def _network(family: Family, plan: Plan, answer: Mapping[str, Any], parts: Sequence[Part]) -> Network:
    graph = family.graph
    return Network(
        source=plan.source,
        graph=graph.hash,
        plan=plan.hash,
        precision=plan.precision,
        microbatch=plan.microbatch,
        queue_depth=plan.queue_depth,
        inputs=graph.inputs,
        outputs=graph.outputs,
        parts=tuple(parts),
        answer=answer,
        ranges=Ranges(
            sizes={dim: sizes_text(found) for dim, found in family.allowed.items()},
            inputs=family.dims,
            outputs={name: {axis: dim for axis, dim in axes.items() if dim} for name, axes in family.out_dims.items()},
            variants=family.sizes,
            masks=family.masks,
            unpaddable=family.unpaddable,
        ),
    )


@contextmanager
def _whole(path: Path, zipped: bool) -> Iterator[Path]:
    """A hidden folder beside ``path`` to build in, which becomes the bundle at the end."""
    with drafted(path) as building:
        yield building
        if not zipped:
            building.rename(path)
            return
        with drafted(path) as packed:
            pack(building, packed / path.name)
            (packed / path.name).rename(path)


def output_containers(traced: Traced) -> dict[str, Any]:
    """The model's own output containers, with the name of a value or a constant at each leaf.

    Each container is a mapping with one key: ``value`` (a name of ``traced.graph.outputs``), ``constant``, ``list``, ``tuple``,
    ``dict`` (pairs of key and container) or ``namedtuple`` (class name, pairs of field and container). Objects with named
    fields, such as the outputs of transformers, become dicts, because their classes are not there when the bundle runs.

    Raises: UsageError: a container is of another class, or a constant is one that JSON cannot hold.
    """
    tensors = [torch.empty(0) for _ in traced.graph.outputs]
    names = {id(tensor): name for tensor, name in zip(tensors, traced.graph.outputs, strict=True)}
    return _described(traced.unflatten_outputs(tensors), names)


def _described(value: Any, names: Mapping[int, str]) -> dict[str, Any]:
    if id(value) in names:
        return {"value": names[id(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"constant": value}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"namedtuple": [type(value).__name__, _pairs(zip(value._fields, value, strict=True), names)]}
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [_described(item, names) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": _pairs(value.items(), names)}
    if is_dataclass(value):
        return {"dict": _pairs(((field.name, getattr(value, field.name)) for field in fields(value)), names)}
    raise UsageError(
        f"the model returns a {type(value).__name__}, which a bundle cannot build again; return tensors in tuples, lists or dicts"
    )


def _pairs(items: Any, names: Mapping[int, str]) -> list[list[Any]]:
    return [[key, _described(value, names)] for key, value in items]
