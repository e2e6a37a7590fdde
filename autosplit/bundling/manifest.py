"""The manifest of a bundle: its networks, the table of their parts, the hash of every file, and where all of it comes from.

A bundle is a flat folder: a file lies in it under a plain name, so no name can lead out of it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autosplit.bundling.driver import filled
from autosplit.errors import BundleError, DeviceError, raise_faults
from autosplit.files import content_hash, file_hash, from_plain, read_mapping
from autosplit.parsing import MALFORMED, shown
from autosplit.tracing.tensorspec import TensorSpec, spec_fault
from autosplit.values.machine import parse_device
from autosplit.values.plan import MAX_QUEUE_DEPTH, Source
from autosplit.values.samples import Precision, backend_fault

SCHEMA = 1
MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
PROGRAM, ONNX, IR, BLOB, LIBRARY = "program", "onnx", "ir", "blob", "library"
"""Roles of files: the graph for eager, the fused ONNX file, OpenVINO's own file and its compiled form, native code."""
NEEDED = {"eager": PROGRAM, "onnxruntime": ONNX, "openvino": IR, "inductor": LIBRARY}
"""Backend to the role that a part of it must have."""
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")


@dataclass(frozen=True, slots=True)
class File:
    """Size and SHA-256 of a file of the bundle."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight of a part: the name of its content in the weights file, and its name in the part with its layout."""

    content: str
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class Part:
    """A stage of a plan, ready to run.

    Attributes:
        name: the stage's name.
        backend: the backend that its files are for.
        devices: the devices of the plan, one for each replica; they are mapped to those that are there at load.
        threads, streams, load_s: as in the plan's stage.
        inputs, outputs: the values that it reads and makes.
        input_orders, output_orders: for a runtime of dense tensors, the order of dimensions in which each value is dense.
        files: the name of each file by its role.
        weights: the weights that its program or library takes from the weights file.
        weight_bytes: bytes of weights that it holds when it is loaded.
        operators: the modules of custom operators that it calls, which the loading process must have imported.
    """

    name: str
    backend: str
    devices: tuple[str, ...]
    threads: int
    streams: int
    load_s: float
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    input_orders: tuple[tuple[int, ...], ...]
    output_orders: tuple[tuple[int, ...], ...]
    files: Mapping[str, str]
    weights: tuple[StoredWeight, ...]
    weight_bytes: int
    operators: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Network:
    """One plan of the bundle: an entry point.

    Attributes:
        source: the spec from which the model was made.
        graph, plan: the hashes of the graph and of the plan.
        precision, microbatch, queue_depth: as in the plan.
        inputs, outputs: the names of the values that a request gives and gets, in order.
        parts: in topological order.
        answer: the containers in which the model returns its outputs (see ``containers``).
    """

    source: Source
    graph: str
    plan: str
    precision: Precision
    microbatch: int
    queue_depth: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parts: tuple[Part, ...]
    answer: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a bundle.

    Attributes:
        networks: the entry points by name.
        files: every other file of the bundle by name.
        weights_key: the key that the weights file names, so that another one in its place is noticed.
        versions: package to version, of the machine that made the bundle.
        cpu: the processor of that machine; ``load_bundle`` takes compiled blobs only on an equal one.
    """

    networks: Mapping[str, Network]
    files: Mapping[str, File]
    weights_key: str
    versions: Mapping[str, str] = field(default_factory=dict)
    cpu: str = ""

    @property
    def parts(self) -> Iterator[tuple[str, Part]]:
        """(network, part) of each part."""
        return ((name, part) for name, network in self.networks.items() for part in network.parts)

    def network(self, name: str | None) -> str:
        """The name of a network; None names the only one. Raises: BundleError: there is none, or there are several."""
        known = ", ".join(f"'{one}'" for one in self.networks)
        if name is None and len(self.networks) == 1:
            return next(iter(self.networks))
        if name is None or name not in self.networks:
            asked = "several networks" if name is None else f"no network '{name}'"
            raise BundleError(f"the bundle has {asked}; name one of {known}")
        return name


def write_manifest(manifest: Manifest, folder: Path) -> None:
    """Write the manifest with the hash of its content, which tells a later edit."""
    data = asdict(manifest)
    text = json.dumps({"schema": SCHEMA, "key": content_hash(json.loads(json.dumps(data))), **data}, indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a bundle. Raises: BundleError: it is missing, truncated, edited, of another version or malformed."""
    path = folder / MANIFEST
    data = read_mapping(path, "bundle", SCHEMA, BundleError, root=folder)
    key = data.pop("key", None)
    del data["schema"]
    if content_hash(data) != key:
        raise BundleError(f"bundle file '{path}' was changed after it was written. Make the bundle again.")
    try:
        manifest = from_plain(Manifest, data)
    except ValueError as failure:
        raise BundleError(f"bundle file '{path}' is damaged: {failure}. Make the bundle again.") from None
    raise_faults(BundleError, f"bundle file '{path}' does not fit together", list(_faults(manifest)))
    return manifest


def file_of(path: Path) -> File:
    """Size and hash of a file."""
    return File(path.stat().st_size, file_hash(path))


def check_files(folder: Path, files: Mapping[str, File], hashed: bool) -> None:
    """Compare the files of a bundle with its manifest, their hashes too if ``hashed``. Raises: BundleError: every fault."""
    faults = []
    for name, noted in files.items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            faults.append(f"'{name}' is {'a link, which may lead out of the bundle' if path.is_symlink() else 'missing'}")
        elif (num_bytes := path.stat().st_size) != noted.num_bytes:
            faults.append(f"'{name}' has {num_bytes} bytes, and the manifest says {noted.num_bytes}: it is truncated or edited")
        elif hashed and file_hash(path) != noted.sha256:
            faults.append(f"'{name}' was changed after it was written")
    raise_faults(BundleError, f"bundle '{folder}' is damaged", faults)


def _faults(manifest: Manifest) -> Iterator[str]:
    for name in manifest.files:
        if not FILE_NAME.fullmatch(name) or name == MANIFEST:
            yield f"file {shown(name)} is not a plain name of a file in the bundle"
    if WEIGHTS not in manifest.files:
        yield f"it lists no '{WEIGHTS}'"
    if not manifest.networks:
        yield "it has no networks"
    for name, network in manifest.networks.items():
        label = f"network {shown(name)}"
        if not network.parts or not network.outputs:
            yield f"{label} has no parts or no outputs"
        if not 1 <= network.queue_depth <= MAX_QUEUE_DEPTH or network.microbatch < 1:
            yield f"{label} has queue_depth {network.queue_depth} and microbatch {network.microbatch}"
        try:
            filled(network.answer, dict.fromkeys(network.outputs))
        except MALFORMED as failure:
            yield f"{label} has an answer that cannot be built: {str(failure)[:200]}"
        for part in network.parts:
            yield from (f"{label}, part {shown(part.name)}: {fault}" for fault in _part_faults(part, manifest.files))


def _part_faults(part: Part, files: Mapping[str, File]) -> Iterator[str]:
    if fault := backend_fault(part.backend):
        yield fault
    elif NEEDED[part.backend] not in part.files:
        yield f"it has no file with the role '{NEEDED[part.backend]}', which {part.backend} needs"
    if not part.devices or part.threads < 1 or part.streams < 1:
        yield f"{len(part.devices)} devices, {part.threads} threads and {part.streams} streams; each is at least 1"
    if part.weight_bytes < 0:
        yield f"weight_bytes is {part.weight_bytes}"
    for device in part.devices:
        try:
            parse_device(device)
        except DeviceError as failure:
            yield str(failure)
    yield from (f"file {shown(name)} is not among the bundle's files" for name in part.files.values() if name not in files)
    yield from filter(None, map(spec_fault, (*part.inputs, *part.outputs, *(weight.spec for weight in part.weights))))
    for specs, orders in ((part.inputs, part.input_orders), (part.outputs, part.output_orders)):
        yield from _order_faults(specs, orders)


def _order_faults(specs: Sequence[TensorSpec], orders: Sequence[Sequence[int]]) -> Iterator[str]:
    if len(specs) != len(orders):
        yield f"{len(specs)} values have {len(orders)} orders"
    for spec, order in zip(specs, orders, strict=False):
        if sorted(order) != list(range(len(spec.shape))):
            yield f"'{spec.name:.60}' has {len(spec.shape)} dimensions, and {shown(list(order))} is not an order of them"
