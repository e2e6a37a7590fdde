"""Exports of earlier processes, by content: the ONNX exporter takes seconds, and makes the same file of the same stage.

They are kept in the folder ``onnx`` of ``$AUTOSPLIT_CACHE`` or ``~/.cache/autosplit``, each as the SHA-256 of a zip archive and
the archive, so that damage is noticed. Deleting them costs time only.
"""

import contextlib
import os
import zipfile
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from io import BytesIO
from pathlib import Path

from autosplit.errors import PlanError
from autosplit.files import cache_folder, content_hash, drafted, file_hash, write_atomic
from autosplit.opening import open_file
from autosplit.tracing.splitting import WEIGHTS, saved_key
from autosplit.versions import version_of

MOST_BYTES = 256 << 20
"""Most bytes of all exports. Those that were not used for the longest time make room."""

LARGEST_BYTES = 32 << 20
"""Most bytes of an export that is kept. A larger one holds constants that are not weights of the stage."""

SUFFIX = ".export"

MADE_BY = ("torch", "onnx", "onnxscript", "onnx-ir")
"""The packages whose versions count."""


def place(folder: Path) -> Path | None:
    """Where the export of the stage that is saved in ``folder`` is kept; None if there is no such stage, or no place for it."""
    with contextlib.suppress(OSError, RuntimeError, PlanError):  # no stage is saved there, or the user has no home
        named = content_hash([saved_key(folder), _weights_hash(folder / WEIGHTS), _makers()])
        return cache_folder() / "onnx" / f"{named}{SUFFIX}"
    return None


def take(kept: Path, folder: Path) -> bool:
    """Unpack an export into a folder, its files in the order in which they were kept; return whether it is whole."""
    try:
        with open_file(kept, root=kept.parents[1]) as file:
            data = file.read()
        digest, content = data[: sha256().digest_size], data[sha256().digest_size :]
        if sha256(content).digest() != digest:
            return False
        with zipfile.ZipFile(BytesIO(content)) as archive, drafted(folder / "export") as draft:
            archive.extractall(draft)
            for name in archive.namelist():
                (draft / name).replace(folder / name)
        os.utime(kept)
    except OSError:
        return False
    return True


def keep(kept: Path, files: Sequence[Path]) -> None:
    """Keep files, unless they are large or there is no room. Nothing else depends on it, so no failure is told."""
    if sum(file.stat().st_size for file in files) > LARGEST_BYTES:
        return
    content = BytesIO()
    with contextlib.suppress(OSError):
        with zipfile.ZipFile(content, "w") as archive:
            for file in files:
                archive.write(file, file.name)
        write_atomic(kept, sha256(content.getvalue()).digest() + content.getvalue(), root=kept.parents[1])
        _make_room(kept.parent)


def _make_room(folder: Path) -> None:
    """Delete the exports that were not used for the longest time, until all others have no more than ``MOST_BYTES``."""
    num_bytes = 0
    for path in sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: -path.stat().st_mtime):
        num_bytes += path.stat().st_size
        if num_bytes > MOST_BYTES:
            path.unlink(missing_ok=True)


_HASHES: dict[tuple[int, ...], str] = {}
"""Hashes of weights by their file's device, number, bytes and time of change."""


def _weights_hash(path: Path) -> str:
    """The hash of a file of weights, read once: all pieces and variants of a stage are links to one file."""
    status = path.stat()
    identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    if identity not in _HASHES:
        _HASHES[identity] = file_hash(path)
    return _HASHES[identity]


@cache
def _makers() -> list[str]:
    """The versions that exports depend on, and the sources of the modules here that make them."""
    here = Path(__file__).parent
    sources = [file_hash(here / f"{name}.py") for name in ("onnxfile", "decomposing", "translating", "ports")]
    return [*(version_of(name) for name in MADE_BY), *sources]
