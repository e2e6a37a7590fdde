"""Status of running hosts: one file for each, written at every heart-beat and removed with the host. No torch.

The files lie in a folder that only this user may enter. A host keeps its file locked as long as it lives, and the kernel drops
the lock however it dies. A file without a lock is ignored and removed. No socket is open, and reading disturbs no host.
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
from operator import itemgetter
from pathlib import Path
from typing import Any

from autosplit.errors import UsageError
from autosplit.parsing import MALFORMED, MAX_YAML_BYTES, parse_json
from autosplit.scratch import private_folder

BEAT_S = 1.0
"""Seconds between two heart-beats."""

_NEW = ".new-"
"""Prefix of a file that is being written."""

_WRITING_S = 60.0
"""Seconds after which a file that is being written counts as abandoned."""

log = logging.getLogger(__name__)

Health = Mapping[str, Any]


class Beacon:
    """Keeps the health of a host in a file for other processes of this user, until ``close``.

    Args:
        health: gives plain data; it is called at every heart-beat, in a thread.
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
        with contextlib.suppress(OSError, UsageError):  # ``write`` reports a fault of the folder
            collections.deque(_swept(), maxlen=0)
        self.write()
        try:
            self._thread.start()
        except RuntimeError as failure:  # the kernel refuses another thread
            log.warning("the status of this host cannot be renewed: %s", failure)
        atexit.register(self.close)

    def write(self) -> None:
        """Write the file now. A full disk or a folder of another user is logged, because the host must go on."""
        with self._lock:
            try:
                if not self._closing.is_set():
                    self._replace(json.dumps({**self._about, "beat_unix_s": time.time(), **self._health()}))
            except (OSError, UsageError) as failure:
                log.warning("the status of this host cannot be told: %s", failure)

    def close(self) -> None:
        """Stop, and remove the file; a process that was forked from the host leaves it alone."""
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
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _beat(self) -> None:
        while not self._closing.wait(BEAT_S):
            self.write()

    def _replace(self, text: str) -> None:
        """Put a new file in place of the old one. The new file is locked before it gets the name, the old one while it has it."""
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

    Raises: UsageError: another user made it, or others may enter it.
    """
    return private_folder(_parent(), "hosts")


def _parent() -> Path:
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())


def running_hosts() -> list[dict[str, Any]]:
    """The last heart-beat of each running host of this user, oldest host first, with its ``age_s``.

    Files of hosts that ended are removed. Raises: UsageError: the folder is not to be trusted.
    """
    now, found = time.time(), []
    for host in _swept():
        with contextlib.suppress(*MALFORMED):  # of another program, or half of it
            found.append((float(host["started_unix_s"]), {**host, "age_s": now - host["beat_unix_s"]}))
    return [host for _, host in sorted(found, key=itemgetter(0))]


def _swept() -> Iterator[dict[str, Any]]:
    """Yield the content of each running host's file, and remove the files of hosts that ended without removing them."""
    folder = own_folder()
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError, ValueError), path.open(encoding="utf-8") as file:
            if _abandoned(file.fileno(), path):
                path.unlink()
            elif path.suffix == ".json":
                yield parse_json(file.read(MAX_YAML_BYTES))
    with contextlib.suppress(OSError):  # other hosts have files there
        folder.rmdir()


def _abandoned(fd: int, path: Path) -> bool:
    """Whether no process holds the lock of this file, and it still has its name: a host locks its next file first."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    found = os.fstat(fd)
    if path.name.startswith(_NEW) and time.time() - found.st_mtime < _WRITING_S:
        return False
    return found.st_ino == path.stat().st_ino
