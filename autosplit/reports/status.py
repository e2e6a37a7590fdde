"""Status of running hosts: one file for each, written at every heart-beat and removed with the host. No torch.

The file of a host lies in a scratch folder of its own, in a root that only this user may enter. So it goes with the host however
that dies (see ``scratch``). No socket is open, and reading disturbs no host.
"""

import atexit
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

from autosplit.errors import UsageError
from autosplit.parsing import MALFORMED, MAX_YAML_BYTES, parse_json
from autosplit.scratch import scratch_folder, sweep

BEAT_S = 1.0
"""Seconds between two heart-beats."""

ROOT, FILE = "hosts", "health.json"

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
        self._parent, self._opened = _parent(), ExitStack()
        self._folder: Path | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="autosplit-beacon", daemon=True)
        self.write()
        try:
            self._thread.start()
        except RuntimeError as failure:  # the kernel refuses another thread
            log.warning("the status of this host cannot be renewed: %s", failure)
        atexit.register(self.close)

    def write(self) -> None:
        """Write the file now. A full disk or a folder of another user is logged, because the host must go on."""
        with self._lock:
            if self._closing.is_set():
                return
            try:
                text = json.dumps({**self._about, "beat_unix_s": time.time(), **self._health()})
                if self._folder is None:
                    self._folder = self._opened.enter_context(scratch_folder(self._parent, ROOT))
                new = self._folder / "new"
                new.write_text(text, encoding="utf-8")
                new.replace(self._folder / FILE)
            except (OSError, UsageError) as failure:
                log.warning("the status of this host cannot be told: %s", failure)
                self._leave()

    def close(self) -> None:
        """Stop, and remove the file; a process that was forked from the host leaves it alone."""
        atexit.unregister(self.close)
        if os.getpid() != self._about["pid"]:
            return
        self._closing.set()
        with self._lock:
            self._leave()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _beat(self) -> None:
        while not self._closing.wait(BEAT_S):
            self.write()

    def _leave(self) -> None:
        """Remove the folder; the next heart-beat makes another one."""
        self._folder = None
        self._opened.close()


def _parent() -> Path:
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())


def running_hosts() -> list[dict[str, Any]]:
    """The last heart-beat of each running host of this user, oldest host first, with its ``age_s``.

    Files of hosts that ended are removed. Raises: UsageError: the folder is not to be trusted.
    """
    now, found = time.time(), []
    for path in sweep(_parent(), ROOT).glob(f"*/{FILE}"):
        with suppress(FileNotFoundError, *MALFORMED), path.open(encoding="utf-8") as file:  # of another program, or it ended
            host = parse_json(file.read(MAX_YAML_BYTES))
            found.append((float(host["started_unix_s"]), {**host, "age_s": now - host["beat_unix_s"]}))
    return [host for _, host in sorted(found, key=itemgetter(0))]
