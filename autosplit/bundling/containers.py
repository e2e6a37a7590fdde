"""The containers in which a model returns its tensors, as JSON that a loader without torch builds again."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from autosplit.errors import UsageError
from autosplit.tracing.capturing import Traced


def output_containers(traced: Traced) -> dict[str, Any]:
    """The model's own output containers, with the name of a value or a constant at each leaf.

    Each container is a mapping with one key: ``value`` (a name of ``traced.graph.outputs``), ``constant``, ``list``, ``tuple``,
    ``dict`` (pairs of key and container) or ``namedtuple`` (class name, pairs of field and container). Objects with named
    fields, such as the outputs of transformers, become dicts, because their classes are not there when the bundle runs.

    Raises: UsageError: a container is of another class, or a constant is one that JSON cannot hold.
    """
    tensors = [torch.empty(0) for _ in traced.graph.outputs]
    names = {id(tensor): name for tensor, name in zip(tensors, traced.graph.outputs, strict=True)}
    return _described(traced.unflatten_outputs(tensors), names)


def _described(value: Any, names: Mapping[int, str]) -> dict[str, Any]:
    if id(value) in names:
        return {"value": names[id(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"constant": value}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"namedtuple": [type(value).__name__, _pairs(zip(value._fields, value, strict=True), names)]}
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [_described(item, names) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": _pairs(value.items(), names)}
    if is_dataclass(value):
        return {"dict": _pairs(((field.name, getattr(value, field.name)) for field in fields(value)), names)}
    raise UsageError(
        f"the model returns a {type(value).__name__}, which a bundle cannot build again; return tensors in tuples, lists or dicts"
    )


def _pairs(items: Any, names: Mapping[int, str]) -> list[list[Any]]:
    return [[key, _described(value, names)] for key, value in items]
