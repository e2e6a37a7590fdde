"""Why a command failed, as one sentence: the exhausted resource, the limit of this process, and how to raise it."""

import errno
import resource
import tempfile
import traceback
from collections.abc import Iterator

from autosplit.devices.limits import process_limit
from autosplit.errors import AutosplitError, ModelError
from autosplit.tables import bytes_text

_MEMORY = ("failed to map segment", "cannot allocate memory", "can't allocate memory", "bad_alloc")
_PROCESSES = ("can't start new thread", "pthread_create", "resource temporarily unavailable")
"""Words with which Python, torch and the loader of shared libraries say that the kernel refused memory, a thread or a process."""


LEAST_ADDRESS_BYTES = 1_500_000_000
"""Bytes of address space below which libraries of torch end the process: 1.2 GB are too few, and 1.5 GB are enough."""


def require_address_space() -> None:
    """Raise MemoryError where a command could not even load torch. A library would end the process without a reason."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < LEAST_ADDRESS_BYTES:
        raise MemoryError(f"torch and the solvers take {bytes_text(LEAST_ADDRESS_BYTES)} of address space")


def is_expected(failure: BaseException) -> bool:
    """Whether ``reason`` can explain the failure, so that no traceback is needed."""
    return isinstance(failure, AutosplitError | OSError) or _shortage(failure) is not None


def reason(failure: BaseException) -> str:
    """The failure as one message, with the limit that it ran into and the way out."""
    if isinstance(failure, OSError) and failure.errno == errno.EFBIG:
        limit, named = resource.getrlimit(resource.RLIMIT_FSIZE)[0], f"'{failure.filename}': " if failure.filename else ""
        size = f"{bytes_text(limit)} here" if limit != resource.RLIM_INFINITY else "no more than the file system allows"
        return f"{named}{failure.strerror}: a file may have {size}; raise that limit ('ulimit -f unlimited')"
    if isinstance(failure, OSError) and failure.filename:
        return f"'{failure.filename}': {failure.strerror}"
    if isinstance(failure, OSError) and failure.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{failure.strerror}: make room where the output goes, or in '{tempfile.gettempdir()}', where stages are kept while "
            "they run (TMPDIR names another folder)"
        )
    if isinstance(failure, OSError) and failure.errno in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        return f"{failure.strerror}: this process may open {limit}; raise that limit ('ulimit -n'), or name fewer --devices"
    if isinstance(failure, ModelError) and (line := _last_line(failure.__cause__)):
        return f"{failure} ({line}; -v shows the whole traceback)"
    shortage = None if "raise that limit" in str(failure) else _shortage(failure)
    if shortage is None:
        return str(failure)
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()] or [type(failure).__name__]
    return f"{' '.join(dict.fromkeys((lines[0], lines[-1])))}; {shortage}"  # a worker's traceback lies between the two


def _last_line(cause: BaseException | None) -> str:
    """The line of code whose exception made a model fail, as 'file:line: code'; '' if the failure does not name it."""
    frames = traceback.extract_tb(cause.__traceback__) if cause is not None else []
    return f"at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames and frames[-1].line else ""


def _shortage(failure: BaseException) -> str | None:
    """Which limit the failure, or one that caused it, ran into, with the way out."""
    for one in _causes(failure):
        text = str(one).lower()
        if isinstance(one, MemoryError) or any(sign in text for sign in _MEMORY):
            limit = resource.getrlimit(resource.RLIMIT_AS)[0]
            if limit == resource.RLIM_INFINITY:
                return "memory ran out; close other programs, or take a smaller model"
            return f"this process may use {bytes_text(limit)} of address space; raise that limit ('ulimit -v unlimited')"
        if any(sign in text for sign in _PROCESSES):
            most = process_limit()
            said = "the kernel refuses another thread" if most is None else f"{most} processes and threads are allowed here"
            return f"{said}; raise that limit ('ulimit -u', or the container's), or name fewer --devices"
    return None


def _causes(failure: BaseException | None) -> Iterator[BaseException]:
    while failure is not None:
        yield failure
        failure = failure.__cause__ or failure.__context__
