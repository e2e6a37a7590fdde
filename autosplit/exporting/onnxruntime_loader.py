"""Runs a model that was split into stages and exported as ONNX files. Needs numpy and onnxruntime, nothing else.

    from loader import Pipeline
    pipeline = Pipeline()                      # the folder that this file lies in
    outputs = pipeline.run({"x": array})       # one request: arrays by name or in order; returns what the model returns
    results = pipeline.run_pipelined(requests) # many: one thread for each stage, in order

The folder may be moved as a whole. ``manifest.json`` says what the stages are and how they are connected. An output has the
model's own containers and names; an object with named fields is a dict.
"""

import json
import queue
import threading
from collections import namedtuple
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

SCHEMA = 2
MAX_BYTES = 20_000_000


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest in a file. Raises: ValueError: it is damaged, of another version, or its stages do not fit together."""
    again = "Export the plan again."
    try:
        with path.open("rb") as file:
            manifest: dict[str, Any] = json.loads(file.read(MAX_BYTES))
    except (ValueError, RecursionError) as failure:
        raise ValueError(f"'{path}' is truncated or not JSON: {str(failure)[:200]}. {again}") from None
    found = manifest.get("schema") if isinstance(manifest, dict) else None
    if found != SCHEMA:
        raise ValueError(f"'{path}' has schema version {found!r:.60}, and this loader reads version {SCHEMA}. {again}")
    try:
        there = _names(manifest["inputs"])
        for stage in manifest["stages"]:
            inputs, outputs, drop = _names(stage["inputs"]), _names(stage["outputs"]), set(stage["drop"])
            if not isinstance(stage["name"], str) or Path(stage["file"]).name != stage["file"]:
                raise TypeError("a stage has a name that is not a text, or a file outside of the folder")
            if not inputs <= there or outputs & there or not drop <= there | outputs:
                raise ValueError(f"stage '{stage['name']:.60}' reads or drops a value that is not there, or makes one twice")
            there = (there | outputs) - drop
        if not _names(manifest["outputs"]) <= there:
            raise ValueError("an output is made by no stage")
        _filled(manifest["answer"], dict.fromkeys(_names(manifest["outputs"])))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as failure:
        raise ValueError(f"'{path}' is damaged: {type(failure).__name__} {str(failure)[:200]}. {again}") from None
    return manifest


def _names(values: Sequence[Mapping[str, Any]]) -> set[str]:
    """The names of values. Raises: one of many exceptions: a name is not a text, a shape not a list of sizes, a dtype unknown."""
    for value in values:
        if value["dtype"] not in np.sctypeDict:
            raise TypeError("a value has a dtype that numpy does not have")
        if not isinstance(value["name"], str) or any(type(size) is not int for size in value["shape"]):
            raise TypeError("a value has a name that is not a text, or a shape that is not a list of integers")
    return {value["name"] for value in values}


def _filled(container: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """The model's answer: its containers with the values at their places. Raises: one of many exceptions: they do not fit."""
    [(kind, content)] = container.items()
    if kind == "value":
        return values[content]
    if kind == "constant":
        return content
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(_filled(item, values) for item in content)
    if kind == "dict":
        return {key: _filled(item, values) for key, item in content}
    if kind != "namedtuple":
        raise ValueError(f"the answer has a container of kind {kind!r:.60}")
    name, pairs = content
    return _class(name, *(key for key, _ in pairs))(*(_filled(item, values) for _, item in pairs))


@lru_cache
def _class(name: str, *fields: str) -> Any:
    """A class of named tuples. Raises: ValueError, TypeError: a name is not an identifier."""
    return namedtuple(name, fields)


class Stage:
    """One ONNX file as a session on ``threads`` threads."""

    def __init__(self, folder: Path, entry: Mapping[str, Any], threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self.name: str = entry["name"]
        self.inputs: list[str] = [value["name"] for value in entry["inputs"]]
        self.outputs: list[str] = [value["name"] for value in entry["outputs"]]
        self.drop: list[str] = entry["drop"]
        self.session = onnxruntime.InferenceSession(str(folder / entry["file"]), options, providers=["CPUExecutionProvider"])

    def run(self, values: dict[str, Any]) -> None:
        """Add this stage's outputs to ``values`` and drop what no later stage reads."""
        results = self.session.run(self.outputs, {name: values[name] for name in self.inputs})
        values.update(zip(self.outputs, results, strict=True))
        for name in self.drop:
            del values[name]


class Pipeline:
    """The whole model: its stages in order.

    ``folder`` is the exported folder, ``threads`` the threads of each stage.
    """

    def __init__(self, folder: str | Path | None = None, threads: int = 1) -> None:
        folder = Path(folder) if folder is not None else Path(__file__).resolve().parent
        path = folder / "manifest.json"
        self.manifest = _read_manifest(path)
        self.stages = [Stage(folder, entry, threads) for entry in self.manifest["stages"]]

    def run(self, inputs: Mapping[str, Any] | Sequence[Any]) -> Any:
        """What the model returns for one request, whose arrays are given by name or in order; the stages run one by one."""
        values = self._checked(inputs)
        for stage in self.stages:
            stage.run(values)
        return _filled(self.manifest["answer"], values)

    def run_pipelined(self, requests: Iterable[Mapping[str, Any] | Sequence[Any]], depth: int = 2) -> list[Any]:
        """Many requests at once, each stage in a thread of its own, at most ``depth`` waiting before each stage.

        The results come in the order of the requests. The first error of a stage is raised once all threads have ended.
        """
        queues: list[queue.Queue[Any]] = [queue.Queue(depth) for _ in self.stages]
        queues.append(queue.Queue())
        errors: list[Exception] = []
        threads = [
            threading.Thread(target=_work, args=(stage, source, target, errors), name=stage.name, daemon=True)
            for stage, source, target in zip(self.stages, queues, queues[1:], strict=False)
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
        return [_filled(self.manifest["answer"], values) for values in iter(queues[-1].get, None)]

    def _checked(self, inputs: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
        """The inputs by name, as contiguous arrays of the shapes and dtypes that the model was exported for."""
        specs = self.manifest["inputs"]
        names = [spec["name"] for spec in specs]
        given = dict(inputs) if isinstance(inputs, Mapping) else dict(enumerate(inputs))
        keys: Sequence[Any] = names if isinstance(inputs, Mapping) else range(len(specs))
        if set(given) != set(keys):
            raise ValueError(f"the inputs are {names}, and {sorted(map(str, given))} were given")
        values = {}
        for key, spec in zip(keys, specs, strict=True):
            array = np.ascontiguousarray(given[key]).reshape(np.shape(given[key]))
            if list(array.shape) != spec["shape"] or array.dtype != spec["dtype"]:
                found, wanted = f"{array.dtype}{list(array.shape)}", f"{spec['dtype']}{spec['shape']}"
                raise ValueError(f"input '{spec['name']}' is {found}, and {wanted} is expected")
            values[spec["name"]] = array
        return values


def _work(stage: Stage, source: "queue.Queue[Any]", target: "queue.Queue[Any]", errors: list[Exception]) -> None:
    """Run a stage on what comes until None comes; after an error only drain, so that no one waits for ever."""
    for values in iter(source.get, None):
        if errors:
            continue
        try:
            stage.run(values)
            target.put(values)
        except Exception as failure:
            errors.append(failure)
    target.put(None)
