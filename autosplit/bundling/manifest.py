"""The manifest of a bundle: its networks, the table of their parts, the hash of every file, and where all of it comes from.

A bundle is a flat folder: a file lies in it under a plain name, so no name can lead out of it.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from autosplit.bundling.bundlecheck import MANIFEST as MANIFEST
from autosplit.bundling.bundlecheck import SCHEMA, file_faults, manifest_faults
from autosplit.bundling.bundlecheck import WEIGHTS as WEIGHTS
from autosplit.errors import BundleError, DeviceError, raise_faults
from autosplit.files import content_hash, from_plain, read_mapping
from autosplit.parsing import shown
from autosplit.tracing.tensorspec import TensorSpec, spec_fault
from autosplit.values.machine import parse_device
from autosplit.values.plan import Source
from autosplit.values.samples import Precision

PROGRAM, ONNX, IR, BLOB, LIBRARY = "program", "onnx", "ir", "blob", "library"
"""Roles of files: the graph for eager, the fused ONNX file, OpenVINO's own file and its compiled form, native code."""


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
class Form:
    """A part at the sizes of one variant.

    Attributes:
        inputs, outputs: the values that it reads and makes.
        input_orders, output_orders: for a runtime of dense tensors, the order of dimensions in which each value is dense.
        files: the name of each file by its role.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    input_orders: tuple[tuple[int, ...], ...]
    output_orders: tuple[tuple[int, ...], ...]
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Part(Form):
    """A stage of a plan, ready to run; its own values and files are those of variant 0, the largest.

    Attributes:
        backend: the backend that its files are for.
        devices: the devices of the plan, one for each replica; ``mapped_devices`` finds devices of the loading machine for them.
        threads, streams, load_s: as in the plan's stage.
        weights: the weights that its program or library takes from the weights file.
        weight_bytes: bytes of weights that it holds when it is loaded.
        operators: the modules of custom operators that it calls, which the loading process must have imported.
        variants: the part at the sizes of variant 1 and so on.
    """

    name: str
    backend: str
    devices: tuple[str, ...]
    threads: int
    streams: int
    load_s: float
    weights: tuple[StoredWeight, ...]
    weight_bytes: int
    operators: tuple[str, ...] = ()
    variants: tuple[Form, ...] = ()

    @property
    def is_free(self) -> bool:
        """Whether one program takes requests of every size."""
        return bool(self.variants) and all(form.files == self.files for form in self.variants)

    def at_each_size(self) -> "tuple[Part, ...]":
        """The part once for each variant, from variant 0 on, each without other variants."""
        own = replace(self, variants=())
        return own, *(replace(own, **{one.name: getattr(form, one.name) for one in fields(form)}) for form in self.variants)


@dataclass(frozen=True, slots=True)
class Ranges:
    """The sizes that requests may have; of requests of one size, no dimensions and one variant.

    Attributes:
        sizes: dimension to its sizes, as in ``values.shapes.parse_sizes``.
        inputs, outputs: value to axis to dimension.
        variants: the sizes of each variant, by dimension.
        masks: inputs that a request may leave out: ones at each place of it, zeros where it is padded.
        unpaddable: dimension to the reason why padding along it changes answers.
    """

    sizes: Mapping[str, str]
    inputs: Mapping[str, Mapping[int, str]]
    outputs: Mapping[str, Mapping[int, str]]
    variants: tuple[Mapping[str, int], ...]
    masks: tuple[str, ...] = ()
    unpaddable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Network:
    """One plan of the bundle: an entry point.

    Attributes:
        graph, plan: the hashes of the graph and of the plan.
        precision, microbatch, queue_depth: as in the plan.
        inputs, outputs: the names of the values that a request gives and gets, in order.
        parts: in topological order.
        answer: the containers in which the model returns its outputs (see ``bundler.output_containers``).
        ranges: the sizes of its requests.
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
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a bundle.

    Attributes:
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
    """Write the manifest with the hash of its content, which shows a later edit. Raises: BundleError: nobody could read it."""
    data = json.loads(json.dumps(asdict(manifest)))
    whole = {"schema": SCHEMA, "key": content_hash(data), **data}
    raise_faults(BundleError, "this bundle cannot be written", manifest_faults(whole))
    (folder / MANIFEST).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a bundle. Raises: BundleError: it is missing, truncated, edited, of another version or malformed."""
    path = folder / MANIFEST
    data = read_mapping(path, "bundle", SCHEMA, BundleError, root=folder)
    raise_faults(BundleError, f"bundle file '{path}' is damaged; make the bundle again", manifest_faults(data))
    try:
        manifest = from_plain(Manifest, {name: value for name, value in data.items() if name not in ("schema", "key")})
    except ValueError as failure:
        raise BundleError(f"bundle file '{path}' is damaged: {failure}. Make the bundle again.") from None
    raise_faults(BundleError, f"bundle file '{path}' does not fit together", list(_faults(manifest)))
    return manifest


def check_files(folder: Path, files: Mapping[str, File], hashed: bool) -> None:
    """Compare the files of a bundle with its manifest, their hashes too if ``hashed``. Raises: BundleError: every fault."""
    noted = {name: asdict(file) for name, file in files.items()}
    raise_faults(BundleError, f"bundle '{folder}' is damaged", file_faults(folder, noted, hashed))


def _faults(manifest: Manifest) -> Iterator[str]:
    """A sentence for each fault that the driver cannot see: it knows neither devices nor torch."""
    for name, part in manifest.parts:
        yield from (f"network {shown(name)}, part {shown(part.name)}: {fault}" for fault in _part_faults(part))


def _part_faults(part: Part) -> Iterator[str]:
    for device in part.devices:
        try:
            parse_device(device)
        except DeviceError as failure:
            yield str(failure)
    values = (spec for form in part.at_each_size() for spec in (*form.inputs, *form.outputs))
    yield from filter(None, map(spec_fault, (*values, *(weight.spec for weight in part.weights))))
