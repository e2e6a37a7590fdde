"""Keep every tensor on a cut of a network, and find the first part at which two runs differ.

A dump is a folder: ``values.safetensors`` with a request's inputs and every value of every part, and ``dump.json`` with the
parts, their backends and the policy. Dumps of one network from two policies, backends or machines can be compared.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from autosplit.bundling.manifest import Network
from autosplit.bundling.openbundle import OpenBundle
from autosplit.errors import BundleError, UsageError
from autosplit.files import drafted, read_mapping
from autosplit.parsing import MALFORMED
from autosplit.tracing.differing import compare
from autosplit.tracing.tensorspec import zeros

SCHEMA = 1
VALUES, TABLE = "values.safetensors", "dump.json"


@dataclass(frozen=True, slots=True)
class Dump:
    """The parts of a run, each with its backend and the names of its outputs, and the tensors by name."""

    path: Path
    graph: str
    policy: str
    inputs: tuple[str, ...]
    parts: tuple[tuple[str, str, tuple[str, ...]], ...]
    values: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Difference:
    """One part in two dumps: the value that differs most, and by how much. An error of 0 means equal bit for bit."""

    part: str
    backend: str
    other_backend: str
    value: str
    absolute: float
    relative: float


def example_inputs(network: Network) -> dict[str, torch.Tensor]:
    """Inputs by name that are the same on every machine: floats of a normal distribution, and zeros of other dtypes."""
    chance = torch.Generator().manual_seed(0)
    specs = {spec.name: spec for part in network.parts for spec in part.inputs}
    found = {}
    for name in network.inputs:
        if name not in specs:
            raise UsageError(f"input '{name}' is read by no part, so that its shape is not known; give --inputs")
        value = zeros(specs[name])
        found[name] = value.normal_(generator=chance) if value.is_floating_point() else value
    return found


def write_dump(bundle: OpenBundle, policy: str, inputs: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Run one request, by name, of a bundle that was loaded with ``cuts``, and keep its tensors in a new folder.

    Raises: UsageError: the folder exists, or the bundle was loaded without ``cuts``.
    """
    if folder.exists():
        raise UsageError(f"'{folder}' is there already; name another folder for the dump")
    network, wanted = bundle.network, bundle.engine.wiring.outputs
    parts = tuple((part.name, part.backend, tuple(spec.name for spec in part.outputs)) for part in network.parts)
    if not {name for _, _, names in parts for name in names} <= set(wanted):
        raise UsageError("the bundle was loaded without its cuts; give load_bundle(..., cuts=True)")
    made = zip(wanted, bundle.run(inputs), strict=True)
    values = {name: value.clone(memory_format=torch.contiguous_format) for name, value in [*inputs.items(), *made]}
    table = {"graph": network.graph, "policy": policy, "inputs": network.inputs, "parts": parts}
    with drafted(folder) as draft:
        save_file(values, draft / VALUES)
        (draft / TABLE).write_text(json.dumps({"schema": SCHEMA, **table}, indent=1), encoding="utf-8")
        draft.rename(folder)


def read_dump(folder: Path) -> Dump:
    """Read a dump. Raises: BundleError: it is missing, truncated or damaged."""
    data: dict[str, Any] = read_mapping(folder / TABLE, "dump", SCHEMA, BundleError)
    try:
        values = load_file(folder / VALUES)
        parts = tuple((str(name), str(backend), tuple(map(str, made))) for name, backend, made in data["parts"])
        known = {*data["inputs"], *(value for _, _, made in parts for value in made)}
        if missing := sorted(known - set(values)):
            raise ValueError(f"it has no value '{missing[0]}'")
        return Dump(folder, str(data["graph"]), str(data["policy"]), tuple(data["inputs"]), parts, values)
    except (OSError, SafetensorError, *MALFORMED) as failure:
        raise BundleError(f"dump '{folder}' is damaged: {str(failure)[:200]}. Write it again.") from None


def differences_of(one: Dump, other: Dump) -> list[Difference]:
    """For each part of ``one`` in order, its value that differs most in ``other``; a part without a common value is left out.

    Raises: UsageError: the dumps are of different graphs or of different inputs.
    """
    if one.graph != other.graph:
        raise UsageError(f"'{one.path}' and '{other.path}' are of different graphs, {one.graph} and {other.graph}")
    there = other.values
    apart = [name for name in one.inputs if name not in there or not torch.equal(one.values[name], there[name])]
    if apart:
        raise UsageError(f"the dumps are of different inputs: '{apart[0]}' differs. Write the second with --inputs {one.path}")
    maker = {value: backend for _, backend, made in other.parts for value in made}
    found = []
    for part, backend, made in one.parts:
        common = [value for value in made if value in maker]
        if common:
            error = compare(common, [other.values[name] for name in common], [one.values[name] for name in common])
            found.append(Difference(part, backend, maker[error.output], error.output, error.absolute, error.relative))
    return found
