"""Runs a bundle of ONNX Runtime and OpenVINO parts. Needs numpy and these runtimes, nothing else: no torch, no autosplit.

from driver import Bundle
bundle = Bundle()                        # the folder that this file lies in; a network's name where there are several
answer = bundle.run({"x": array})        # one request: arrays by name or in order; returns what the model returns
answers = bundle.run_many(requests, policy="pipelined")  # a thread for each part; "serial" runs them one by one
"""

import hashlib
import io
import json
import math
import os
import queue
import re
import reprlib
import threading
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

SCHEMA = 1
MANIFEST, WEIGHTS = "manifest.json", "weights.safetensors"
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")
NEEDED = {"eager": "program", "onnxruntime": "onnx", "openvino": "ir", "inductor": "library"}
"""Backend to the role of the file that a part of it must have."""
MAX_JSON_BYTES, MAX_BRACKETS, MAX_DEPTH, MAX_COUNT, MAX_QUEUE_DEPTH = 100_000_000, 2_000_000, 50, 1 << 40, 1024
"""Limits of a manifest: its bytes, lists and objects, the containers of an answer inside each other, its integers and slots."""

_TENSOR = {"name": str, "shape": [int], "stride": [int], "dtype": str, "offset_bytes": int}
_PART = {
    "name": str, "backend": str, "devices": [str], "threads": int, "streams": int, "load_s": float,
    "inputs": [_TENSOR], "outputs": [_TENSOR], "input_orders": [[int]], "output_orders": [[int]], "files": {str: str},
    "weights": [{"content": str, "spec": _TENSOR}], "weight_bytes": int, "operators": [str],
}  # fmt: skip
_NETWORK = {
    "source": dict, "graph": str, "plan": str, "precision": str, "microbatch": int, "queue_depth": int,
    "inputs": [str], "outputs": [str], "parts": [_PART], "answer": dict,
}  # fmt: skip
_MANIFEST = {
    "key": str, "networks": {str: _NETWORK}, "files": {str: {"num_bytes": int, "sha256": str}}, "weights_key": str,
    "versions": {str: str}, "cpu": str,
}  # fmt: skip
"""The types of all values in a manifest: ``[kind]`` is a list, ``{str: kind}`` an object with any names."""

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
        parts = self.network["parts"]
        made = {"onnxruntime": _onnxruntime, "openvino": _openvino}
        if faults := file_faults(folder, self.manifest["files"], verify):
            raise ValueError(f"bundle '{folder}' is damaged: {'; '.join(faults[:20])}. Make the bundle again.")
        self._runs = []
        for number, part in enumerate(parts):
            if part["backend"] not in made:
                raise ValueError(f"part '{part['name']}' is not for {' or '.join(made)}; autosplit.load_bundle runs it")
            try:
                call = made[part["backend"]](folder, part, self, threads or min(part["threads"], os.cpu_count() or 1))
            except ImportError:
                raise
            except Exception as failure:  # each runtime has its own classes
                reason = " ".join(str(failure).split())[:300]
                raise ValueError(f"{part['backend']} refuses part '{part['name']}' of '{folder}': {reason}") from failure
            self._runs.append(_Part(part, call, _dead(parts, number, self.network)))

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
        queues: list[queue.Queue[Any]] = [*(queue.Queue(depth) for _ in self._runs), queue.Queue()]
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
            values[spec["name"]] = value.transpose(order)
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
    if shapes != dict(zip(inputs, _shapes(part, "input"), strict=True)) or not made >= set(outputs):
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
    if [list(port.shape) for port in model.inputs] != _shapes(part, "input") or len(model.outputs) != len(part["outputs"]):
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


def _shapes(part: Mapping[str, Any], side: str) -> list[list[int]]:
    """The shape of each input or output in the order of dimensions in which the runtime has it."""
    pairs = zip(part[f"{side}s"], part[f"{side}_orders"], strict=True)
    return [[spec["shape"][dim] for dim in order] for spec, order in pairs]


def _dead(parts: Sequence[Mapping[str, Any]], number: int, network: Mapping[str, Any]) -> list[str]:
    """The values that part ``number`` reads or makes, and that nothing after it needs."""
    here = dict.fromkeys(spec["name"] for side in ("inputs", "outputs") for spec in parts[number][side])
    later = {spec["name"] for part in parts[number + 1 :] for spec in part["inputs"]} | set(network["outputs"])
    return [name for name in here if name not in later]


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


def _network_faults(network: Mapping[str, Any], files: Mapping[str, Any]) -> Iterator[str]:
    made: dict[str, Any] = dict.fromkeys(network["inputs"])
    if not network["parts"] or not network["outputs"] or len(made) < len(network["inputs"]):
        yield "has no parts, no outputs, or an input twice"
    if not 1 <= network["queue_depth"] <= MAX_QUEUE_DEPTH or not network["microbatch"]:
        yield f"has queue_depth {network['queue_depth']} and microbatch {network['microbatch']}"
    for part in network["parts"]:
        yield from (f"has part '{part['name']:.60}', which {fault}" for fault in _part_faults(part, files, made))
    yield from (f"has output '{name:.60}', which nothing makes" for name in network["outputs"] if name not in made)
    try:
        filled(network["answer"], dict.fromkeys(network["outputs"]))
    except (LookupError, TypeError, ValueError, AttributeError) as failure:
        yield f"has an answer that cannot be built: {type(failure).__name__} {str(failure)[:200]}"


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
