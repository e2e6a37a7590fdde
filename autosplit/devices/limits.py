"""The share of the machine that this process may use: cores by affinity, CPU time and memory by control group. No torch."""

import contextlib
import errno
import math
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from autosplit.errors import WorkerError

CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
NO_THREAD = "can't start new thread"
"""The message of Python's RuntimeError where the kernel refuses a thread."""
WAY_OUT = "raise that limit ('ulimit -u', '-n' or '-v', or the container's), or name fewer devices"
NO_LIMIT_BYTES = 1 << 60
"""Cgroup version 1 writes a larger number to say that memory is not limited."""


def boot_id() -> str:
    """The kernel's name for this run of the machine, the same in all its containers and namespaces; empty if it has none."""
    return " ".join(read_words(Path("/proc/sys/kernel/random/boot_id")))


def affinity() -> tuple[int, ...]:
    """The cores that this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0)))


def usable_cores() -> tuple[int, ...]:
    """The first cores of the affinity, up to the whole cores of the CPU quota, and at least one."""
    cores = affinity()
    quota = cpu_quota()
    return cores if quota is None else cores[: max(1, math.floor(quota))]


def cpu_quota(groups: Path = CGROUPS, own: Path = OWN_GROUPS) -> float | None:
    """Cores' worth of CPU time that the control group and its parents allow; None for no limit (cgroup version 1 and 2)."""
    limits = []
    for folder in _group_folders(groups, own, "cpu"):
        words = read_words(folder / "cpu.max") or [
            *read_words(folder / "cpu.cfs_quota_us"),
            *read_words(folder / "cpu.cfs_period_us"),
        ]
        if len(words) == 2 and all(word.isdigit() and int(word) for word in words):
            limits.append(int(words[0]) / int(words[1]))
    return min(limits, default=None)


def memory_limit_bytes(groups: Path = CGROUPS, own: Path = OWN_GROUPS) -> int:
    """Bytes of memory that this process may use: the machine's, or the control group's lower limit."""
    limits = [psutil.virtual_memory().total]
    for folder in _group_folders(groups, own, "memory"):
        words = [*read_words(folder / "memory.max"), *read_words(folder / "memory.limit_in_bytes")]
        limits += [int(word) for word in words if word.isdigit() and int(word) < NO_LIMIT_BYTES]
    return min(limits)


def available_bytes() -> int:
    """Bytes of memory that a new process may take: those that the machine has free, at most ``memory_limit_bytes``."""
    return min(psutil.virtual_memory().available, memory_limit_bytes())


def process_limit() -> int | None:
    """Processes and threads that the user or the control group may have, or None for no limit."""
    limits = [limit for limit in resource.getrlimit(resource.RLIMIT_NPROC)[:1] if limit != resource.RLIM_INFINITY]
    for folder in _group_folders(CGROUPS, OWN_GROUPS, "pids"):
        limits += [int(word) for word in read_words(folder / "pids.max") if word.isdigit()]
    return min(limits, default=None)


@contextlib.contextmanager
def refusals_named() -> Iterator[None]:
    """A block that starts threads or processes. Raises: WorkerError: the kernel refuses one, with the limit and the way out."""
    try:
        yield
    except (RuntimeError, BlockingIOError) as failure:
        if not isinstance(failure, BlockingIOError) and NO_THREAD not in str(failure):
            raise
        raise WorkerError(refusal("no thread or process could be started", str(failure))) from failure


def refusal(subject: str, reason: str) -> str:
    """A sentence about a thread or process that the kernel refused: the limit of this process, if it is known, and the way out.

    >>> refusal("no worker was forked", "no memory")
    "no worker was forked: no memory; raise that limit ('ulimit -u', '-n' or '-v', or the container's), or name fewer devices"
    """
    most = process_limit() if NO_THREAD in reason or os.strerror(errno.EAGAIN) in reason else None
    allowed = "" if most is None else f"{most} processes and threads are allowed here; "
    return f"{subject}: {reason}; {allowed}{WAY_OUT}"


def _group_folders(groups: Path, own: Path, controller: str) -> list[Path]:
    """The folders of this process's control group and its parents, version 2 (unified) and version 1 (by controller).

    Inside a container the group's path is often not mounted; its root then is the container's own group.
    """
    folders: list[Path] = []
    for line in own.read_text(encoding="utf-8").splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        roots = [groups / controllers, groups / controller] if controllers else [groups, groups / "unified"]
        parts = [part for part in path.split("/") if part]
        for root in roots:
            folders += [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def read_words(path: Path) -> list[str]:
    """The words of a small file, none where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []


def usable_threads(cores: Sequence[int] = ()) -> int:
    """Threads that can run at once on the cores given (or the affinity), within the control group's quota.

    >>> usable_threads((0,))
    1
    """
    count = len(cores) or len(affinity())
    quota = cpu_quota()
    return count if quota is None else max(1, min(count, int(quota)))
