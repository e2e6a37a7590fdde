"""Per-op times from a runtime's own profiler, and the names that lead from its nodes back to the ops of the graph.

ONNX Runtime writes a trace of every kernel. OpenVINO counts time in each compiled node, and lists the names that a node was fused
from. Both start from the ONNX file, whose nodes carry the name of their fx node. Of a stage in pieces, each file is profiled, and
each custom operator between two files is timed.
"""

import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from autosplit.backends.base import Runnable
from autosplit.backends.onnxfile import open_onnx
from autosplit.backends.pieces import PIECES, Call, in_pieces, piece_folders
from autosplit.compat.torchparts import OpOverload, schema_of
from autosplit.tracing.flattening import is_op
from autosplit.tracing.splitting import load_stage
from autosplit.values.samples import Precision

FX_NODE = "pkg.torch.onnx.fx_node"
KERNEL = "_kernel_time"
MICRO = 1e-6
_GENERATED_SUFFIX = re.compile(r"(_nchwc|_quantized)$")


@dataclass(frozen=True, slots=True)
class RuntimeNode:
    """A node that a runtime ran: name, kind of operator, seconds of each pass, and the names that it was fused from."""

    name: str
    kind: str
    samples_s: tuple[float, ...]
    origins: tuple[str, ...] = ()

    def ops(self, names: Mapping[str, str]) -> list[str]:
        """The ops whose ``names`` the node kept."""
        found = []
        for name in self.origins or (self.name,):
            for piece in (name, *re.split(r"[/ ]", name)):
                if op := names.get(piece) or names.get(_GENERATED_SUFFIX.sub("", piece)):
                    found.append(op)
                    break
        return list(dict.fromkeys(found))


class Probe(Protocol):
    """A stage that runs with its runtime's profiler on."""

    def sample(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """One profiled pass, and its outputs."""

    def nodes(self) -> list[RuntimeNode]:
        """End profiling, and return the nodes in the order of execution with one sample for each pass."""


def probe(backend: str, folder: Path, threads: int, precision: Precision = "f32") -> Probe | None:
    """The prepared stage under its backend's profiler; None if there is none, or it cannot take a dtype of the files."""
    if backend not in ("onnxruntime", "openvino"):
        return None
    places = piece_folders(folder, precision)
    ports = (port for place in places for stage in [open_onnx(place)] for port in (*stage.inputs, *stage.outputs))
    if backend == "onnxruntime" and not all(port.spec.in_numpy for port in ports):  # its profiler is called by arrays of numpy
        return None

    def of_file(place: Path) -> Probe:
        return OnnxRuntimeProbe(place, threads) if backend == "onnxruntime" else OpenVinoProbe(place, threads, precision)

    return of_file(folder) if places == [folder] else PiecesProbe(folder, threads, precision, of_file)


def onnx_names(folder: Path) -> dict[str, str]:
    """Map each name of a node or value in the ONNX file of a stage to its fx node; none for a stage in pieces.

    The exporter numbers the calls of each operator from 0: its ``linear_1`` is the second one in the stage, whatever its name.
    """
    import onnx

    if any(folder.glob(PIECES.format("*"))):
        return {}
    ops, counts, names = dict[str, str](), Counter[str](), dict[str, str]()
    for node in filter(is_op, load_stage(folder, trust=True).module.graph.nodes):
        kind = schema_of(node.target).name.split("::")[1] if isinstance(node.target, OpOverload) else node.name
        ops[f"{kind}_{counts[kind]}" if counts[kind] else kind] = node.name
        counts[kind] += 1
    for node in onnx.load(open_onnx(folder).path, load_external_data=False).graph.node:
        source = next((entry.value for entry in node.metadata_props if entry.key == FX_NODE), "")
        found = re.match(r"%?(\w+)", source)
        if found:
            names.update(dict.fromkeys([node.name, *node.output], ops.get(found[1], found[1])))
    return names


class OnnxRuntimeProbe:
    """A session with ``enable_profiling`` on the optimised file; profiled passes take as long as others."""

    def __init__(self, folder: Path, threads: int) -> None:
        import onnxruntime

        from autosplit.backends.onnxruntime import open_optimised, session_options

        self._stage = open_optimised(folder)
        # Inside the stage folder, so that it is removed even if this worker is killed.
        self._traces = tempfile.TemporaryDirectory(dir=folder, prefix=".trace-")
        options = session_options(threads)
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(self._traces.name) / "trace")
        self._session = onnxruntime.InferenceSession(self._stage.path, options, providers=["CPUExecutionProvider"])

    def sample(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """One profiled pass, and its outputs."""
        return self._stage.restored(self._session.run(None, self._stage.arrays(inputs)))

    def nodes(self) -> list[RuntimeNode]:
        """Kernel times, which ONNX Runtime rounds to microseconds."""
        path = Path(self._session.end_profiling())
        events = json.loads(path.read_text(encoding="utf-8"))
        self._traces.cleanup()
        samples: dict[str, list[float]] = {}
        kinds: dict[str, str] = {}
        for event in sorted((e for e in events if e.get("cat") == "Node"), key=lambda event: float(event["ts"])):
            if event["name"].endswith(KERNEL):
                name = event["name"].removesuffix(KERNEL)
                samples.setdefault(name, []).append(event["dur"] * MICRO)
                kinds[name] = event["args"].get("op_name", "")
        return [RuntimeNode(name, kinds[name], tuple(values)) for name, values in samples.items()]


class OpenVinoProbe:
    """A compiled model with performance counters."""

    def __init__(self, folder: Path, threads: int, precision: Precision) -> None:
        from autosplit.backends.openvino import Compiled, FreeRequest, core, settings

        stage, chosen = open_onnx(folder), {**settings(threads, precision), "PERF_COUNT": True}
        compiled = core().compile_model(core().read_model(stage.path), "CPU", chosen)
        self._origins = {node.get_friendly_name(): _origins(node) for node in compiled.get_runtime_model().get_ordered_ops()}
        self._run = FreeRequest(Compiled(stage, compiled))
        self._samples: dict[str, list[float]] = {}
        self._kinds: dict[str, str] = {}

    def sample(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """One profiled pass, and its outputs."""
        made = self._run(inputs)
        for node in self._run.request.profiling_info:
            if str(node.status).endswith("EXECUTED"):
                self._samples.setdefault(node.node_name, []).append(node.real_time.total_seconds())
                self._kinds[node.node_name] = node.node_type
        return made

    def nodes(self) -> list[RuntimeNode]:
        """The executed nodes in the order of OpenVINO's runtime model."""
        ordered = [name for name in self._origins if name in self._samples]
        ordered += [name for name in self._samples if name not in self._origins]
        return [RuntimeNode(n, self._kinds[n], tuple(self._samples[n]), self._origins.get(n, ())) for n in ordered]


class PiecesProbe:
    """A stage in pieces, each file under its runtime's profiler, which ``of_file`` makes."""

    def __init__(self, folder: Path, threads: int, precision: Precision, of_file: Callable[[Path], Probe]) -> None:
        self._parts = list[Callable[[], list[RuntimeNode]]]()

        def opened(place: Path) -> Runnable:
            found = of_file(place)

            def nodes() -> list[RuntimeNode]:
                names = onnx_names(place)  # of this piece alone: others have the same names
                return [replace(one, name=f"{place.name}:{one.kind}", origins=tuple(one.ops(names))) for one in found.nodes()]

            self._parts.append(nodes)
            return found.sample

        def watched(ops: Sequence[str], call: Call) -> Call:
            samples_s = list[float]()
            self._parts.append(lambda: [RuntimeNode(ops[0], "", tuple(samples_s), tuple(ops))])

            def timed() -> None:
                begun_s = time.perf_counter()
                call()
                samples_s.append(time.perf_counter() - begun_s)

            return timed

        self.sample = in_pieces(folder, opened, threads, precision, trust=True, watch=watched)

    def nodes(self) -> list[RuntimeNode]:
        """The nodes of the files, by their ops, and between them one for each custom operator."""
        return [node for part in self._parts for node in part()]


def _origins(node: Any) -> tuple[str, ...]:
    """The names of the nodes that a node of OpenVINO's runtime model was fused from."""
    info = node.get_rt_info()
    return (
        tuple(name for name in str(info["originalLayersNames"].value).split(",") if name) if "originalLayersNames" in info else ()
    )
