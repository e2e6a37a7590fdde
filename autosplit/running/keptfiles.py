"""Files that a restart needs, kept open: those that a cleaner of temporary folders removes are written again."""

import contextlib
import logging
import os
import shutil
from pathlib import Path

from autosplit.files import hidden_beside

log = logging.getLogger(__name__)


class KeptFiles:
    """The files that lie in a folder now. An open file outlives its name, and takes no memory.

    Files for which no descriptor is left are not kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fds: dict[Path, int] = {}
        for path in folder.rglob("*"):
            with contextlib.suppress(OSError):
                if path.is_file():
                    self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def restore(self) -> None:
        """Write the files that are gone again. Raises: OSError: they cannot be written."""
        gone = [path for path in self._fds if not path.exists()]
        for path in gone:
            _make_private(path.parent)
            draft = hidden_beside(path)
            shutil.copyfile(f"/proc/self/fd/{self._fds[path]}", draft)
            draft.rename(path)
        if gone:
            log.warning("%d files in '%s' were removed by another program and are written again", len(gone), self.folder)

    def close(self) -> None:
        """Close the files."""
        while self._fds:
            os.close(self._fds.popitem()[1])


def _make_private(folder: Path) -> None:
    """Make a folder and the missing ones above it, for this user alone as all scratch folders are."""
    for missing in [folder, *folder.parents][::-1]:
        with contextlib.suppress(FileExistsError):
            missing.mkdir(mode=0o700)
