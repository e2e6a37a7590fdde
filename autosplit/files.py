"""Write files atomically, lock and hash them, and read them with errors that name every fault."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from autosplit.errors import AutosplitError, raise_faults
from autosplit.opening import open_file, opened_folder
from autosplit.parsing import MAX_JSON_BYTES, MAX_YAML_BYTES, parse_json, parse_yaml, read_text, shown

if TYPE_CHECKING:
    from pydantic import BaseModel, TypeAdapter

_MAPPING_TYPES = ("model_type", "model_attributes_type", "dict_type", "dataclass_type")
"""Pydantic's names of the fault that a value is not a mapping. Its messages name a class of ours, so they are replaced."""


M = TypeVar("M", bound="BaseModel")
T = TypeVar("T")


def write_atomic(path: Path, content: str | bytes, root: Path | None = None) -> None:
    """Write a file; a reader sees the old file or the new one, never a part.

    Args:
        path: the file.
        content: its text, or its bytes.
        root: as for ``open_file``. A link at ``path`` is replaced. Without a root it stays, and its target is replaced; a pipe or
            a device takes the content and stays.
    Raises: OSError: the disk is full, the folder cannot be written or is refused by ``opened_folder``, or ``path`` is a folder.
        The error names ``path`` or a folder above it, and the old file stays.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        if path.is_dir() and (root is None or not path.is_symlink()):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if root is None and path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        target = path.resolve() if root is None else path
        with opened_folder(target.parent, root or target.parent, make=True) as folder:
            _write_and_rename(target.name, data, folder)
    except RuntimeError:  # ``resolve``: a link leads to itself
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None
    except OSError as failure:  # the error names the temporary file, or no file
        named = failure.filename if failure.filename in map(str, path.parents) else str(path)
        raise OSError(failure.errno, failure.strerror, named) from failure


def _write_and_rename(name: str, data: bytes, folder: int) -> None:
    temporary = hidden_beside(Path(name)).name
    try:
        # unlike mkstemp, the mode follows the user's umask
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        raise


def hidden_beside(path: Path) -> Path:
    """A hidden name beside ``path`` that no other process uses. Build there, then rename to ``path``.

    ``open`` and ``mkdir`` follow the user's umask, which ``tempfile`` does not.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


@contextlib.contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """An empty hidden folder beside ``path`` to build in. The block renames it, or moves its files; what stays is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = hidden_beside(path)
    draft.mkdir()
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def unwritable(path: Path) -> str:
    """The reason why ``path`` cannot be written, '' if it can be. A temporary file beside it is the test."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            return "" if os.access(path, os.W_OK) else os.strerror(errno.EACCES)
        real = path.resolve()
        folder = real if real.is_dir() else next(parent for parent in real.parents if parent.exists())
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as failure:
        return failure.strerror or str(failure)
    except RuntimeError:  # a link leads to itself
        return os.strerror(errno.ELOOP)


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None, root: Path | None = None) -> Iterator[None]:
    """Hold an exclusive lock that belongs to ``path`` (a hidden file beside it, which stays as it is) across processes.

    Args:
        path: the file or folder to lock.
        waiting: called before the wait if another process holds the lock.
        root: as for ``open_file``; by default the folder of ``path``.
    Raises: OSError: as ``open_file``.
    """
    with open_file(path.with_name(f".{path.name}.lock"), "ab+", root or path.parent) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def cache_folder() -> Path:
    """The folder of files that save time only: ``$AUTOSPLIT_CACHE``, or ``autosplit`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    Raises: RuntimeError: the user has no home.
    """
    if own := os.environ.get("AUTOSPLIT_CACHE"):
        return Path(own)
    shared = Path(os.environ.get("XDG_CACHE_HOME") or "")  # XDG asks to ignore a path that is not absolute
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "autosplit"


def content_hash(data: Any) -> str:
    """SHA-256 of the canonical JSON of ``data``, the first 16 hex digits.

    >>> content_hash({"b": 1, "a": 2}) == content_hash({"a": 2, "b": 1})
    True
    """
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_hash(path: Path) -> str:
    """SHA-256 of the bytes of a file."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_data(
    path: Path,
    kind: str,
    error: type[AutosplitError],
    parse: Callable[[str], Any] | None = None,
    most_bytes: int | None = None,
    root: Path | None = None,
) -> Any:
    """The content of a JSON or YAML file.

    Args:
        path: the file.
        kind: the kind of file for the message ("plan", "profile").
        error: the class to raise.
        parse: ``parse_json`` or ``parse_yaml``; by default the suffix says which.
        most_bytes: the largest size; by default 20 MB of YAML or 100 MB of JSON.
        root: as for ``open_file``.
    Raises: ``error``: the file is missing, malformed, refused by ``open_file``, or above a limit of ``parsing``.
    """
    parse = parse or (parse_json if path.suffix == ".json" else parse_yaml)
    try:
        return parse(read_text(path, most_bytes or (MAX_JSON_BYTES if parse is parse_json else MAX_YAML_BYTES), root))
    except FileNotFoundError:
        raise error(f"{kind} file '{path}' does not exist") from None
    except OSError as failure:
        raise error(f"{kind} file '{path}' cannot be read: {failure.strerror}") from None
    except ValueError as failure:
        name = "JSON" if parse is parse_json else "YAML"
        raise error(f"{kind} file '{path}' is truncated or not valid {name}: {failure}") from None


def read_mapping(path: Path, kind: str, schema: int, error: type[AutosplitError], root: Path | None = None) -> dict[str, Any]:
    """The mapping in a JSON or YAML file that says ``schema: N``; the arguments are those of ``read_data``.

    Raises: ``error``: as ``read_data``, or the file holds no mapping or another schema version.
    """
    data = read_data(path, kind, error, root=root)
    if data is None:
        raise error(f"{kind} file '{path}' is empty: it was cut off, or is another kind of file")
    if not isinstance(data, dict):
        raise error(f"{kind} file '{path}' holds {type(data).__name__}, not a mapping: it is truncated or another kind of file")
    found = data.get("schema")
    if isinstance(found, bool) or found != schema:
        hint = "Make it again with this version." if "schema" in data else "It is truncated or another kind of file."
        raise error(f"{kind} file '{path}' has schema version {shown(found)}, and this autosplit reads version {schema}. {hint}")
    return data


def validated(model: type[M], data: Any, error: type[AutosplitError], subject: str) -> M:
    """The data of a file as a pydantic model. Raises: ``error``: with every fault, each with its field and value."""
    from pydantic import ValidationError

    try:
        return model.model_validate(data)
    except ValidationError as failure:
        raise_faults(error, subject, field_faults(failure.errors(include_url=False)))
        raise


def field_faults(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The faults that pydantic found in a file (``ValidationError.errors()``), each with its field and the value there.

    >>> field_faults([{"loc": ("stages", 0, "threads"), "type": "int_type", "msg": "Input should be an integer", "input": "x"}])
    ["stages.0.threads: Input should be an integer, but is 'x'"]
    """
    places = [".".join(f"{part:.60}" for part in map(str, fault["loc"])) or "the file" for fault in found]
    return [f"{place}: {_field_fault(fault)}" for place, fault in zip(places, found, strict=True)]


def _field_fault(fault: Mapping[str, Any]) -> str:
    if fault["type"] == "missing":
        return str(fault["msg"])
    if fault["type"] == "extra_forbidden":
        return f"{fault['msg']}; there is no such field"
    if fault["type"] == "value_error":
        return str(fault["msg"]).removeprefix("Value error, ")
    message = "Input should be a mapping of names to values" if fault["type"] in _MAPPING_TYPES else fault["msg"]
    return f"{message}, but is {shown(fault['input'])}"


@cache
def _adapter(kind: Any) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter  # workers read no such file, and the import takes 0.1 s

    return TypeAdapter(kind)


def from_plain(kind: type[T], data: Any) -> T:
    """Plain data of a file as a dataclass, or as a list or mapping of them. Raises: ValueError: with the first faults.

    >>> from_plain(list[int], ["x"])
    Traceback (most recent call last):
        ...
    ValueError: 0: Input should be a valid integer, unable to parse string as an integer, but is 'x'
    """
    from pydantic import ValidationError

    try:
        found: T = _adapter(cast(Hashable, kind)).validate_python(data)
    except ValidationError as failure:
        raise ValueError("; ".join(field_faults(failure.errors(include_url=False)[:3]))) from None
    return found
