"""Fork server, the process: it imports torch and all other modules that workers need, which takes over a second, and forks them.

It has one thread and computes nothing, so its children may do everything that a fresh process may. It never imports code of the
user. The kernel kills it when the host dies, and its children with it.
"""

import contextlib
import ctypes
import errno
import fcntl
import importlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from autosplit import preloading

MOST_DESCRIPTORS = 200
"""The kernel takes 253 in one message."""

_PR_SET_PDEATHSIG = 1
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD, _M_TOP_PAD = -3, -1, -2

_is_worker = False
"""Whether this process was forked here, so that its malloc keeps freed memory."""


@dataclass(frozen=True, slots=True)
class Fork:
    """Fork a worker. Its descriptors follow this message. Answer: its process id, or why the kernel refused.

    Attributes:
        target: ``module:function``, called with the control connection.
        control: number of the descriptor of that connection.
        numbers: the numbers of the descriptors in the worker, ``control`` among them.
        cores: the cores that it is pinned to; empty for no change.
        threads: size of its torch pool.
        environment: its variables.
        path: its ``sys.path``.
        folder: its working directory.
    """

    target: str
    control: int
    numbers: tuple[int, ...]
    cores: tuple[int, ...]
    threads: int
    environment: Mapping[str, str]
    path: tuple[str, ...]
    folder: str


@dataclass(frozen=True, slots=True)
class Reap:
    """A worker has ended, or is about to. Answer: its exit code, that of the signal below zero."""

    pid: int


@dataclass(frozen=True, slots=True)
class Import:
    """Import modules, so that workers from now on share them. Answer: ''."""

    modules: tuple[str, ...]


def send_descriptors(sock: socket.socket, descriptors: Sequence[int]) -> None:
    """Send descriptors after a Fork."""
    for start in range(0, len(descriptors), MOST_DESCRIPTORS):
        socket.send_fds(sock, [b"+"], descriptors[start : start + MOST_DESCRIPTORS])


def main() -> None:
    """Import, send the host '' or the failed import, then serve.

    Arguments: descriptor of the socket, process id of the host, modules that all workers need, others to import if they can be;
    spaces between.
    """
    number, host = map(int, sys.argv[1:3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _tie_to(host)
    sock = socket.socket(fileno=number)
    connection = Connection(os.dup(sock.fileno()))
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            preloading.load(*sys.argv[3].split())
        except Exception as failure:
            connection.send(f"{type(failure).__name__}: {failure}")
            os._exit(1)
        _try_to_import(sys.argv[4].split())
        preloading.trim()  # a worker that gave these 1.4 MB back while it loads would count as smaller
        connection.send("")
        _serve(sock, connection)
    os._exit(0)


def _try_to_import(modules: Sequence[str]) -> None:
    """Import modules that not all workers need. A worker that needs one that fails says why."""
    for module in modules:
        with contextlib.suppress(Exception):
            preloading.load(module)


def _serve(sock: socket.socket, connection: Connection) -> None:
    while True:
        match connection.recv():
            case Fork() as order:
                connection.send(_fork(order, sock, connection))
            case Import(modules):
                _try_to_import(modules)
                connection.send("")
            case Reap(pid):
                try:
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                except ChildProcessError:
                    code = -signal.SIGKILL  # a child of the process before this one, with which the kernel killed it
                connection.send(code)


def _fork(order: Fork, sock: socket.socket, connection: Connection) -> int | str:
    """Receive the descriptors of a worker and fork it; return its process id, or why the kernel refused."""
    descriptors: list[int] = []
    for _ in range(0, len(order.numbers), MOST_DESCRIPTORS):
        data, received, *_ = socket.recv_fds(sock, 1, MOST_DESCRIPTORS)
        if not data:
            raise EOFError
        descriptors += received
    parent = os.getpid()
    try:
        if len(descriptors) < len(order.numbers):  # the kernel leaves out those above the limit of this process
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        pid = os.fork()
    except OSError as failure:
        answer: int | str = str(failure)
    else:
        if pid == 0:
            connection.close()
            sock.close()
            _become(order, descriptors, parent)
        answer = pid
    for descriptor in descriptors:
        os.close(descriptor)
    return answer


def _become(order: Fork, descriptors: Sequence[int], parent: int) -> NoReturn:
    """Be the worker, and end with it."""
    code = 1
    try:
        _tie_to(parent)
        # A process group of its own: Ctrl-C in the terminal reaches the host alone, which then ends its workers.
        os.setpgid(0, 0)
        _place(descriptors, order.numbers)
        os.environ.clear()
        os.environ.update(order.environment)
        sys.path[:] = order.path
        os.chdir(order.folder)
        _run(order)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # The workers of a pipeline end together: skip the teardown of torch, which takes longer than all the rest.
        os._exit(code)


def _place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors the numbers that they have in the host."""
    above = max((*descriptors, *numbers)) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for high, number in zip(moved, numbers, strict=True):
        os.dup2(high, number)
        os.close(high)


def _run(order: Fork) -> None:
    if order.cores:
        os.sched_setaffinity(0, order.cores)
    global _is_worker
    _is_worker = True
    keep_freed_memory(True)
    if torch := sys.modules.get("torch"):  # its OpenMP has read its environment when it was imported
        torch.set_num_threads(order.threads)
    module, function = order.target.split(":")
    call = getattr(importlib.import_module(module), function)
    with contextlib.suppress(EOFError, ConnectionError):
        call(Connection(order.control))


def keep_freed_memory(keep: bool) -> None:
    """Whether malloc keeps large freed blocks for the next request, as passes need it, or returns them, as loading should.

    A pass whose blocks were returned faults its activations in again. A load whose blocks are kept holds on to all that it
    needed for a moment, and how much that is depends on where the blocks lie.
    """
    libc: Any = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30 if keep else 1 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1 if keep else 1 << 20)
        libc.mallopt(_M_TOP_PAD, 64 << 20 if keep else 0)


@contextlib.contextmanager
def freed_memory_returned() -> Iterator[None]:
    """Return freed memory while a worker loads a stage. Another process keeps the settings of malloc that it has."""
    if not _is_worker:
        yield
        return
    keep_freed_memory(False)
    try:
        yield
    finally:
        keep_freed_memory(True)


def _tie_to(parent: int) -> None:
    """End with the thread of ``parent`` that started this process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
