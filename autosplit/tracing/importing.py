"""Import the function that a spec names: in a file (``models/mine.py:net``) or in a module (``models.mine:net``)."""

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from autosplit.children import extend_path
from autosplit.errors import ModelError, close_names


def import_function(place: str, attribute: str, subject: str) -> Any:
    """The function ``attribute`` of a file or a module. Raises: ModelError: there is none, or the import fails."""
    is_file = place.endswith(".py")
    if is_file and not Path(place).is_file():
        raise ModelError(f"{subject}: there is no file '{place}' here{_close_files(Path(place))}")
    try:
        module = _module_of(Path(place)) if is_file else _module_named(place)
    except ModuleNotFoundError as failure:
        raise ModelError(f"{subject} cannot be imported: {failure}{_shadowed(place)}") from None
    except (Exception, SystemExit) as failure:
        raise ModelError(f"{subject} cannot be imported: {type(failure).__name__}: {failure}") from failure
    function = getattr(module, attribute, None)
    if not callable(function):
        close = close_names(attribute, dir(module))
        what = "file" if is_file else "module"
        raise ModelError(f"{what} '{place}' has no function '{attribute}'{close}{_shadowed(place)}")
    return function


def same_function(one: str, other: str) -> bool:
    """Whether two specs name one function, seen from the current folder; the folder of a whole path may have been another then.

    >>> same_function("models/mine.py:net?depth=2", "models.mine:net?depth=2"), same_function("mine:net", "mine:head")
    (True, False)
    >>> there = Path("elsewhere").absolute()
    >>> same_function(f"{there}/models/mine.py:net", "models/mine.py:net"), same_function(f"{there}/mine.py:net", "x/mine.py:net")
    (True, False)
    """
    short, long = sorted((_dotted(one), _dotted(other)), key=len)
    return long == short or ("/" in (one[:1], other[:1]) and long.endswith(f".{short}"))


def _dotted(spec: str) -> str:
    place, colon, rest = spec.partition(":")
    if not place.endswith(".py"):
        return spec
    path = (Path.cwd() / place).resolve()
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return ".".join(path.with_suffix("").parts) + colon + rest


def _module_named(name: str) -> ModuleType:
    if not _origin(name.partition(".")[0]):
        extend_path(str(Path.cwd()))
    return importlib.import_module(name)


def _module_of(path: Path) -> ModuleType:
    """The module of a file, which may import its neighbours. A name that another module has gets a suffix."""
    path = path.resolve()
    folder, name = path.parent, path.stem
    while (folder / "__init__.py").is_file():
        folder, name = folder.parent, f"{folder.name}.{name}"
    extend_path(str(folder))
    if _origin(name) == str(path):
        return importlib.import_module(name)
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"'{path}' is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _origin(name: str) -> str:
    """The file of a module; '' if it is not on the path, or is a folder without ``__init__``, which may have several places."""
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # of the package that it is in
        return ""
    except ValueError:  # not a name, or the main program
        return name
    return (found and found.origin) or ""


def _shadowed(place: str) -> str:
    """Words for a package of the current folder that is not imported because another one of its name is; '' if there is none."""
    package = place.partition(".")[0]
    origin = _origin(package)
    here = [path for path in (Path(package), Path(f"{package}.py")) if path.exists()]
    if place.endswith(".py") or not origin or not here or Path(origin).is_relative_to(Path.cwd()):
        return ""
    return f"; '{origin}' comes before '{here[0]}' of this folder: rename the latter"


def _close_files(path: Path) -> str:
    """Words for files of the same folder with names close to that of ``path``; '' if there are none."""
    return close_names(path.name, [one.name for one in path.parent.glob("*.py")]) if path.parent.is_dir() else ""
