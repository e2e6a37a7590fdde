"""Checks a bundle before anything of it is used, and builds the model's answer. Needs Python alone; a copy lies in every bundle.

A network has *variants*: its parts at the sizes of requests for which they were made. One for requests of one size has one.
"""

import hashlib
import json
import math
import re
import reprlib
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

SCHEMA = 2
MANIFEST, WEIGHTS = "manifest.json", "weights.safetensors"
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")
NEEDED = {"eager": "program", "onnxruntime": "onnx", "openvino": "ir", "inductor": "library"}
"""Backend to the role of the file that a part of it must have."""
MAX_JSON_BYTES, MAX_BRACKETS, MAX_DEPTH, MAX_COUNT, MAX_QUEUE_DEPTH = 100_000_000, 2_000_000, 50, 1 << 40, 1024
"""Limits of a manifest: its bytes, lists and objects, the containers of an answer inside each other, its integers and slots."""

_TENSOR = {"name": str, "shape": [int], "stride": [int], "dtype": str, "offset_bytes": int}
_FORM = {
    "inputs": [_TENSOR], "outputs": [_TENSOR], "input_orders": [[int]], "output_orders": [[int]], "files": {str: str},
}  # fmt: skip
_PART = {
    "name": str, "backend": str, "devices": [str], "threads": int, "streams": int, "load_s": float, **_FORM, "variants": [_FORM],
    "weights": [{"content": str, "spec": _TENSOR}], "weight_bytes": int, "operators": [str],
}  # fmt: skip
_RANGES = {
    "sizes": {str: str}, "inputs": {str: {str: str}}, "outputs": {str: {str: str}}, "variants": [{str: int}], "masks": [str],
    "unpaddable": {str: str},
}  # fmt: skip
_NETWORK = {
    "source": dict, "graph": str, "plan": str, "precision": str, "microbatch": int, "queue_depth": int,
    "inputs": [str], "outputs": [str], "parts": [_PART], "answer": dict, "ranges": _RANGES,
}  # fmt: skip
_MANIFEST = {
    "key": str, "networks": {str: _NETWORK}, "files": {str: {"num_bytes": int, "sha256": str}}, "weights_key": str,
    "versions": {str: str}, "cpu": str,
}  # fmt: skip
"""The types of all values in a manifest: ``[kind]`` is a list, ``{str: kind}`` an object with any names."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a bundle, without ``manifest_faults``. Raises: ValueError: it is damaged, edited or of another version."""
    path, again = folder / MANIFEST, "Make the bundle again."
    try:
        if not path.is_file() or path.stat().st_size > MAX_JSON_BYTES:  # to open a pipe would wait without end
            raise ValueError(f"it is not a file of at most {MAX_JSON_BYTES} bytes")
        text = path.read_bytes()
        if text.count(b"[") + text.count(b"{") > MAX_BRACKETS:
            raise ValueError(f"it has more than {MAX_BRACKETS} lists and objects")
        manifest: dict[str, Any] = json.loads(text)
    except (OSError, ValueError, RecursionError) as failure:
        raise ValueError(f"'{path}' is missing, truncated or not JSON: {str(failure)[:200]}. {again}") from None
    if type(found := manifest.get("schema") if type(manifest) is dict else None) is not int or found != SCHEMA:
        raise ValueError(f"'{path}' has schema version {reprlib.repr(found)}, and this driver reads version {SCHEMA}. {again}")
    if faults := manifest_faults(manifest):
        raise ValueError(f"'{path}' is damaged: {'; '.join(faults)}. {again}")
    return manifest


def manifest_faults(manifest: Mapping[str, Any]) -> list[str]:
    """A sentence for each of the first 20 faults. Without any, each value has its type, and each name leads somewhere."""
    try:
        rest = {name: value for name, value in manifest.items() if name not in ("schema", "key")}
        text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
        if hashlib.sha256(text.encode()).hexdigest()[:16] != manifest.get("key"):
            return ["it was changed after it was written"]
        return list(islice(_type_faults(manifest, _MANIFEST, "manifest"), 20)) or list(islice(_faults(manifest), 20))
    except RecursionError:
        return ["its lists and objects are nested too deeply"]


def _type_faults(value: Any, kind: Any, place: str) -> Iterator[str]:
    """A sentence for each value of another type than ``kind`` (see ``_MANIFEST``), each with its place."""
    if type(kind) is list and type(value) is list:
        for number, item in enumerate(value):
            yield from _type_faults(item, kind[0], f"{place}.{number}")
    elif type(kind) is dict and type(value) is dict:
        for name, one in (dict.fromkeys(value, kind[str]) if str in kind else kind).items():
            if name in value:
                yield from _type_faults(value[name], one, f"{place}.{name:.60}")
            else:
                yield f"{place} lacks '{name}'"
        yield from (f"{place} has the name {name!a:.60}" for name in value if not name.isprintable())
    else:
        good, wanted = {
            list: (False, "a list"),
            str: (type(value) is str and value.isprintable(), "a printable text"),
            int: (type(value) is int and 0 <= value <= MAX_COUNT, f"an integer from 0 to {MAX_COUNT}"),
            float: (type(value) in (int, float) and 0 <= value < math.inf, "a number of at least 0"),
            dict: (kind is dict and type(value) is dict, "an object"),
        }[kind if type(kind) is type else type(kind)]
        if not good:
            yield f"{place} must be {wanted}, but is {reprlib.repr(value)}"


def _faults(manifest: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each name or number in a manifest of the right types that does not fit to the rest."""
    files = manifest["files"]
    for name in files:
        if not FILE_NAME.fullmatch(name) or name == MANIFEST:
            yield f"file '{name:.60}' is not a plain name of a file in the bundle"
    if WEIGHTS not in files or not manifest["networks"]:
        yield f"it lists no '{WEIGHTS}', or it has no networks"
    for name, network in manifest["networks"].items():
        yield from (f"network '{name:.60}' {fault}" for fault in _network_faults(network, files))


def formed(part: Mapping[str, Any], variant: int) -> dict[str, Any]:
    """A part at the sizes of one variant."""
    return {**part, **part["variants"][variant - 1]} if variant else dict(part)


def sizes_in(text: str) -> Sequence[int]:
    """The sizes in ``16..512`` or ``8,16,32``. Raises: ValueError: it is neither."""
    first, dots, last = text.partition("..")
    return range(int(first), int(last) + 1) if dots else [int(part) for part in text.split(",")]


def _network_faults(network: Mapping[str, Any], files: Mapping[str, Any]) -> Iterator[str]:
    parts, inputs, num_variants = network["parts"], network["inputs"], len(network["ranges"]["variants"])
    if not parts or not network["outputs"] or len(set(inputs)) < len(inputs):
        yield "has no parts, no outputs, or an input twice"
    if not 1 <= network["queue_depth"] <= MAX_QUEUE_DEPTH or not network["microbatch"]:
        yield f"has queue_depth {network['queue_depth']} and microbatch {network['microbatch']}"
    if not num_variants or any(len(part["variants"]) != num_variants - 1 for part in parts):
        yield f"has {num_variants} variants, and not each of its parts has as many"
        return
    for variant, sizes in enumerate(network["ranges"]["variants"]):
        made: dict[str, Any] = dict.fromkeys(inputs)
        for part in parts:
            form = formed(part, variant)
            yield from (f"has part '{part['name']:.60}', which {fault}" for fault in _part_faults(form, files, made))
        read = {spec["name"]: (spec["shape"], "") for part in parts for spec in formed(part, variant)["inputs"]}
        yield from _size_faults(network, sizes, {name: made.get(name) or read.get(name) for name in (*inputs, *made)})
    yield from (f"has output '{name:.60}', which nothing makes" for name in network["outputs"] if name not in made)
    try:
        filled(network["answer"], dict.fromkeys(network["outputs"]))
    except (LookupError, TypeError, ValueError, AttributeError) as failure:
        yield f"has an answer that cannot be built: {type(failure).__name__} {str(failure)[:200]}"


def _size_faults(network: Mapping[str, Any], sizes: Mapping[str, int], values: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each fault of one variant's sizes. ``values``: shape and dtype of each value; None for unread inputs."""
    ranges = network["ranges"]
    try:
        allowed = {dim: sizes_in(text) for dim, text in ranges["sizes"].items()}
    except ValueError:
        allowed = {}
    named = {dim for axes in ranges["inputs"].values() for dim in axes.values()}
    if sizes.keys() != allowed.keys() or named != allowed.keys() or any(size not in allowed[dim] for dim, size in sizes.items()):
        yield f"has the sizes {reprlib.repr(ranges['sizes'])}, to which variant {reprlib.repr(sizes)} does not fit"
        return
    for name, axes in (*ranges["inputs"].items(), *ranges["outputs"].items()):
        if name in values and values[name] is None:  # an input that no part reads
            continue
        shape = values[name][0] if name in values else []
        for axis, dim in axes.items():
            if not axis.isdecimal() or int(axis) >= len(shape) or shape[int(axis)] != sizes.get(dim):
                yield f"has value '{name:.60}' of shape {reprlib.repr(shape)}, whose axis {axis:.9} is not as long as '{dim:.60}'"
    for name in ranges["masks"]:
        if masked_by(ranges, name) is None:
            yield f"has the mask '{name:.60}', and no other input with its axes"


def masked_by(ranges: Mapping[str, Any], mask: str) -> str | None:
    """The input whose elements a mask tells apart from padding; None if there is none."""
    axes, masks = ranges["inputs"].get(mask), ranges["masks"]
    return next((name for name, found in ranges["inputs"].items() if found == axes and name not in masks), None)


def _part_faults(part: Mapping[str, Any], files: Mapping[str, Any], made: dict[str, Any]) -> Iterator[str]:
    """A sentence for each fault of a part. ``made``: shape and dtype of the values before it, None for inputs; its own join."""
    if NEEDED.get(backend := part["backend"]) not in part["files"]:
        yield f"has no file for {backend}" if backend in NEEDED else f"is for backend '{backend:.60}', which does not exist"
    yield from (f"names file '{name:.60}', which is not in the bundle" for name in part["files"].values() if name not in files)
    if not part["devices"] or part["threads"] < 1 or part["streams"] < 1:
        yield f"has {len(part['devices'])} devices, {part['threads']} threads and {part['streams']} streams; each is at least 1"
    for side in ("input", "output"):
        dims, orders = [len(spec["shape"]) for spec in part[f"{side}s"]], part[f"{side}_orders"]
        if [list(range(num)) for num in dims] != [sorted(order) for order in orders]:
            yield f"has {side}s of {reprlib.repr(dims)} dimensions, which {reprlib.repr(orders)} do not put in order"
    for spec in part["inputs"]:
        if spec["name"] not in made:
            yield f"reads value '{spec['name']:.60}', which is not there yet"
        elif made[spec["name"]] not in (None, (spec["shape"], spec["dtype"])):
            yield f"reads value '{spec['name']:.60}' with another shape or dtype than the part that makes it"
    for spec in part["outputs"]:
        if spec["name"] in made:
            yield f"makes value '{spec['name']:.60}', which is there already"
        made[spec["name"]] = (spec["shape"], spec["dtype"])


def file_faults(folder: Path, files: Mapping[str, Mapping[str, Any]], hashed: bool) -> list[str]:
    """A sentence for each file that is missing, a link, or of another size or (if ``hashed``) SHA-256 than noted."""
    faults = []
    for name, noted in files.items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            faults.append(f"'{name}' is missing, or a link, which may lead out of the bundle")
        elif (found := path.stat().st_size) != noted["num_bytes"]:
            faults.append(f"'{name}' has {found} bytes, and the manifest says {noted['num_bytes']}: it is truncated or edited")
        elif hashed:
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != noted["sha256"]:
                    faults.append(f"'{name}' was changed after it was written")
    return faults


def filled(container: Mapping[str, Any], values: Mapping[str, Any], depth: int = 1) -> Any:
    """The model's answer: its containers with the values at their places. Raises: one of many exceptions: they do not fit."""
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} containers are inside each other")
    [(kind, content)] = container.items()
    if kind == "value":
        return values[content]
    if kind == "constant":
        return content
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(filled(item, values, depth + 1) for item in content)
    if kind == "dict":
        return {key: filled(item, values, depth + 1) for key, item in content}
    if kind != "namedtuple":
        raise ValueError(f"the answer has a container of kind {kind!r:.60}")
    name, pairs = content
    return _class(name, *(key for key, _ in pairs))(*(filled(item, values, depth + 1) for _, item in pairs))


@lru_cache
def _class(name: str, *fields: str) -> Any:
    """A class of named tuples. Raises: ValueError, TypeError: a name is not an identifier."""
    return namedtuple(name, fields)
