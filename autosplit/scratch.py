"""Scratch folders: private to one user, locked by the process that made them, and swept by the next process once it is gone.

All scratch folders of a user lie in one root with mode 0700. Each holds a marker file that names autosplit, and whose lock
its process holds: the kernel drops the lock however the process ends. A folder without a valid marker is never touched.
"""

import contextlib
import fcntl
import json
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import IO

from autosplit.children import python_running
from autosplit.errors import UsageError
from autosplit.opening import open_file
from autosplit.parsing import parse_json
from autosplit.versions import version_of

_MARKER = ".autosplit-scratch"
_MOST_MARKER_BYTES = 4096


def private_folder(parent: Path, name: str) -> Path:
    """Make ``parent/autosplit-UID-NAME``, which only this user may enter, or check an existing one.

    Raises: UsageError: it is a link or a file, belongs to another user, or others may enter it. OSError: it cannot be made.
    """
    uid = os.getuid()
    folder = parent / f"autosplit-{uid}-{name}"
    found = None
    while found is None:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):  # a process that ended took the empty folder with it
            found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or found.st_mode & 0o077:
        raise UsageError(
            f"'{folder}' is not a folder of user {uid} with mode 0700, so autosplit does not trust it; remove it or set TMPDIR"
        )
    return folder


@contextlib.contextmanager
def scratch_folder(parent: Path | None = None, root: str = "scratch") -> Iterator[Path]:
    """Yield a new private folder and remove it at the end; folders that killed processes left are removed first.

    Args:
        parent: where the root of such folders is; by default where temporary files are.
        root: its name, for ``private_folder``.
    Raises: UsageError: as ``private_folder``. OSError: the folder cannot be made.
    """
    parent, owner = parent or Path(tempfile.gettempdir()), os.getpid()
    sweep(parent, root)
    folder = _new_folder(parent, root)
    try:
        with _mark(folder):
            yield folder
    finally:
        if os.getpid() == owner:  # a process that the user forked leaves the block too
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # another process has a folder there
                folder.parent.rmdir()


def sweep(parent: Path | None = None, root: str = "scratch") -> Path:
    """Remove the folders that killed processes of this user left; arguments and errors as for ``scratch_folder``.

    Returns: the root, which is gone if no folder in it is in use.
    """
    place = private_folder(parent or Path(tempfile.gettempdir()), root)
    _sweep(place)
    with contextlib.suppress(OSError):  # a folder is in use
        place.rmdir()
    return place


def sweep_at_death() -> IO[bytes]:
    """Start a small process that calls ``sweep`` once this process has ended in any way, or has closed the returned object.

    It is for a process that others kill, on a machine where the next process of autosplit may not start for long. It is no
    child of this process, because Ray kills the children of its workers.
    """
    code = "import os, sys; os.fork() and os._exit(0); sys.stdin.read(); from autosplit.scratch import sweep; sweep()"
    nowhere = subprocess.DEVNULL
    parent = subprocess.Popen(python_running(code), stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True)
    parent.wait()
    assert parent.stdin is not None
    return parent.stdin


def _new_folder(parent: Path, root: str) -> Path:
    while True:
        with contextlib.suppress(FileNotFoundError):  # a process that ended took the empty root with it
            return Path(tempfile.mkdtemp(dir=private_folder(parent, root)))


@contextlib.contextmanager
def _mark(folder: Path) -> Iterator[None]:
    """Write the marker of a folder and hold its lock; under its final name the marker is locked from the first moment on."""
    new = folder / f"{_MARKER}.new"
    about = {"made_by": "autosplit", "version": version_of("autosplit"), "uid": os.getuid(), "pid": os.getpid()}
    with new.open("w", encoding="utf-8") as marker:
        fcntl.flock(marker, fcntl.LOCK_EX)
        json.dump(about, marker)
        marker.flush()
        new.rename(folder / _MARKER)
        yield


def _sweep(root: Path) -> None:
    """Remove every folder in ``root`` whose marker is ours and whose process is gone. Follows no link and never blocks."""
    with contextlib.suppress(FileNotFoundError):  # a process that ended took the empty root with it
        for folder in root.iterdir():
            with contextlib.suppress(OSError, ValueError), open_file(folder / _MARKER, root=root) as marker:
                if _is_ours(marker):
                    fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)


def _is_ours(marker: BufferedIOBase) -> bool:
    """Whether an open file is a marker that autosplit wrote for this user. Raises: OSError, ValueError: it cannot be read."""
    found = os.fstat(marker.fileno())
    if found.st_uid != os.getuid() or found.st_size > _MOST_MARKER_BYTES:
        return False
    about = parse_json(marker.read(_MOST_MARKER_BYTES).decode())
    return isinstance(about, dict) and about.get("made_by") == "autosplit" and about.get("uid") == os.getuid()
