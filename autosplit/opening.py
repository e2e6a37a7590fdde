"""Open regular files of unknown origin: below a trusted root links are refused.

Trust ends at a *root*. The path to the root is the user's own choice and may lead through links. Below the root, a link is
refused, and so is a folder of another user. Without a root, the whole path is the user's own choice.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedIOBase
from pathlib import Path
from typing import Literal, cast

_DESCRIPTORS = ("/dev/stdin", "/dev/fd", "/proc/self/fd")
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFDIR: "a folder"}


def open_file(path: Path, mode: Literal["rb", "ab+"] = "rb", root: Path | None = None) -> BufferedIOBase:
    """Open a regular file.

    Args:
        path: the file. A descriptor that the user gave, such as ``/dev/stdin`` or a ``<(...)`` of a shell, is opened as it is.
        mode: as for ``open``; ``ab+`` makes missing folders too.
        root: the folder above ``path`` where the user's own choice ends; None if the whole path is the user's.
    Raises: OSError: the file is a pipe, a device or a folder, or ``opened_folder`` refuses its folder.
    """
    flags = os.O_CLOEXEC | (os.O_RDONLY if mode == "rb" else os.O_RDWR | os.O_CREAT | os.O_APPEND)
    if root is None and any(map(path.is_relative_to, _DESCRIPTORS)):
        return cast(BufferedIOBase, os.fdopen(os.open(path, flags), mode))
    if root is None:
        found = os.open(path, flags | os.O_NONBLOCK, 0o666)
    else:
        with opened_folder(path.parent, root, make=mode == "ab+") as folder:
            found = _open_below(folder, path, root, flags | os.O_NONBLOCK)
    kind = stat.S_IFMT(os.fstat(found).st_mode)
    if kind == stat.S_IFREG:
        return cast(BufferedIOBase, os.fdopen(found, mode))
    os.close(found)
    raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'no file')}, and a regular file is expected", str(path))


@contextmanager
def opened_folder(folder: Path, root: Path, *, make: bool = False) -> Iterator[int]:
    """A descriptor of a folder, for the ``dir_fd`` of functions in ``os``; with ``make``, missing folders are made first.

    Raises: OSError: the folder is missing; or a part of its path below ``root`` is a link, or belongs neither to this user, nor
        to the owner of ``root``, nor to the superuser.
    """
    if make:
        root.mkdir(parents=True, exist_ok=True)
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    found, path = os.open(root, flags), root
    try:
        owners = {0, os.geteuid(), os.fstat(found).st_uid}
        for part in folder.relative_to(root).parts:
            path = path / part
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=found)
            below = _open_below(found, path, root, flags)
            os.close(found)
            found = below
            if (owner := os.fstat(found).st_uid) not in owners:
                raise PermissionError(errno.EPERM, f"it is a folder of user {owner}, which is not trusted", str(path))
        yield found
    finally:
        os.close(found)


def _open_below(folder: int, path: Path, root: Path, flags: int) -> int:
    try:
        return os.open(path.name, flags | os.O_NOFOLLOW, 0o666, dir_fd=folder)
    except OSError as failure:
        reason = failure.strerror
        with suppress(FileNotFoundError):
            if stat.S_ISLNK(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode):
                reason = f"it is a link, and links below '{root}' are not followed"
        raise OSError(failure.errno, reason, str(path)) from None
