"""Runs a bundle of ONNX Runtime and OpenVINO parts. Needs numpy and these runtimes, nothing else: no torch, no autosplit.

    from driver import Bundle
    bundle = Bundle()                        # the folder that this file lies in; a network's name where there are several
    answer = bundle.run({"x": array})        # one request: arrays by name or in order; returns what the model returns
    answers = bundle.run_many(requests, policy="pipelined")  # a thread for each part; "serial" runs them one by one

The folder may be moved as a whole. ``manifest.json`` is the table of the parts.
"""

import errno
import hashlib
import io
import json
import math
import queue
import stat
import threading
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

SCHEMA = 1
MAX_BYTES = 100_000_000
WEIGHTS = "weights.safetensors"
ROLES = {"onnxruntime": "onnx", "openvino": "ir"}
Values = dict[str, Any]
Request = Mapping[str, Any] | Sequence[Any]


class Bundle:
    """One network of a bundle.

    Args:
        folder: the bundle's folder; by default the one that this file lies in.
        network: its name; may be left out where there is only one.
        threads: threads of each part; by default those of the plan.
        verify: False leaves out the hashes of the files.
    Raises: ValueError: the bundle is damaged, or has parts for other backends. ImportError: a runtime is not installed.
    """

    def __init__(
        self, folder: str | Path | None = None, network: str | None = None, threads: int | None = None, verify: bool = True
    ) -> None:
        folder = Path(folder) if folder is not None else Path(__file__).resolve().parent
        self.manifest = read_manifest(folder)
        self.network: dict[str, Any] = _network(self.manifest, network)
        _check_files(folder, self.manifest["files"], verify)
        parts = self.network["parts"]
        made = {"onnxruntime": _onnxruntime, "openvino": _openvino}
        strange = [part["name"] for part in parts if part["backend"] not in made]
        if strange:
            raise ValueError(f"part '{strange[0]}' is not for {' or '.join(made)}; autosplit.load_bundle runs it")
        self._runs = [
            _Part(part, made[part["backend"]](folder, part, self, threads or part["threads"]), _dead(parts, number, self.network))
            for number, part in enumerate(parts)
        ]

    def run(self, inputs: Request) -> Any:
        """What the model returns for one request, whose arrays are given by name or in order."""
        values = self._checked(inputs)
        for part in self._runs:
            part.run(values)
        return filled(self.network["answer"], values)

    def run_many(self, requests: Iterable[Request], policy: str = "serial", depth: int = 2) -> list[Any]:
        """The answers to many requests, in order; with ``policy="pipelined"`` at most ``depth`` wait before each part.

        Raises: the first error of a part, once all threads have ended.
        """
        if policy not in ("serial", "pipelined"):
            raise ValueError(f"policy must be 'serial' or 'pipelined', but is {policy!r}")
        if policy == "serial":
            return [self.run(request) for request in requests]
        queues: list[queue.Queue[Any]] = [queue.Queue(depth) for _ in self._runs]
        queues.append(queue.Queue())
        errors: list[Exception] = []
        threads = [
            threading.Thread(target=_work, args=(part, source, target, errors), name=part.name, daemon=True)
            for part, source, target in zip(self._runs, queues, queues[1:], strict=False)
        ]
        for thread in threads:
            thread.start()
        try:
            for request in requests:
                if errors:
                    break
                queues[0].put(self._checked(request))
        finally:
            queues[0].put(None)
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        return [filled(self.network["answer"], values) for values in iter(queues[-1].get, None)]

    def _checked(self, inputs: Request) -> Values:
        """The inputs by name, as arrays of the shapes and dtypes that the bundle was made for."""
        names = self.network["inputs"]
        given: dict[Any, Any] = dict(inputs) if isinstance(inputs, Mapping) else dict(enumerate(inputs))
        keys: Sequence[Any] = names if isinstance(inputs, Mapping) else range(len(names))
        if set(given) != set(keys):
            raise ValueError(f"the inputs are {names}, and {sorted(map(str, given))} were given")
        specs = {spec["name"]: spec for part in self.network["parts"] for spec in part["inputs"]}
        values = {}
        for key, name in zip(keys, names, strict=True):
            spec, array = specs.get(name), np.asarray(given[key])
            if spec is not None and (list(array.shape) != spec["shape"] or array.dtype != spec["dtype"]):
                found, wanted = f"{array.dtype}{list(array.shape)}", f"{spec['dtype']}{spec['shape']}"
                raise ValueError(f"input '{name}' is {found}, and {wanted} is expected")
            values[name] = array
        return values


class _Part:
    """A part as a step: it adds its outputs to the values that are there, and drops those that no later part reads."""

    def __init__(self, part: Mapping[str, Any], call: Callable[[list[Any]], Sequence[Any]], drop: Sequence[str]) -> None:
        self.name: str = part["name"]
        self._call = call
        self._drop = drop
        self._inputs = [(spec["name"], order) for spec, order in zip(part["inputs"], part["input_orders"], strict=True)]
        self._outputs = [
            (spec["name"], [order.index(dim) for dim in range(len(order))])
            for spec, order in zip(part["outputs"], part["output_orders"], strict=True)
        ]

    def run(self, values: Values) -> None:
        """Run on the values. A runtime takes and gives dense arrays; transposing one is a view."""
        made = self._call([np.asarray(values[name].transpose(order), order="C") for name, order in self._inputs])
        for (name, order), value in zip(self._outputs, made, strict=True):
            values[name] = value.transpose(order)
        for name in self._drop:
            del values[name]


def _onnxruntime(folder: Path, part: Mapping[str, Any], bundle: Bundle, threads: int) -> Callable[[list[Any]], Sequence[Any]]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
    session = onnxruntime.InferenceSession(str(folder / part["files"]["onnx"]), options, providers=["CPUExecutionProvider"])
    inputs, outputs = ([spec["name"] for spec in part[side]] for side in ("inputs", "outputs"))
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
    if (
        openvino.__version__.startswith(bundle.manifest["versions"].get("openvino", "?"))
        and part["threads"] == threads
        and "blob" in part["files"]
    ):
        blob = io.BytesIO((folder / part["files"]["blob"]).read_bytes())
        given = {**settings, "CACHE_MODE": "OPTIMIZE_SIZE", "WEIGHTS_PATH": str(folder / WEIGHTS)}
        try:
            model = _core().import_model(blob, "CPU", given)
        except RuntimeError:  # the blob's header names another version of OpenVINO or another instruction set
            model = None
    if model is None:
        model = _core().compile_model(_core().read_model(folder / part["files"]["ir"], folder / WEIGHTS), "CPU", settings)
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


def _work(part: _Part, source: "queue.Queue[Any]", target: "queue.Queue[Any]", errors: list[Exception]) -> None:
    """Run a part on what comes until None comes; after an error only drain, so that no thread waits without end."""
    for values in iter(source.get, None):
        if errors:
            continue
        try:
            part.run(values)
            target.put(values)
        except Exception as failure:
            errors.append(failure)
    target.put(None)


def _dead(parts: Sequence[Mapping[str, Any]], number: int, network: Mapping[str, Any]) -> list[str]:
    """The values that part ``number`` reads or makes, and that nothing after it needs."""
    here = dict.fromkeys(spec["name"] for side in ("inputs", "outputs") for spec in parts[number][side])
    later = {spec["name"] for part in parts[number + 1 :] for spec in part["inputs"]} | set(network["outputs"])
    return [name for name in here if name not in later]


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a bundle. Raises: ValueError: it is damaged, edited, of another version, or does not fit together."""
    path, again = folder / "manifest.json", "Make the bundle again."
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        with path.open("rb") as file:
            manifest: dict[str, Any] = json.loads(file.read(MAX_BYTES))
    except OSError as failure:
        raise ValueError(f"'{path}' cannot be read: {failure.strerror}. Name the folder of a bundle.") from None
    except (ValueError, RecursionError) as failure:
        raise ValueError(f"'{path}' is truncated or not JSON: {str(failure)[:200]}. {again}") from None
    found = manifest.get("schema") if isinstance(manifest, dict) else None
    if found != SCHEMA:
        raise ValueError(f"'{path}' has schema version {found!r:.60}, and this driver reads version {SCHEMA}. {again}")
    try:
        rest = {name: value for name, value in manifest.items() if name not in ("schema", "key")}
        text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
        if hashlib.sha256(text.encode()).hexdigest()[:16] != manifest["key"]:
            raise ValueError("it was changed after it was written")
        if any(Path(name).name != name or name.startswith(".") for name in manifest["files"]):
            raise ValueError("a file lies outside of the folder")
        for network in manifest["networks"].values():
            _check_network(network, manifest["files"])
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as failure:
        raise ValueError(f"'{path}' is damaged: {type(failure).__name__} {str(failure)[:200]}. {again}") from None
    return manifest


def _check_network(network: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    """Raises: one of many exceptions: the parts do not fit together."""
    there = set(network["inputs"])
    for part in network["parts"]:
        inputs, outputs = ({spec["name"] for spec in part[side]} for side in ("inputs", "outputs"))
        if not inputs <= there or outputs & there or not set(part["files"].values()) <= set(files):
            raise ValueError(f"part '{part['name']:.60}' reads a value or a file that is not there, or makes a value twice")
        if ROLES.get(part["backend"], "") not in ("", *part["files"]):
            raise ValueError(f"part '{part['name']:.60}' has no file for {part['backend']}")
        for side in ("input", "output"):
            for spec, order in zip(part[f"{side}s"], part[f"{side}_orders"], strict=True):
                if sorted(order) != list(range(len(spec["shape"]))) or not isinstance(spec["dtype"], str):
                    raise ValueError(f"value '{spec['name']:.60}' has no layout")
                math.prod(spec["shape"])
        there |= outputs
    filled(network["answer"], dict.fromkeys(there))


def _network(manifest: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    networks = manifest["networks"]
    if name is None and len(networks) == 1:
        name = next(iter(networks))
    if name not in networks:
        raise ValueError(f"network {name!r} is not in the bundle; name one of {', '.join(networks)}")
    found: dict[str, Any] = networks[name]
    return found


def _check_files(folder: Path, files: Mapping[str, Mapping[str, Any]], hashed: bool) -> None:
    """Raises: ValueError: a file is missing, truncated, a link, or was changed."""
    for name, noted in files.items():
        path = folder / name
        if path.is_symlink() or not path.is_file() or path.stat().st_size != noted["num_bytes"]:
            raise ValueError(f"file '{path}' is missing, a link, or truncated")
        if hashed:
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != noted["sha256"]:
                    raise ValueError(f"file '{path}' was changed after it was written")


def filled(container: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """The model's answer: its containers with the values at their places. Raises: one of many exceptions: they do not fit."""
    [(kind, content)] = container.items()
    if kind == "value":
        return values[content]
    if kind == "constant":
        return content
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(filled(item, values) for item in content)
    if kind == "dict":
        return {key: filled(item, values) for key, item in content}
    if kind != "namedtuple":
        raise ValueError(f"the answer has a container of kind {kind!r:.60}")
    name, pairs = content
    return _class(name, *(key for key, _ in pairs))(*(filled(item, values) for _, item in pairs))


@lru_cache
def _class(name: str, *fields: str) -> Any:
    """A class of named tuples. Raises: ValueError, TypeError: a name is not an identifier."""
    return namedtuple(name, fields)
