"""Exports of earlier stages and processes, by content: the ONNX exporter takes seconds, and makes the same file of like stages.

An export names weights by their numbers (``onnxfile``), so that all layers of one shape have one, whatever their weights hold.
Exports are kept in the folder ``onnx`` of ``$AUTOSPLIT_CACHE`` or ``~/.cache/autosplit``, each as the SHA-256 of a file and the
file, so that damage is noticed. Deleting them costs time only.
"""

import contextlib
import os
from collections.abc import Collection
from dataclasses import asdict, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import fx

from autosplit.errors import PlanError
from autosplit.files import cache_folder, content_hash, file_hash, write_atomic
from autosplit.opening import open_file
from autosplit.tracing.programs import encode
from autosplit.tracing.splitting import StageProgram
from autosplit.tracing.tensorspec import TensorSpec, spec_of
from autosplit.tracing.weightsfile import bytes_of
from autosplit.versions import version_of

MOST_BYTES = 256 << 20
"""Most bytes of all exports. Those that were not used for the longest time make room."""

LARGEST_BYTES = 32 << 20
"""Most bytes of an export that is kept. A larger one holds constants that are not weights of the stage."""

SUFFIX = ".export"

MADE_BY = ("torch", "onnx", "onnxscript", "onnx-ir")
"""The packages whose versions count."""


def place(program: StageProgram, held: Collection[str]) -> Path | None:
    """Where the export of stages like this one is kept; None if there is no place for it.

    ``held`` are the weights whose values are in the export, and so count.
    """
    with contextlib.suppress(OSError, RuntimeError, PlanError):  # the user has no home, or an op no JSON form
        return cache_folder() / "onnx" / f"{content_hash([_form(program, held), _makers()])}{SUFFIX}"
    return None


def _form(program: StageProgram, held: Collection[str]) -> list[Any]:
    """All of a stage that its export depends on: its ops and layouts without names, and the values of some weights."""
    graph, copies, numbers = fx.Graph(), dict[fx.Node, fx.Node](), {name: place for place, name in enumerate(program.weights)}
    for place, node in enumerate(program.module.graph.nodes):
        copies[node] = copy = graph.node_copy(node, copies.__getitem__)
        copy.name = f"_{place}"
        if node.op == "placeholder":
            copy.target = copy.name
        elif node.op == "get_attr":
            copy.target = str(numbers[str(node.target)])
    addresses = [weight.data_ptr() for weight in program.weights.values()]
    weights = [
        [_layout(spec_of("", weight)), weight.requires_grad, addresses.index(weight.data_ptr())]
        for weight in program.weights.values()
    ]
    values = [sha256(bytes_of(weight)).hexdigest() for name, weight in program.weights.items() if name in held]
    free = [[list(axis) for axis in program.free.get(spec.name, {}).items()] for spec in program.inputs]
    return [encode(graph), [list(map(_layout, specs)) for specs in (program.inputs, program.outputs)], weights, values, free]


def _layout(spec: TensorSpec) -> dict[str, Any]:
    return asdict(replace(spec, name="", offset_bytes=0))


def take(kept: Path, file: Path) -> bool:
    """Write an export to a file; return whether it is whole."""
    try:
        with open_file(kept, root=kept.parents[1]) as stream:
            data = stream.read()
        digest, content = data[: sha256().digest_size], data[sha256().digest_size :]
        if sha256(content).digest() != digest:
            return False
        file.write_bytes(content)
        os.utime(kept)
    except OSError:
        return False
    return True


def keep(kept: Path, file: Path) -> None:
    """Keep a file, unless it is large or there is no room. Nothing else depends on it, so no failure is told."""
    if file.stat().st_size > LARGEST_BYTES:
        return
    content = file.read_bytes()
    with contextlib.suppress(OSError):
        write_atomic(kept, sha256(content).digest() + content, root=kept.parents[1])
        _make_room(kept.parent)


def _make_room(folder: Path) -> None:
    """Delete the exports that were not used for the longest time, until all others have no more than ``MOST_BYTES``."""
    num_bytes = 0
    for path in sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: -path.stat().st_mtime):
        num_bytes += path.stat().st_size
        if num_bytes > MOST_BYTES:
            path.unlink(missing_ok=True)


@cache
def _makers() -> list[str]:
    """The versions that exports depend on, and the sources of the modules here that make them."""
    here = Path(__file__).parent
    sources = [file_hash(here / f"{name}.py") for name in ("onnxfile", "decomposing", "translating", "ports")]
    return [*(version_of(name) for name in MADE_BY), *sources]
