"""Runs a bundle of ONNX Runtime and OpenVINO parts. Needs numpy and these runtimes, nothing else: no torch, no autosplit.

from driver import Bundle
bundle = Bundle()                        # the folder that this file lies in; a network's name where there are several
answer = bundle.run({"x": array})        # one request: arrays by name or in order; returns the outputs of the model
answers = bundle.run_many(requests, policy="pipelined")  # a thread for each part; "serial" runs them one by one

A network for requests of several sizes takes any size within its ranges: a request is padded to the smallest variant that holds
it, and its outputs are cut back. Masks that are left out are filled in.
"""

import io
import math
import os
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING or __package__:
    from autosplit.bundling.bundlecheck import NEEDED, WEIGHTS, file_faults, filled, formed, masked_by, read_manifest, sizes_in
else:  # in a bundle, where both files lie in one folder
    from bundlecheck import NEEDED, WEIGHTS, file_faults, filled, formed, masked_by, read_manifest, sizes_in

Values = dict[str, Any]
Request = Mapping[str, Any] | Sequence[Any]


class Bundle:
    """One network of a bundle.

    Args:
        folder: the bundle's folder; by default the one that this file lies in.
        network: its name; may be left out where there is only one.
        threads: threads of each part; by default those of the plan.
        verify: False leaves out the hashes of the files.
    Raises: ValueError: the bundle is damaged, or a part is for another runtime. ImportError: a runtime is not installed.
    """

    def __init__(
        self, folder: str | Path | None = None, network: str | None = None, threads: int | None = None, verify: bool = True
    ) -> None:
        folder = Path(folder) if folder is not None else Path(__file__).resolve().parent
        self.manifest = read_manifest(folder)
        networks = self.manifest["networks"]
        name = network if network is not None or len(networks) > 1 else next(iter(networks))
        if name not in networks:
            raise ValueError(f"network {name!r} is not in the bundle; name one of {', '.join(networks)}")
        self.network: dict[str, Any] = networks[name]
        if faults := file_faults(folder, self.manifest["files"], verify):
            raise ValueError(f"bundle '{folder}' is damaged: {'; '.join(faults[:20])}. Make the bundle again.")
        self._fit = Fitter(self.network, np.full)
        self._runs = [self._loaded(folder, number, threads) for number in range(len(self.network["parts"]))]

    def _loaded(self, folder: Path, number: int, threads: int | None) -> list["_Part"]:
        """A part at the sizes of each variant; a file is loaded once for all variants that name it."""
        part, made = self.network["parts"][number], {"onnxruntime": _onnxruntime, "openvino": _openvino}
        if part["backend"] not in made:
            raise ValueError(f"part '{part['name']}' is not for {' or '.join(made)}; autosplit.load_bundle runs it")
        calls, dead = dict[str, Callable[[list[Any]], Sequence[Any]]](), _dead(self.network, number)
        found, num_threads = list[_Part](), threads or min(part["threads"], os.cpu_count() or 1)
        for form in (formed(part, variant) for variant in range(1 + len(part["variants"]))):
            file = form["files"][NEEDED[part["backend"]]]
            try:
                if file not in calls:
                    calls[file] = made[part["backend"]](folder, form, self, num_threads)
            except ImportError:
                raise
            except Exception as failure:  # each runtime has its own classes
                reason = " ".join(str(failure).split())[:300]
                raise ValueError(f"{part['backend']} refuses part '{part['name']}' of '{folder}': {reason}") from failure
            found.append(_Part(form, calls[file], dead))
        return found

    def run(self, inputs: Request) -> Any:
        """The outputs of the model for one request, whose arrays are given by name or in order."""
        request = self._fit(inputs)
        for parts in self._runs:
            parts[request.variant].run(request.values)
        return self._answer(request)

    def run_many(self, requests: Iterable[Request], policy: str = "serial", depth: int = 2) -> list[Any]:
        """The answers to many requests, in order; with ``policy="pipelined"`` at most ``depth`` wait before each part.

        Raises: the first error of a part, once all threads have ended.
        """
        if policy not in ("serial", "pipelined"):
            raise ValueError(f"policy must be 'serial' or 'pipelined', but is {policy!r}")
        if policy == "serial":
            return [self.run(request) for request in requests]
        queues: list[queue.Queue[Any]] = [*(queue.Queue(depth) for _ in self._runs), queue.Queue()]
        errors: list[Exception] = []
        threads = [
            threading.Thread(target=_work, args=(parts, source, target, errors), name=parts[0].name, daemon=True)
            for parts, source, target in zip(self._runs, queues, queues[1:], strict=False)
        ]
        for thread in threads:
            thread.start()
        try:
            for request in requests:
                if errors:
                    break
                queues[0].put(self._fit(request))
        finally:
            queues[0].put(None)
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        return [self._answer(request) for request in iter(queues[-1].get, None)]

    def _answer(self, request: "Fitted") -> Any:
        values = {name: self._fit.cut(name, request.values[name], request.sizes) for name in self.network["outputs"]}
        return filled(self.network["answer"], values)


class Fitted(NamedTuple):
    """A request: the variant that takes it, its inputs by name with the variant's shapes, and its own sizes by dimension."""

    variant: int
    values: Values
    sizes: dict[str, int]


class Fitter:
    """Finds the variant for a request and pads it, for arrays of numpy and tensors of torch alike.

    Args:
        network: the network of a manifest.
        full: makes an array of a shape, a value and the name of a dtype.
    """

    def __init__(self, network: Mapping[str, Any], full: Callable[[Sequence[int], int, str], Any]) -> None:
        self._names, self._ranges, self._full = network["inputs"], network["ranges"], full
        forms = ([formed(part, k) for part in network["parts"]] for k in range(len(self._ranges["variants"])))
        self._specs = [{spec["name"]: spec for form in one for spec in form["inputs"]} for one in forms]
        pairs = (*self._ranges["inputs"].items(), *self._ranges["outputs"].items())
        self._axes: dict[str, dict[int, str]] = {name: {int(axis): dim for axis, dim in axes.items()} for name, axes in pairs}

    def __call__(self, inputs: Request) -> Fitted:
        """The request. Raises: ValueError: names, shapes or dtypes do not fit, a size is outside its range, or none takes it."""
        values = self._named(inputs)
        sizes = self._sizes_of(values)
        variant = self._variant_of(sizes)
        for name, spec in self._specs[variant].items():
            if name not in values:
                continue
            value, axes = values[name], self._axes.get(name, {})
            shape = [sizes[axes[axis]] if axis in axes else size for axis, size in enumerate(spec["shape"])]
            dtype = str(value.dtype).removeprefix("torch.")
            if list(value.shape) != shape or dtype != spec["dtype"]:
                raise ValueError(f"input '{name}' is {dtype}{list(value.shape)}, and {spec['dtype']}{shape} is expected")
            if shape != list(spec["shape"]):
                values[name] = self._full(spec["shape"], 0, spec["dtype"])
                values[name][tuple(map(slice, shape))] = value
        return Fitted(variant, values, sizes)

    def cut(self, name: str, value: Any, sizes: Mapping[str, int]) -> Any:
        """The part of an output that belongs to a request of these sizes; a view."""
        axes = self._axes.get(name, {})
        return value[tuple(slice(sizes[axes[axis]] if axis in axes else None) for axis in range(value.ndim))] if axes else value

    def _named(self, inputs: Request) -> Values:
        """The inputs by name, with masks of ones where they are left out."""
        names, masks = self._names, self._ranges["masks"]
        given: dict[Any, Any] = dict(inputs) if isinstance(inputs, Mapping) else dict(enumerate(inputs))
        keys: Sequence[Any] = names if isinstance(inputs, Mapping) else range(len(names))
        absent = [name for key, name in zip(keys, names, strict=True) if key not in given]
        if not set(given) <= set(keys) or not set(absent) <= set(masks):
            raise ValueError(f"the inputs are {', '.join(names)}, and given are {', '.join(sorted(map(str, given)))}")
        values = {name: given[key] for key, name in zip(keys, names, strict=True) if key in given}
        values = {name: value if hasattr(value, "dtype") else np.asarray(value) for name, value in values.items()}
        for name in absent:
            shape = list(values[str(masked_by(self._ranges, name))].shape)
            values[name] = self._full(shape, 1, self._specs[0].get(name, {"dtype": "int64"})["dtype"])
        return values

    def _sizes_of(self, values: Values) -> dict[str, int]:
        found, faults = dict[str, tuple[int, str]](), list[str]()
        for name in self._names:
            for axis, dim in self._axes.get(name, {}).items() if name in values else ():
                size = values[name].shape[axis] if axis < values[name].ndim else 0
                known, place = found.setdefault(dim, (size, f"'{name}' axis {axis}"))
                if known != size:
                    faults.append(f"'{dim}' is {known} in {place} and {size} in '{name}' axis {axis}")
        for dim, text in self._ranges["sizes"].items():
            size, place = found[dim]
            if size < 1:
                faults.append(f"the request is empty: '{dim}' is {size} in {place}, and sizes are {text}")
            elif size not in sizes_in(text):
                faults.append(f"'{dim}' is {size} in {place}, and sizes are {text}; make the bundle of a plan for wider sizes")
        if faults:
            raise ValueError(f"the request does not fit: {'; '.join(faults)}")
        return {dim: size for dim, (size, _) in found.items()}

    def _variant_of(self, sizes: Mapping[str, int]) -> int:
        """The smallest variant that holds a request of these sizes."""
        variants, exact = self._ranges["variants"], self._ranges["unpaddable"]
        fits = [
            number
            for number, there in enumerate(variants)
            if all(size == there[dim] if dim in exact else size <= there[dim] for dim, size in sizes.items())
        ]
        if not fits:
            reason = next(iter(exact.values()), "a variant is missing")
            raise ValueError(f"the bundle holds variants of {variants}, and none takes a request of {dict(sizes)}: {reason}")
        return min(fits, key=lambda number: math.prod(variants[number].values()))


class _Part:
    """A part as a step: it adds its outputs to the known values, and drops those that no later part reads."""

    def __init__(self, part: Mapping[str, Any], call: Callable[[list[Any]], Sequence[Any]], drop: Sequence[str]) -> None:
        self.name: str = part["name"]
        self._call = call
        self._drop = drop
        for spec in (*part["inputs"], *part["outputs"]):
            if spec["dtype"] not in np.sctypeDict:
                raise ValueError(f"value '{spec['name']}' of part '{self.name}' is {spec['dtype']}, which numpy does not have")
        self._inputs = [(spec["name"], order) for spec, order in zip(part["inputs"], part["input_orders"], strict=True)]
        self._outputs = [
            (spec, shape, [order.index(dim) for dim in range(len(order))])
            for spec, shape, order in zip(part["outputs"], _shapes(part, "output"), part["output_orders"], strict=True)
        ]

    def run(self, values: Values) -> None:
        """Run on the values: a runtime takes and gives dense arrays. Raises: ValueError: an output is not as announced."""
        made = self._call([np.asarray(values[name].transpose(order), order="C") for name, order in self._inputs])
        for (spec, shape, order), value in zip(self._outputs, made, strict=True):
            value = np.asarray(value)
            if list(value.shape) != shape or value.dtype != spec["dtype"]:
                found, wanted = f"{value.dtype}{list(value.shape)}", f"{spec['dtype']}{shape}"
                raise ValueError(f"part '{self.name}' makes '{spec['name']}' as {found}, and the manifest says {wanted}")
            # ONNX Runtime may call an integer 'longlong', numpy's other name of int64, which OpenVINO does not know
            values[spec["name"]] = value.view(spec["dtype"]).transpose(order)
        for name in self._drop:
            del values[name]


def _onnxruntime(folder: Path, part: Mapping[str, Any], bundle: Bundle, threads: int) -> Callable[[list[Any]], Sequence[Any]]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
    session = onnxruntime.InferenceSession(str(folder / part["files"]["onnx"]), options, providers=["CPUExecutionProvider"])
    inputs, outputs = ([spec["name"] for spec in part[side]] for side in ("inputs", "outputs"))
    shapes = {port.name: port.shape for port in session.get_inputs()}
    made = {port.name for port in session.get_outputs()}
    wanted = dict(zip(inputs, _shapes(part, "input"), strict=True))
    fits = shapes.keys() == wanted.keys() and all(_holds(shapes[name], wanted[name]) for name in wanted)
    if not fits or not made >= set(outputs):
        raise ValueError("its file has other inputs or outputs than the manifest says")
    return lambda values: session.run(outputs, dict(zip(inputs, values, strict=True)))


def _openvino(folder: Path, part: Mapping[str, Any], bundle: Bundle, threads: int) -> Callable[[list[Any]], Sequence[Any]]:
    import openvino

    settings: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": str(threads),
        "INFERENCE_PRECISION_HINT": bundle.network["precision"],
        "ENABLE_CPU_PINNING": False,
    }
    model = None
    same = openvino.__version__.startswith(bundle.manifest["versions"].get("openvino", "?")) and part["threads"] == threads
    if same and "blob" in part["files"]:
        blob = io.BytesIO((folder / part["files"]["blob"]).read_bytes())
        cached = {"CACHE_MODE": "OPTIMIZE_SIZE", "WEIGHTS_PATH": str(folder / WEIGHTS)}
        try:
            model = _core().import_model(blob, "CPU", settings | cached)
        except RuntimeError:  # the blob's header names another version of OpenVINO or another instruction set
            model = None
    if model is None:
        model = _core().compile_model(_core().read_model(folder / part["files"]["ir"], folder / WEIGHTS), "CPU", settings)
    shapes = [[size.get_length() if size.is_static else None for size in port.partial_shape] for port in model.inputs]
    wanted = _shapes(part, "input")
    if len(shapes) != len(wanted) or not all(map(_holds, shapes, wanted)) or len(model.outputs) != len(part["outputs"]):
        raise ValueError("its file has other inputs or outputs than the manifest says")
    request = model.create_infer_request()

    def call(values: list[Any]) -> Sequence[Any]:
        for position, value in enumerate(values):
            request.set_input_tensor(position, openvino.Tensor(value, shared_memory=True))
        request.infer()
        return [request.get_output_tensor(position).data.copy() for position in range(len(part["outputs"]))]

    return call


@cache
def _core() -> Any:
    import openvino

    return openvino.Core()


def _work(parts: Sequence[_Part], source: "queue.Queue[Any]", target: "queue.Queue[Any]", errors: list[Exception]) -> None:
    """Run a part on each incoming request until None comes; after an error only drain, so that no thread waits without end."""
    for request in iter(source.get, None):
        if errors:
            continue
        try:
            parts[request.variant].run(request.values)
            target.put(request)
        except Exception as failure:
            errors.append(failure)
    target.put(None)


def _holds(shape: Sequence[Any], wanted: Sequence[int]) -> bool:
    """Whether an input of a file takes arrays of this shape; an axis of a file that takes every size has no number."""
    return len(shape) == len(wanted) and all(size == own for size, own in zip(wanted, shape, strict=True) if type(own) is int)


def _shapes(part: Mapping[str, Any], side: str) -> list[list[int]]:
    """The shape of each input or output in the order of dimensions in which the runtime has it."""
    pairs = zip(part[f"{side}s"], part[f"{side}_orders"], strict=True)
    return [[spec["shape"][dim] for dim in order] for spec, order in pairs]


def _dead(network: Mapping[str, Any], number: int) -> list[str]:
    """The values that part ``number`` reads or makes, and that nothing after it needs."""
    parts = network["parts"]
    here = dict.fromkeys(spec["name"] for side in ("inputs", "outputs") for spec in parts[number][side])
    later = {spec["name"] for part in parts[number + 1 :] for spec in part["inputs"]} | set(network["outputs"])
    return [name for name in here if name not in later]
