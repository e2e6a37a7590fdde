"""Files that are either whole or absent: atomic writes, locks, content hashes, and reading with a clear error."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from autosplit.errors import AutosplitError, UsageError

MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What taking data apart ends with, where a file holds something else than was written."""

NOT_YAML = (yaml.YAMLError, *MALFORMED)
"""What PyYAML ends with: of a date, a number or a flag that is none, or of brackets in brackets, Python's own errors."""

MAPPING_TYPES = ("model_type", "model_attributes_type", "dict_type", "dataclass_type")
"""What pydantic calls it where something else stands in the place of a mapping: its message names a class of ours."""


def write_atomic(path: Path, text: str) -> None:
    """Write ``text`` to ``path``: a reader sees the old file or the new one, never a part.

    Raises: OSError, with ``path`` as its file: the disk is full, the folder cannot be written, or there is a folder of that
        name; the old file is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not path.is_file():  # /dev/null or a pipe takes the text, and stays what it is
            path.write_text(text, encoding="utf-8")
        else:
            _write_and_rename(path.resolve(), text)  # what a link leads to, not the link
    except OSError as failure:  # it names the temporary file, or none
        raise OSError(failure.errno, failure.strerror, str(path)) from failure


def _write_and_rename(path: Path, text: str) -> None:
    temporary = hidden_beside(path)
    try:
        with temporary.open("x", encoding="utf-8") as file:  # unlike mkstemp, the mode follows the user's umask
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def hidden_beside(path: Path) -> Path:
    """A hidden name beside ``path`` that no other process uses, for a file or folder to be renamed to ``path`` once it is whole.

    Made by ``open`` or ``mkdir`` its mode follows the user's umask; ``tempfile`` would make it private.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


def unwritable(path: Path) -> str:
    """Why no file or folder of this name could be written, '' where one could: it is tried with a file that is gone at once."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            return "" if os.access(path, os.W_OK) else os.strerror(errno.EACCES)
        real = path.resolve()
        folder = real if real.is_dir() else next(parent for parent in real.parents if parent.exists())
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as failure:
        return failure.strerror or str(failure)
    except RuntimeError:  # of a link that leads to itself
        return os.strerror(errno.ELOOP)


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold an exclusive lock that belongs to ``path`` (a hidden file beside it) across processes.

    Args:
        path: what is locked.
        waiting: called first where another one holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f".{path.name}.lock").open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def content_hash(data: Any) -> str:
    """SHA-256 of the canonical JSON of ``data``, the first 16 hex digits.

    >>> content_hash({"b": 1, "a": 2}) == content_hash({"a": 2, "b": 1})
    True
    """
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which PyYAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        names = [(key.tag, key.value) for key in keys]
        twice = [key for at, key in enumerate(keys) if names[at] in names[:at]]
        if twice:
            named = ", ".join(f"'{key.value}' (line {key.start_mark.line + 1})" for key in twice)
            raise yaml.YAMLError(f"given twice: {named}; keep one of each")
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """What a YAML file holds. Raises: OSError; one of NOT_YAML, also where a mapping has a key twice."""
    return yaml.load(path.read_text(encoding="utf-8"), _Loader)


def field_faults(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """What pydantic found in a file (``ValidationError.errors()``), each with its field and the value that stands there.

    >>> field_faults([{"loc": ("stages", 0, "threads"), "type": "int_type", "msg": "Input should be an integer", "input": "x"}])
    ["stages.0.threads: Input should be an integer, but is 'x'"]
    """
    return [f"{'.'.join(map(str, fault['loc'])) or 'the file'}: {_field_fault(fault)}" for fault in found]


def _field_fault(fault: Mapping[str, Any]) -> str:
    if fault["type"] == "missing":
        return str(fault["msg"])
    if fault["type"] == "extra_forbidden":
        return f"{fault['msg']}; there is no such field"
    if fault["type"] == "value_error":
        return str(fault["msg"]).removeprefix("Value error, ")
    message = "Input should be a mapping of names to values" if fault["type"] in MAPPING_TYPES else fault["msg"]
    return f"{message}, but is {fault['input']!r:.60}"


def read_mapping(path: Path, kind: str, schema: int, error: type[AutosplitError]) -> dict[str, Any]:
    """Read a JSON or YAML file (by its suffix) that holds one mapping with ``schema: N``.

    Args:
        path: the file.
        kind: what the file is, for the message ("plan", "profile").
        schema: the schema version that this autosplit reads.
        error: the class to raise.
    Raises: ``error``: the file is missing, truncated, no mapping, or of another schema version.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8")) if path.suffix == ".json" else read_yaml(path)
    except FileNotFoundError:
        raise error(f"{kind} file '{path}' does not exist") from None
    except OSError as failure:
        raise error(f"{kind} file '{path}' cannot be read: {failure.strerror}") from None
    except NOT_YAML as failure:
        reason = " ".join(str(failure).split())
        raise error(f"{kind} file '{path}' is truncated or not valid: {reason}. Make it again.") from None
    if data is None:
        raise error(f"{kind} file '{path}' is empty: it was cut off, or is another kind of file")
    if not isinstance(data, dict):
        raise error(f"{kind} file '{path}' holds {type(data).__name__}, not a mapping: it is truncated or another kind of file")
    if data.get("schema") != schema:
        hint = "Make it again with this version." if "schema" in data else "It is truncated or another kind of file."
        raise error(
            f"{kind} file '{path}' has schema version {data.get('schema')!r}, and this autosplit reads version {schema}. {hint}"
        )
    return data


def read_user_yaml(path: Path, kind: str) -> Any:
    """What a YAML file of the user's holds. Raises: UsageError: it cannot be read, or is no YAML; ``kind`` is for the message."""
    try:
        return read_yaml(path)
    except OSError as failure:
        raise UsageError(f"{kind} file '{path}' cannot be read: {failure.strerror}") from None
    except NOT_YAML as failure:
        raise UsageError(f"{kind} file '{path}' is not YAML: {' '.join(str(failure).split())}") from None


def typed(what: str, value: Any, *kinds: type) -> Any:
    """The value, for a field of a file. Raises: TypeError: it is of none of these types.

    >>> typed("date", 2026, str)
    Traceback (most recent call last):
        ...
    TypeError: date must be str, but is 2026
    """
    if not isinstance(value, kinds):
        raise TypeError(f"{what} must be {' or '.join(kind.__name__ for kind in kinds)}, but is {value!r:.60}")
    return value


def typed_items(what: str, value: Any, kind: type) -> dict[str, Any]:
    """The mapping, for a field of a file. Raises: TypeError: it is none, or one of its values is of another type."""
    return {key: typed(f"{what} '{key}'", item, kind) for key, item in typed(what, value, dict).items()}
