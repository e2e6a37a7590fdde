"""What running hosts say of themselves: a file each, written anew at every heart-beat and gone with the host. No torch.

The files lie in a folder that only this user may enter. A host keeps its file locked as long as it lives, and the kernel drops
the lock however it dies: a file without one is ignored and removed. Nobody listens on anything, and a look disturbs no host.
"""

import atexit
import collections
import contextlib
import fcntl
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autosplit.errors import UsageError
from autosplit.scratch import private_folder

BEAT_S = 1.0
"""Seconds between two heart-beats."""

_NEW = ".new-"
"""How the name of a file begins that is being written."""

_WRITING_S = 60.0
"""Nobody takes that long to write one."""

log = logging.getLogger(__name__)

Health = Mapping[str, Any]


class Beacon:
    """Tells other processes of this user how a host fares, from now on until ``close``.

    Args:
        health: what to tell, as plain data; it is called at every heart-beat, in a thread.
    """

    def __init__(self, health: Callable[[], Health]) -> None:
        self._health = health
        self._about = {"pid": os.getpid(), "command": " ".join(sys.argv)[:500], "started_unix_s": time.time()}
        self._parent = _parent()
        self._path: Path | None = None
        self._fd = -1
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="autosplit-beacon", daemon=True)
        with contextlib.suppress(OSError, UsageError):  # ``write`` says what is wrong with the folder
            collections.deque(_swept(), maxlen=0)
        self.write()
        self._thread.start()
        atexit.register(self.close)

    def write(self) -> None:
        """Tell it now. A disk that is full or a folder that is not ours is logged: the host has other things to do."""
        with self._lock:
            try:
                if not self._closing.is_set():
                    self._replace(json.dumps({**self._about, "beat_unix_s": time.time(), **self._health()}))
            except (OSError, UsageError) as failure:
                log.warning("the status of this host cannot be told: %s", failure)

    def close(self) -> None:
        """Say no more, and remove the file; one that was forked from the host leaves it alone."""
        atexit.unregister(self.close)
        if os.getpid() != self._about["pid"]:
            return
        self._closing.set()
        with self._lock:
            if self._fd >= 0 and self._path is not None:
                self._path.unlink(missing_ok=True)
                os.close(self._fd)
                self._fd = -1
                with contextlib.suppress(OSError):  # other hosts are there
                    self._path.parent.rmdir()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _beat(self) -> None:
        while not self._closing.wait(BEAT_S):
            self.write()

    def _replace(self, text: str) -> None:
        """Put a new file in place of the old one; it is locked before it has that name, and the old one is until it lost it."""
        try:
            fd, name = tempfile.mkstemp(dir=private_folder(self._parent, "hosts"), prefix=_NEW)
        except FileNotFoundError:  # a host that ended took the empty folder with it
            fd, name = tempfile.mkstemp(dir=private_folder(self._parent, "hosts"), prefix=_NEW)
        temporary = Path(name)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            with open(fd, "w", encoding="utf-8", closefd=False) as file:
                file.write(text)
            self._path = self._path or temporary.with_name(f"{os.getpid()}-{temporary.name.removeprefix(_NEW)}.json")
            temporary.replace(self._path)
        except BaseException:
            os.close(fd)
            temporary.unlink(missing_ok=True)
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd


def own_folder() -> Path:
    """The folder of the status files, made if it is not there.

    Raises: UsageError: somebody else made it, or others may enter it.
    """
    return private_folder(_parent(), "hosts")


def _parent() -> Path:
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())


def running_hosts() -> list[dict[str, Any]]:
    """What each running host of this user told at its last heart-beat, oldest host first, with its ``age_s``.

    Files of hosts that are no more are removed. Raises: UsageError: the folder is not to be trusted.
    """
    now, found = time.time(), list(_swept())
    return sorted(
        ({**host, "age_s": now - host["beat_unix_s"]} for host in found), key=lambda host: float(host["started_unix_s"])
    )


def _swept() -> Iterator[dict[str, Any]]:
    """Yield what each running host told, and remove the files of hosts that ended without doing so."""
    folder = own_folder()
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError), path.open(encoding="utf-8") as file:
            if _abandoned(file.fileno(), path):
                path.unlink()
            elif path.suffix == ".json":
                yield json.load(file)
    with contextlib.suppress(OSError):  # other hosts have files there
        folder.rmdir()


def _abandoned(fd: int, path: Path) -> bool:
    """Whether nobody holds the lock of this file, and it is still the one of that name: a host locks the next one first."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    found = os.fstat(fd)
    if path.name.startswith(_NEW) and time.time() - found.st_mtime < _WRITING_S:
        return False
    return found.st_ino == path.stat().st_ino
