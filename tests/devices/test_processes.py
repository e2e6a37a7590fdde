"""Workers are pinned, carry their threads and descriptors, and are gone whenever the host is."""

import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from autosplit.devices import forking, forkserver
from autosplit.devices.forking import Fork, _serve, send_descriptors
from autosplit.devices.limits import affinity
from autosplit.devices.processes import (
    anonymous_bytes,
    memory_held,
    receive,
    reset_peak,
    resident_bytes,
    spawn_worker,
)
from autosplit.errors import UsageError, WorkerError

pytestmark = pytest.mark.timeout(60)

TARGETS = """
import os, sys, time

def facts(connection):
    import torch
    with os.fdopen(connection.recv(), "w") as file:
        file.write("hello")
    connection.send((os.getpid(), sorted(os.sched_getaffinity(0)), torch.get_num_threads()))
    connection.recv()

def sleeper(connection):
    connection.send(os.getpid())
    time.sleep(600)

def listener(connection):
    connection.recv()

def talker(connection):
    connection.recv()
    connection.send("unread")
    connection.recv()

def place(connection):
    import sys, torch
    connection.send((os.getcwd(), os.environ["AUTOSPLIT_TEST_WORD"], sys.path, torch.get_num_threads()))

def passes(connection):
    import torch
    from autosplit.devices.processes import resident_bytes
    torch.ones(8)
    before = resident_bytes()
    for _ in range(20):
        blocks = [torch.ones(1 << 20) for _ in range(3)]
        del blocks
        larger = torch.ones(2 << 20)
        del larger
    connection.send((resident_bytes() - before, os.environ.get("GLIBC_TUNABLES")))

def loaded(connection):
    connection.send(("colorsys" in sys.modules, len(os.listdir("/proc/self/task"))))
def breaker(connection):
    raise RuntimeError("broken on purpose")
"""


@pytest.fixture
def with_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The module of the targets, for workers that are forked from a process with torch, as users have it."""
    (tmp_path / "worker_targets.py").write_text(TARGETS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "worker_targets"


@pytest.fixture
def targets(with_torch: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The module of the targets, for workers of fork servers that this test alone has and that start in no time."""
    monkeypatch.setattr(forkserver, "_server", None)
    monkeypatch.setattr(forkserver, "_retired", [])
    monkeypatch.setattr(forkserver, "PRELOADED", ())
    monkeypatch.setattr(forkserver, "_wanted", [])
    yield with_torch
    forkserver.close()


def gone(pid: int, within_s: float = 10.0) -> bool:
    """Whether the process ends in time; a zombie counts as gone."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


def test_a_worker_whose_host_leaves_messages_unread_ends_in_silence(targets: str, capfd: pytest.CaptureFixture[str]) -> None:
    worker = spawn_worker(f"{targets}:talker", name="talker")
    worker.connection.send("go on")
    worker.connection.poll(30)
    worker.close(30)
    assert worker.fate() == "exited with code 0" and capfd.readouterr().err == ""


def test_a_worker_has_its_cores_threads_and_descriptors(with_torch: str) -> None:
    core = affinity()[-1]
    reader, writer = os.pipe()
    worker = spawn_worker(f"{with_torch}:facts", name="facts", cores=[core], fds=[writer])
    try:
        worker.connection.send(writer)
        os.close(writer)
        assert os.read(reader, 100) == b"hello"
        assert receive(worker, 30, "during its facts") == (worker.pid, [core], 1)
    finally:
        os.close(reader)
        worker.close()
    assert worker.fate() == "exited with code 0"


def test_nothing_is_left_of_a_closed_worker(targets: str) -> None:
    spawn_worker(f"{targets}:listener").close()
    before = set(Path("/proc/self/fd").iterdir())
    worker = spawn_worker(f"{targets}:listener")
    worker.close()
    assert set(Path("/proc/self/fd").iterdir()) == before
    assert not worker.alive() and gone(worker.pid)


def test_a_worker_that_does_not_listen_is_killed(targets: str) -> None:
    worker = spawn_worker(f"{targets}:sleeper")
    receive(worker, 30, "during its start")
    worker.close(timeout_s=0.1)
    assert worker.fate() == "was killed by SIGKILL"


def test_an_answer_may_be_waited_for_for_months(targets: str) -> None:
    worker = spawn_worker(f"{targets}:sleeper")
    assert receive(worker, 1e9, "during its start") == worker.pid
    worker.close(timeout_s=0.0)


def test_an_exception_ends_the_worker_with_an_exit_code(targets: str, capfd: pytest.CaptureFixture[str]) -> None:
    worker = spawn_worker(f"{targets}:breaker")
    assert worker.wait(30)
    assert worker.fate() == "exited with code 1"
    assert "broken on purpose" in capfd.readouterr().err
    worker.close()


def test_workers_share_modules_that_were_asked_for_also_after_a_new_start(targets: str) -> None:
    found = [receive(spawn_worker(f"{targets}:loaded"), 30, "while it looked")]
    forkserver.preload("there_is_no_such_module", "colorsys")
    found.append(receive(spawn_worker(f"{targets}:loaded"), 30, "while it looked"))
    forkserver.close()
    assert [*found, receive(spawn_worker(f"{targets}:loaded"), 30, "while it looked")] == [(False, 1), (True, 1), (True, 1)]


def test_a_core_that_is_not_ours_is_refused() -> None:
    with pytest.raises(UsageError, match=r"worker 'w' asks for core 4095; this process may use \d"):
        spawn_worker("os:getpid", name="w", cores=[4095])


LOST = """
import sys
sys.path.insert(0, {folder!r})
from autosplit.devices import forkserver
from autosplit.devices.processes import spawn_worker, receive
forkserver.PRELOADED = ()
try:
    spawn_worker("worker_targets:sleeper", fds=[9999])
except OSError:
    print("refused")
worker = spawn_worker("worker_targets:sleeper")
print(receive(worker, 30, "during its start") == worker.pid)
"""


def test_a_descriptor_that_is_not_open_is_refused_and_the_next_worker_starts(tmp_path: Path) -> None:
    (tmp_path / "worker_targets.py").write_text(TARGETS)
    program = LOST.format(folder=str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=40)
    assert ended.stdout.split() == ["refused", "True"] and ended.returncode == 0


LATE = """
import os, signal, threading
from autosplit.devices import forkserver
from autosplit.devices.processes import spawn_worker
from autosplit.errors import RefusedError
forkserver.PRELOADED = ()
stop = threading.Event()

def hold_up():
    while forkserver._server is None:
        pass
    os.kill(forkserver._server.pid, signal.SIGSTOP)
    stop.set()

threading.Thread(target=hold_up).start()
try:
    spawn_worker("os:getpid", stop=stop)
except RefusedError as refusal:
    print(refusal)
"""


def test_a_fork_server_that_takes_long_to_start_holds_up_neither_who_stops_waiting_nor_the_end() -> None:
    """After Ctrl-C while torch was imported there, the end of the process waited for that: 9 s on a busy machine."""
    ended = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=30)
    assert ended.stdout == "the pipeline was closed while a worker was started\n" and ended.returncode == 0


@pytest.mark.timeout(10)
def test_an_order_of_which_the_descriptors_never_come_is_the_end() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with Connection(ours.detach()) as host:
            host.send(Fork("os:getpid", 0, (0,), (), 1, {}, (), "/"))
        with pytest.raises(EOFError), Connection(os.dup(theirs.fileno())) as connection:
            _serve(theirs, connection)


def test_workers_end_with_the_process_that_they_are_forked_from_and_the_next_gets_a_new_one(targets: str) -> None:
    worker = spawn_worker(f"{targets}:sleeper")
    receive(worker, 30, "during its start")
    parent = int(Path(f"/proc/{worker.pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    assert parent != os.getpid()
    os.kill(parent, signal.SIGKILL)
    assert worker.wait(30) and worker.fate() == "was killed by SIGKILL"
    worker.close()
    another = spawn_worker(f"{targets}:sleeper")
    assert receive(another, 30, "during its start") == another.pid
    another.close(timeout_s=0.0)


def test_a_worker_of_the_process_before_is_buried_without_harm_to_those_of_the_next(targets: str) -> None:
    old = spawn_worker(f"{targets}:sleeper")
    receive(old, 30, "during its start")
    os.kill(int(Path(f"/proc/{old.pid}/stat").read_text().rsplit(")", 1)[1].split()[1]), signal.SIGKILL)
    assert gone(old.pid)
    new = spawn_worker(f"{targets}:sleeper")
    receive(new, 30, "during its start")
    assert old.wait(30) and old.fate() == "was killed by SIGKILL"
    assert not new.wait(0.5)
    for worker in (old, new):
        worker.close(timeout_s=0.0)


def test_a_process_that_is_killed_before_it_has_forked_a_worker_is_replaced(targets: str) -> None:
    def killing(sock: socket.socket, descriptors: Sequence[int]) -> None:
        patch.undo()
        assert forkserver._server is not None
        os.kill(forkserver._server.pid, signal.SIGKILL)
        send_descriptors(sock, descriptors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "send_descriptors", killing)
        worker = spawn_worker(f"{targets}:sleeper")
    assert receive(worker, 30, "during its start") == worker.pid
    worker.close(timeout_s=0.0)


def test_a_process_whose_connection_ends_before_it_does_is_replaced(targets: str) -> None:
    spawn_worker(f"{targets}:listener").close()
    dying = forkserver._server
    assert dying is not None
    os.kill(dying.pid, signal.SIGSTOP)  # it reads no end of its connection, and does not end
    dying._sock.shutdown(socket.SHUT_RDWR)
    worker = spawn_worker(f"{targets}:sleeper")
    assert receive(worker, 30, "during its start") == worker.pid
    assert dying.dead
    worker.close(timeout_s=0.0)


@pytest.fixture
def impatient(targets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork servers of this test must answer within a second."""
    monkeypatch.setattr(forkserver, "ANSWER_TIMEOUT_S", 1.0)


def test_a_stopped_fork_server_holds_up_nobody_for_longer_than_its_limit(targets: str, impatient: None) -> None:
    dead, alive = (spawn_worker(f"{targets}:listener") for _ in range(2))
    stopped = dead.server
    os.kill(stopped.pid, signal.SIGSTOP)
    dead.kill()
    start_s = time.monotonic()
    assert dead.fate() == "ended, and the stopped process that it was forked from does not say how"
    dead.close()
    another = spawn_worker(f"{targets}:sleeper")
    assert receive(another, 30, "during its start") == another.pid and another.server is not stopped
    another.close(timeout_s=0.0)
    assert alive.alive() and not stopped.dead
    alive.close(timeout_s=0.0)
    assert stopped.dead and forkserver._retired == [stopped]
    assert time.monotonic() - start_s < 30
    spawn_worker(f"{targets}:listener").close()
    assert forkserver._retired == []


def test_a_fork_server_that_is_stopped_while_it_should_fork_is_replaced(targets: str, impatient: None) -> None:
    spawn_worker(f"{targets}:listener").close()
    assert forkserver._server is not None
    stopped = forkserver._server
    os.kill(stopped.pid, signal.SIGSTOP)
    worker = spawn_worker(f"{targets}:sleeper")
    assert receive(worker, 30, "during its start") == worker.pid
    worker.close(timeout_s=0.0)
    assert stopped.dead


def test_a_fork_server_without_workers_ends_when_nobody_asks_and_the_next_worker_gets_a_new_one(
    targets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forkserver, "IDLE_S", 0.2)
    worker = spawn_worker(f"{targets}:listener")
    server = worker.server
    assert server is not None
    time.sleep(1.0)
    assert worker.alive() and not server.dead
    worker.close()
    assert gone(server.pid)
    another = spawn_worker(f"{targets}:listener")
    assert another.alive() and another.server is not server
    another.close()


def test_a_fork_server_that_cannot_import_says_why_in_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise MemoryError('no room for a library')")
    with monkeypatch.context() as patch:
        patch.setattr(forkserver, "_server", None)
        patch.setattr(sys, "path", [str(tmp_path), *sys.path])
        with pytest.raises(WorkerError, match=r"could not start: MemoryError: no room for a library; raise that limit \('ulimit"):
            spawn_worker("os:getpid")


def test_what_the_kernel_refuses_the_process_that_forks_is_told_and_hurts_no_worker(targets: str) -> None:
    worker = spawn_worker(f"{targets}:sleeper")
    receive(worker, 30, "during its start")
    assert forkserver._server is not None
    pid = forkserver._server.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE, (6, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with pytest.raises(WorkerError, match=r"no worker could be forked: .*Too many open files; raise that limit \('ulimit"):
        spawn_worker(f"{targets}:sleeper")
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    another = spawn_worker(f"{targets}:sleeper")
    assert receive(another, 30, "during its start") == another.pid and worker.alive()
    for one in (worker, another):
        one.close(timeout_s=0.0)


def test_a_worker_for_which_the_host_has_no_descriptor_left_is_ended_and_buried(targets: str) -> None:
    spawn_worker(f"{targets}:listener").close()
    assert forkserver._server is not None
    pid = forkserver._server.pid
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for most in range(3, 60):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        try:
            worker = spawn_worker(f"{targets}:listener")
        except OSError:
            continue
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        worker.close()
        break
    assert Path(f"/proc/{pid}/task/{pid}/children").read_text() == ""


def test_a_worker_is_where_the_host_is_now_not_where_it_was(
    with_torch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOSPLIT_TEST_WORD", "now")
    worker = spawn_worker(f"{with_torch}:place", cores=affinity()[:1], threads=3)
    folder, word, path, threads = receive(worker, 30, "during its place")
    assert (folder, word, threads) == (str(tmp_path), "now", 3) and path == [entry or str(tmp_path) for entry in sys.path]
    worker.close()


HOST = """
import os, sys, threading
sys.path.insert(0, {folder!r})
from autosplit.devices import forkserver
from autosplit.devices.processes import spawn_worker, receive
forkserver.PRELOADED = ()
found = []
def start():
    worker = spawn_worker("worker_targets:sleeper")
    found.append((worker, receive(worker, 30, "during start")))
thread = threading.Thread(target=start)
thread.start()
thread.join()
print(found[0][1], flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_workers_die_with_the_host_however_it_dies(tmp_path: Path, end: signal.Signals) -> None:
    (tmp_path / "worker_targets.py").write_text(TARGETS)
    program = HOST.format(folder=str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as host:
        assert host.stdout is not None
        worker_pid = int(host.stdout.readline())
        # The thread that started the worker has ended by now; that alone must not end the worker.
        assert not gone(worker_pid, within_s=0.2)
        host.send_signal(end)
        host.wait(10)
    assert gone(worker_pid)


def test_a_page_that_two_processes_map_counts_half_for_each() -> None:
    size = 32 << 20
    with mmap.mmap(-1, size, flags=mmap.MAP_SHARED) as shared:
        shared.write(b"x" * size)
        alone = memory_held(os.getpid()).proportional_bytes
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            sum(shared[::4096])
            os.write(write, b"x")
            time.sleep(60)
            os._exit(0)
        try:
            os.read(read, 1)
            # The child maps all that was there before, so at least half of the shared pages is its share.
            assert alone - memory_held(os.getpid()).proportional_bytes > 0.4 * size
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(read)
            os.close(write)
    assert memory_held(child).proportional_bytes == 0


def test_resident_bytes_grow_with_what_is_touched() -> None:
    before = resident_bytes()
    with mmap.mmap(-1, 32 << 20) as block:
        block.write(b"1" * (32 << 20))
        assert resident_bytes() - before > 24 << 20


FREED = """
import ctypes
from autosplit.devices.forking import keep_freed_memory
from autosplit.devices.processes import resident_bytes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
for keep in (False, True):
    keep_freed_memory(keep)
    before, block = resident_bytes(), libc.malloc(ctypes.c_size_t(32 << 20))
    ctypes.memset(block, 1, 32 << 20)
    libc.free(block)
    print(resident_bytes() - before >> 20)
"""


def test_freed_memory_is_returned_while_loading_and_kept_for_passes() -> None:
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    returned, kept = map(int, done.stdout.split())
    assert returned < 2 and kept > 30


def test_passes_take_memory_for_what_lives_at_once_and_no_more(with_torch: str) -> None:
    """Each pass has at most 12 MiB at once; the heap grew to 55 MiB."""
    worker = spawn_worker(f"{with_torch}:passes")
    grown, setting = receive(worker, 30.0, "during passes")
    worker.close()
    assert 11 << 20 < grown < 16 << 20
    assert setting == os.environ.get("GLIBC_TUNABLES")  # programs that a worker starts keep the user's


@pytest.mark.parametrize(("is_worker", "asked"), [(True, [False, True]), (False, [])])
def test_only_a_worker_changes_how_its_memory_is_freed(
    is_worker: bool, asked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(forking, "_is_worker", is_worker)
    monkeypatch.setattr(forking, "keep_freed_memory", seen.append)
    with pytest.raises(KeyError), forking.freed_memory_returned():
        raise KeyError
    assert seen == asked


def test_a_mapped_file_of_data_counts_as_held_until_the_peak_begins_anew(tmp_path: Path) -> None:
    size = 32 << 20
    (tmp_path / "weights").write_bytes(b"1" * size)
    reset_peak(os.getpid())
    before = memory_held(os.getpid()).held_bytes
    with (tmp_path / "weights").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        sum(data[::4096])
        assert abs(memory_held(os.getpid()).held_bytes - before - size) < size // 4
    assert abs(memory_held(os.getpid()).held_bytes - before - size) < size // 4
    reset_peak(os.getpid())
    assert abs(memory_held(os.getpid()).held_bytes - before) < size // 4


def test_a_file_that_was_saved_a_moment_ago_is_no_memory_of_the_process_itself(tmp_path: Path) -> None:
    """Its pages wait to be written to disk, and the kernel lists them as private and dirty."""
    size = 32 << 20
    (tmp_path / "weights").write_bytes(b"1" * size)
    (ready, done), (go, end) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        with (tmp_path / "weights").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            os.read(go, 1)
            sum(data[::4096])
            os.write(done, b"x")
            time.sleep(60)
        os._exit(0)
    try:
        before = anonymous_bytes(child)
        os.write(end, b"x")
        os.read(ready, 1)
        held = memory_held(child, before)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for number in (ready, done, go, end):
            os.close(number)
    assert held.base_bytes < size // 2 < size <= held.held_bytes


def test_the_peak_of_a_process_begins_anew() -> None:
    reset_peak(os.getpid())
    before = memory_held(os.getpid()).held_bytes
    with mmap.mmap(-1, 32 << 20) as block:  # a bytearray may lie in pages that an earlier test left in the heap
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
    assert memory_held(os.getpid()).held_bytes >= before + (30 << 20)
    reset_peak(os.getpid())
    assert memory_held(os.getpid()).held_bytes < before + (30 << 20)
