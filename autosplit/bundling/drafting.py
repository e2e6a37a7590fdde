"""Make the files of one part: weights go to the pool; the other files follow once the places of all weights are known."""

import json
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from autosplit.backends import inductor, openvino
from autosplit.backends.aligning import blobs, outside, set_offsets
from autosplit.backends.apart import apart
from autosplit.backends.base import Precision, convert, get_backend, require_precision, require_streams
from autosplit.backends.channels import last
from autosplit.backends.lowering import in_precision
from autosplit.backends.onnxfile import OnnxStage, write_onnx
from autosplit.backends.onnxruntime import fuse
from autosplit.backends.ports import port
from autosplit.bundling.manifest import BLOB, IR, LIBRARY, ONNX, PROGRAM, WEIGHTS, Form, Part, StoredWeight
from autosplit.bundling.weightpool import WeightPool
from autosplit.compat.runtimes import open_library
from autosplit.errors import BackendError
from autosplit.tracing import programs
from autosplit.tracing.operators import WRITING, allowed_graph
from autosplit.tracing.splitting import StageProgram
from autosplit.values.plan import Stage

Finish = Callable[[Path, str, Mapping[str, int]], dict[str, str]]
"""Writes the files of a part: from the folder, the stem of their names and the places of weights to file names by role."""

Draft = tuple[Part, Sequence[Finish]]
"""A part without its files, and the writers of the files of each variant; one program for every size is written once."""

Made = tuple[Finish, tuple[StoredWeight, ...], tuple[tuple[int, ...], ...] | None]
"""The contribution of a backend to a part: its files, its weights, and unusual orders of its outputs."""


def draft_each_size(
    programs: Sequence[StageProgram], stage: Stage, precision: Precision, pool: WeightPool, scratch: Path, trust: bool
) -> Draft:
    """As ``draft``, of a stage at the sizes of each variant, the largest first; one that takes every size is made once."""
    drafts = []
    for number, program in enumerate(programs[:1] if programs[0].free else programs):
        place = scratch / str(number)
        place.mkdir(parents=True)
        drafts.append(draft(program, stage, precision, pool, place, trust))
    parts = [part for part, _ in drafts]
    first = parts[0]
    if programs[0].free:
        parts += [replace(first, inputs=program.inputs, outputs=program.outputs) for program in programs[1:]]
    weights = {weight.spec.name: weight for part in parts for weight in part.weights}
    forms = (Form(part.inputs, part.outputs, part.input_orders, part.output_orders, part.files) for part in parts[1:])
    return replace(first, weights=tuple(weights.values()), variants=tuple(forms)), [finish for _, finish in drafts]


def written(drafted: Draft, folder: Path, stem: str, starts: Mapping[str, int]) -> Part:
    """The part of a draft, with its files, which are written; ``stem`` begins their names."""
    part, finishes = drafted
    files = [finish(folder, f"{stem}v{number}" if number else stem, starts) for number, finish in enumerate(finishes)]
    forms = (replace(form, files=files[min(number, len(files) - 1)]) for number, form in enumerate(part.variants, 1))
    return replace(part, files=files[0], variants=tuple(forms))


def draft(
    program: StageProgram, stage: Stage, precision: Precision, pool: WeightPool, scratch: Path, trust: bool
) -> tuple[Part, Finish]:
    """Export or compile a part in an empty folder, which must stay until the weights are written.

    Returns: the part without its files, and the function that writes these.
    Raises: BackendError: the backend refuses the stage. MissingExtraError: it is not installed. PlanError: an eager part calls an
        operator that needs trust, and none is asked for (``trust``).
    """
    backend = get_backend(stage.backend)
    require_precision(backend, precision)
    if program.states:
        raise BackendError(f"stage '{stage.name}' keeps states, and a part of a bundle keeps none; run the plan of the model")
    if stage.streams > 1:
        require_streams(backend)
    if stage.backend == "eager" and not trust:
        allowed_graph(program.module.graph, f"part '{stage.name}' is not for everybody: {WRITING}")
    made = {"eager": _eager, "onnxruntime": _onnxruntime, "openvino": _openvino, "inductor": _inductor}
    if stage.backend not in made:
        raise BackendError(f"stage '{stage.name}' runs on {stage.backend}, and bundles hold parts of {', '.join(made)} only")
    finish, weights, orders = made[stage.backend](program, stage, precision, pool, scratch)
    part = Part(
        name=stage.name,
        backend=stage.backend,
        devices=stage.devices,
        threads=stage.threads,
        streams=stage.streams,
        load_s=stage.load_s,
        inputs=program.inputs,
        outputs=program.outputs,
        input_orders=tuple(port(spec).order for spec in program.inputs),
        output_orders=orders or tuple(port(spec).order for spec in program.outputs),
        files={},
        weights=weights,
        weight_bytes=program.weight_bytes,
        operators=program.packages,
    )
    return part, finish


def _eager(program: StageProgram, stage: Stage, precision: Precision, pool: WeightPool, scratch: Path) -> Made:
    lowered = in_precision(program, precision)
    weights = lowered.weights
    data = {
        "requires_grad": [name for name, tensor in weights.items() if tensor.requires_grad],
        "nodes": programs.encode(lowered.module.graph),
    }

    def finish(folder: Path, stem: str, starts: Mapping[str, int]) -> dict[str, str]:
        (folder / f"{stem}.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
        return {PROGRAM: f"{stem}.json"}

    return finish, pool.add_all(weights), None


def _onnxruntime(program: StageProgram, stage: Stage, precision: Precision, pool: WeightPool, scratch: Path) -> Made:
    import onnx

    convert(_write_fused, program, scratch, doing=_doing(program, stage))
    model = onnx.load(str(scratch / "fused.onnx"), load_external_data=False)
    tensors = outside(model)
    data = _mapped(scratch / "fused.onnx.data") if tensors else b""
    contents = [{key: _add(pool, data, *blob) for key, blob in blobs(tensor).items()} for tensor in tensors]

    def finish(folder: Path, stem: str, starts: Mapping[str, int]) -> dict[str, str]:
        for tensor, held in zip(tensors, contents, strict=True):
            set_offsets(tensor, {key: starts[content] for key, content in held.items()}, WEIGHTS)
        (folder / f"{stem}.onnx").write_bytes(model.SerializeToString())
        return {ONNX: f"{stem}.onnx"}

    return finish, (), None


def _openvino(program: StageProgram, stage: Stage, precision: Precision, pool: WeightPool, scratch: Path) -> Made:
    outputs = tuple(map(port, program.outputs))
    chosen = openvino.settings(stage.threads, precision, stage.streams)
    turned = convert(_write_ir, program, scratch, chosen, doing=_doing(program, stage))
    orders = tuple(last(one.order) if number in turned else one.order for number, one in enumerate(outputs))
    tree = ElementTree.parse(scratch / "model.xml")
    places = [layer.find("data") for layer in tree.iter("layer") if layer.get("type") == "Const"]
    constants = [place for place in places if place is not None and int(place.get("size", 0))]
    data = _mapped(scratch / "model.bin") if constants else b""
    contents = [_add(pool, data, int(place.get("offset", 0)), int(place.get("size", 0))) for place in constants]

    def finish(folder: Path, stem: str, starts: Mapping[str, int]) -> dict[str, str]:
        for place, content in zip(constants, contents, strict=True):
            place.set("offset", str(starts[content]))
        tree.write(folder / f"{stem}.xml", encoding="utf-8", xml_declaration=True)
        blob = apart(openvino.export_blob, folder / f"{stem}.xml", folder / WEIGHTS, chosen, doing=_doing(program, stage))
        (folder / f"{stem}.blob").write_bytes(blob)
        return {IR: f"{stem}.xml", BLOB: f"{stem}.blob"}

    return finish, (), orders


def _doing(program: StageProgram, stage: Stage) -> str:
    return f"while {stage.backend} compiled stage '{program.name}' for a bundle"


def _write_fused(program: StageProgram, scratch: Path) -> None:
    write_onnx(program, scratch / "exported.onnx")
    fuse(scratch / "exported.onnx", scratch / "fused.onnx")


def _write_ir(program: StageProgram, scratch: Path, chosen: Mapping[str, Any]) -> list[int]:
    inputs, outputs = (tuple(map(port, specs)) for specs in (program.inputs, program.outputs))
    write_onnx(program, scratch / "exported.onnx")
    return list(openvino.write_ir(OnnxStage(scratch / "exported.onnx", inputs, outputs), chosen, scratch / "model.xml"))


def _compile_library(program: StageProgram, scratch: Path) -> tuple[Path, list[str]]:
    """The library and the names of its weights, which are read from the loaded library."""
    library = inductor.compile_library(program, scratch, inductor.WITHOUT_WEIGHTS)
    return library, list(open_library(library).get_constant_names_to_original_fqns().values())


def _inductor(program: StageProgram, stage: Stage, precision: Precision, pool: WeightPool, scratch: Path) -> Made:
    lowered = in_precision(program, precision)
    library, read = convert(_compile_library, lowered, scratch, doing=_doing(program, stage))
    if strange := sorted(set(read) - set(lowered.weights)):
        raise BackendError(
            f"inductor made constants of stage '{program.name}' that are not its weights: {', '.join(strange[:5])}"
        )
    weights = pool.add_all({name: lowered.weights[name] for name in read})

    def finish(folder: Path, stem: str, starts: Mapping[str, int]) -> dict[str, str]:
        library.replace(folder / f"{stem}.so")
        return {LIBRARY: f"{stem}.so"}

    return finish, weights, None


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _add(pool: WeightPool, data: mmap.mmap | bytes, start: int, num_bytes: int) -> str:
    """Take in a part of a mapped file."""
    return pool.add(torch.frombuffer(data, dtype=torch.uint8, count=num_bytes, offset=start))
