"""Parse YAML and JSON of unknown origin, within limits on bytes, nesting, values and digits.

All files that autosplit reads pass through here. YAML aliases and merge keys count as the values that they stand for, so a small
file cannot grow in memory.
"""

import errno
import json
import re
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer

from autosplit.errors import BRIEF
from autosplit.opening import open_file

MAX_YAML_BYTES = 20_000_000
MAX_JSON_BYTES = 100_000_000
MAX_DEPTH = 50
MAX_VALUES = 100_000
"""Largest number of values in a YAML file, aliases expanded."""
MAX_BRACKETS = 2_000_000
"""Largest number of lists and objects in a JSON file: an empty one takes 64 bytes of memory."""
MAX_DIGITS = 300
"""Longest integer in a JSON file: a float holds no larger one."""
MAX_INTEGER = 2**60
"""Largest integer in a YAML file. Larger ones may have equal hashes, which makes a mapping of them slow."""
MAX_SHOWN, MAX_REASON = 200, 300

MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions that code raises on data of another shape than it expects."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

_Base = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


def read_text(path: Path, most_bytes: int, root: Path | None = None) -> str:
    """The text of a file, opened by ``open_file``. Raises: OSError: as there, or it is too large. ValueError: it is not UTF-8."""
    with open_file(path, root=root) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it is above the limit of {most_bytes // 1_000_000} MB")
    return data.decode("utf-8")


def parse_yaml(text: str) -> Any:
    """The content of a YAML text. Raises: ValueError: it is malformed, above a limit, or a mapping has a key twice."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, *MALFORMED) as failure:  # a bad date, number or flag raises Python's own errors
        raise ValueError(_reason(failure)) from None


def parse_json(text: str) -> Any:
    """The content of a JSON text. Raises: ValueError: it is malformed or above a limit."""
    if text.count("[") + text.count("{") > MAX_BRACKETS:
        raise ValueError(f"it has more than {MAX_BRACKETS} lists and objects")
    try:
        data = json.loads(text, parse_int=_integer)
        if _SURROGATE.search(text):
            json.dumps(data, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("its lists and objects are nested too deeply") from None
    except ValueError as failure:
        raise ValueError(_reason(failure)) from None
    return data


def shown(value: Any) -> str:
    """A value of a file for a message, cut before it is written out.

    >>> shown("cpu:0"), shown([[0] * 1_000_000])
    ("'cpu:0'", '[[0, 0, 0, 0, ...]]')
    """
    return _cut(BRIEF.repr(value), MAX_SHOWN)


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer has {len(digits)} digits, and at most {MAX_DIGITS} are read")
    return int(digits)


def _reason(failure: Exception) -> str:
    if isinstance(failure, UnicodeEncodeError):
        return "a text holds half of a surrogate pair, which is not a character"
    return _cut(" ".join(str(failure).split()), MAX_REASON)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


class _Bounded(Composer):
    """Counts values while they are read; mappings may not have a key twice."""

    check_event: Callable[..., bool]
    sizes: dict[yaml.Node, int]
    depth = 0
    num_values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        before, self.num_values, self.depth = self.num_values, self.num_values + 1, self.depth + 1
        if self.depth > MAX_DEPTH:
            raise yaml.YAMLError(f"it is nested more than {MAX_DEPTH} levels deep")
        is_alias = self.check_event(yaml.AliasEvent)
        node: yaml.Node = super().compose_node(parent, index)  # type: ignore[assignment]
        if is_alias and node not in self.sizes:
            raise yaml.YAMLError("a value holds itself through an alias")
        self.num_values += self.sizes[node] if is_alias else 0
        if self.num_values > MAX_VALUES:
            raise yaml.YAMLError(f"it has more than {MAX_VALUES} values, aliases and merge keys expanded")
        self.sizes.setdefault(node, self.num_values - before)
        self.depth -= 1
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if len(node.value) > MAX_DIGITS and node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
            raise yaml.YAMLError(f"a number has {len(node.value)} characters, and at most {MAX_DIGITS} are read")
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[Hashable] = set()
        twice = []
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    twice.append(f"{shown(key.value)} (line {key.start_mark.line + 1})")
                seen.add((key.tag, key.value))
        if twice:
            more = f" and {len(twice) - 5} more" if len(twice) > 5 else ""
            raise yaml.YAMLError(f"given twice: {', '.join(twice[:5])}{more}; keep one of each")
        return node


class _Loader(_Bounded, _Base):  # type: ignore[misc, valid-type]
    def __init__(self, text: str) -> None:
        _Base.__init__(self, text)
        Composer.__init__(self)
        self.sizes = {}

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        number = super().construct_yaml_int(node)
        if abs(number) > MAX_INTEGER:
            raise yaml.YAMLError(f"integer {shown(node.value)} is above {MAX_INTEGER}")
        return int(number)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def json_safe(value: Any) -> Any:
    """The data with None in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return None if isinstance(value, float) and not float("-inf") < value < float("inf") else value
