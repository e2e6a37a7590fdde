"""The C++ driver of a bundle with AOTInductor parts, and its table: the manifest as lines that C++ reads without a JSON library.

::

    autosplit bundle 2
    network NAME
    variants COUNT
    input NAME DTYPE 0 NUM_DIMS SIZES... STRIDES...
    output NAME
    part LIBRARY THREADS
    weight NAME DTYPE OFFSET_BYTES NUM_DIMS SIZES... STRIDES...
    reads NAME
    makes NAME
    end
"""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from autosplit.bundling.manifest import LIBRARY, Network
from autosplit.tracing.tensorspec import TensorSpec

SOURCES = Path(__file__).parent / "cpp"
TABLE = "table.txt"


def write_native_driver(folder: Path, networks: Mapping[str, Network], starts: Mapping[str, int]) -> None:
    """Write the table and the sources, if a network has AOTInductor parts only; ``starts``: the places of the weights.

    A network of several variants is in the table at its largest sizes, for the driver to refuse it by name.
    """
    native = {name: network for name, network in networks.items() if all(LIBRARY in part.files for part in network.parts)}
    if not native:
        return
    lines = ["autosplit bundle 2"]
    for name, network in native.items():
        lines += _lines(name, network, starts)
    (folder / TABLE).write_text("\n".join([*lines, "end"]) + "\n", encoding="utf-8")
    for source in SOURCES.iterdir():
        shutil.copyfile(source, folder / source.name)


def _lines(name: str, network: Network, starts: Mapping[str, int]) -> Iterator[str]:
    yield f"network {' '.join(name.split())}"
    yield f"variants {len(network.ranges.variants)}"
    specs = {spec.name: spec for part in network.parts for spec in part.inputs}
    yield from (f"input {_layout(specs[value], 0)}" for value in network.inputs if value in specs)
    yield from (f"output {value}" for value in network.outputs)
    for part in network.parts:
        yield f"part {part.files[LIBRARY]} {part.threads}"
        yield from (f"weight {_layout(weight.spec, starts[weight.content])}" for weight in part.weights)
        yield from (f"reads {spec.name}" for spec in part.inputs)
        yield from (f"makes {spec.name}" for spec in part.outputs)


def _layout(spec: TensorSpec, start: int) -> str:
    return " ".join(map(str, (spec.name, spec.dtype, start, len(spec.shape), *spec.shape, *spec.stride)))
