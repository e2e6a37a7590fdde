"""Parse a model spec into its target and its options, each with the type of the default that it replaces."""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

from autosplit.errors import ModelError, close_names, raise_faults

BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def parse_options(spec: str) -> tuple[str, dict[str, str]]:
    """The target of a spec and its options as text.

    >>> parse_options("transformers:BertModel?num_hidden_layers=4&use_cache=false")
    ('transformers:BertModel', {'num_hidden_layers': '4', 'use_cache': 'false'})

    Raises: ModelError: the options are not ``name=value`` pairs joined by ``&``, or one of them has several values.
    """
    target, _, query = spec.partition("?")
    try:
        options = parse_qs(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise ModelError(f"options '{query}' of model '{target}' are not name=value pairs joined by '&'") from None
    faults = [f"'{name}' is given as {' and as '.join(texts)}" for name, texts in options.items() if len(texts) > 1]
    raise_faults(ModelError, f"model '{target}' takes each option once", faults)
    return target, {name: text for name, [text] in options.items()}


def typed_options(options: Mapping[str, str], defaults: Mapping[str, Any], subject: str) -> dict[str, Any]:
    """The options as values of the types of their ``defaults``, which list every name that may be set.

    Raises: ModelError: it lists all unknown names, with close ones, and all values that do not fit; ``subject`` begins it.

    >>> typed_options({"depths": "2,2", "factor": "1"}, {"depths": [3, 4], "factor": 0.5}, "model 'm'")
    {'depths': [2, 2], 'factor': 1.0}
    """
    values, faults = {}, []
    for name, text in options.items():
        if name not in defaults:
            faults.append(f"it has no field '{name}'{close_names(name, defaults)}")
            continue
        try:
            values[name] = typed(text, defaults[name])
        except ValueError:
            faults.append(f"field '{name}' takes {_kind(defaults[name])}, not '{text}'")
    raise_faults(ModelError, f"{subject} cannot take these options", faults)
    return values


def typed(text: str, default: Any) -> Any:
    """The text as a value of the default's type, or JSON or text if that is None. Raises: ValueError: it does not fit."""
    if isinstance(default, bool):
        if text.lower() not in BOOLEANS:
            raise ValueError(text)
        return BOOLEANS[text.lower()]
    if isinstance(default, int | float):
        return type(default)(text)
    if isinstance(default, list | tuple):
        return (
            json.loads(text)
            if text.startswith("[")
            else [typed(item, default[0] if default else None) for item in text.split(",")]
        )
    if isinstance(default, str):
        return text
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except json.JSONDecodeError:
        return text


def _kind(default: Any) -> str:
    if isinstance(default, bool):
        return "true or false"
    return {int: "a whole number", float: "a number", list: "a list like 1,2", tuple: "a list like 1,2"}.get(
        type(default), "JSON"
    )
