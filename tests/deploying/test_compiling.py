"""A backend that compiles for long: apart, within a limit, and only where it may win."""

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pipelines import wait_until

import autosplit
from autosplit.backends import apart
from autosplit.backends.base import installed
from autosplit.backends.warming import begin_loading
from autosplit.backends.workspace import Workspace
from autosplit.deploying import compiling
from autosplit.deploying.compiling import LEAST_COMPILE_S, compile_baselines
from autosplit.deploying.setup import Budget, Setup
from autosplit.devices.limits import affinity
from autosplit.devices.processes import Worker, spawn_worker
from autosplit.errors import BackendError, UsageError
from autosplit.scratch import scratch_folder
from autosplit.tracing.capturing import Traced
from autosplit.tracing.splitting import StageProgram, unsplit
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile

ONE = Machine.of([parse_device(f"cpu:{affinity()[0]}")])
pytestmark = pytest.mark.skipif("inductor" not in installed(), reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def mlp() -> Traced:
    return autosplit.trace("autosplit.examples.mlp:mlp?depth=3&width=16")


@pytest.fixture
def workspace() -> Iterator[Workspace]:
    with Workspace() as made:
        yield made


def planned(traced: Traced, eager_s: float, other_s: float) -> tuple[Plan, Profile]:
    """A plan, and a profile in which an op takes so long in eager and so long in ONNX Runtime."""
    ops = [(op.name, ONE.devices[0].name) for op in traced.graph.ops]
    profile = Profile.given(traced.graph, dict.fromkeys(ops, eager_s))
    other = Profile.given(traced.graph, dict.fromkeys(ops, other_s), "onnxruntime")
    profile = replace(profile, measured={**profile.measured, **other.measured})
    return autosplit.search(traced, profile, ONE, budget=Budget(search_s=0)).plan, profile


def test_processes_that_compile_end_once_the_stages_of_all_plans_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    for name, value in {"num_keeping": 0, "_idle": ["for two plans"], "_end": ended.append}.items():
        monkeypatch.setattr(apart, name, value)
    with apart.kept():
        for _ in range(2):
            with Workspace() as workspace:
                workspace.keep_files_only()
        assert ended == []
    apart._idle.append("for one")  # type: ignore[arg-type]
    with Workspace() as workspace:
        workspace.keep_files_only()
        assert ended == ["for two plans", "for one"]


def test_a_limit_within_a_step_leaves_its_seconds_shown() -> None:
    """Trials of ops with inductor took 100 s, in which a profile showed nothing."""
    seen: list[float] = []
    with apart.limited(watch=seen.append), apart.limited(5.0):
        assert apart._limits.get() == (5.0, seen.append)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    """The processes that compile; those of other tests are not asked."""
    found = list[Worker]()
    monkeypatch.setattr(apart, "num_keeping", 0)
    apart.end_idle()

    def spawn(target: str, **settings: str) -> Worker:
        found.append(spawn_worker(target, **settings))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(apart, "spawn_worker", spawn)
    monkeypatch.setattr(compiling, "end_idle", apart.end_idle)  # which ``brief`` replaces
    return found


def test_what_is_loaded_beforehand_serves_the_next_call(started: list[Worker]) -> None:
    apart.begin_apart(int, "no number", doing="while something was loaded")  # a failure waits for the call that needs it
    apart.begin_apart(os.getpid, doing="while something was loaded")  # one is enough
    assert apart.apart(os.getpid, doing="") == started[-1].pid != os.getpid()
    assert len(started) == 1
    begin_loading(["eager", "inductor"])  # the one writes no files, and the other would compile
    assert len(started) == 1


def linger(folder: Path) -> None:
    """Be in the middle of a call for long, with a folder of one's own."""
    tempfile.tempdir = str(folder.parents[1])  # that of the test
    with scratch_folder():
        (folder / "begun").touch()
        time.sleep(60)


def test_the_end_of_the_process_ends_what_is_loaded_beforehand_and_removes_its_folder(
    started: list[Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at the start of a command left it behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(apart, "_leaving", threading.Event())
    apart.begin_apart(linger, doing="while something was loaded")
    wait_until(lambda: bool(list(tmp_path.glob("autosplit-*/*/begun"))))
    apart._leave()
    assert not list(tmp_path.glob("autosplit-*"))
    assert_gone(started[-1])
    monkeypatch.setattr(apart, "_warming", None)


def assert_gone(worker: Worker) -> None:
    """Neither the process nor a compiler that it called is left."""
    with pytest.raises(ProcessLookupError):
        os.killpg(worker.pid, 0)


def test_a_compiled_way_is_ready_and_nothing_else_is_left(
    mlp: Traced, workspace: Workspace, started: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a quick compiler; what the real one makes and leaves is looked at in ``tests/test_foreign_folders.py``."""
    monkeypatch.setattr(StageProgram, "packages", ("quick_libraries",))
    plan, profile = planned(mlp, 1.0, 0.8)
    folder = workspace.save(unsplit(mlp))
    there = {*folder.iterdir(), folder / "inductor.so"}
    told: list[tuple[float, str]] = []
    ready, reasons = compile_baselines(["inductor"], (mlp, profile), plan, ONE, workspace, 200, lambda *now: told.append(now[1:]))
    assert (ready, reasons) == (["inductor"], {})
    assert [share for share, _ in told] == sorted(share for share, _ in told)
    assert told[0] == (0.0, "compiling the model for inductor") and 0 < told[-1][0] < 1
    assert_gone(started[0])
    assert {*folder.iterdir()} == there
    assert workspace.add(unsplit(mlp), "inductor", "f32") == folder and len(started) == 1


def test_compiling_ends_at_its_limit_with_all_that_it_started(mlp: Traced, workspace: Workspace, started: list[Worker]) -> None:
    with pytest.raises(
        BackendError, match=r"gave no answer within 0\.3 s while inductor prepared .*; allow more with a larger budget"
    ):
        compiling.compile_whole(mlp, "inductor", "f32", workspace, 0.3, lambda share: None)
    assert_gone(started[0])


def test_a_killed_compiler_is_a_reason_and_not_the_end(
    mlp: Traced, workspace: Workspace, started: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, profile = planned(mlp, 1.0, 1.0)
    ready, reasons = compile_baselines(
        ["inductor"], (mlp, profile), plan, ONE, workspace, 60, lambda *now: started and started[0].kill()
    )
    assert ready == [] and "was killed by SIGKILL while inductor prepared stage" in reasons["inductor alone"]


def test_a_compiler_that_died_before_it_was_asked_is_a_worker_that_died(
    mlp: Traced, workspace: Workspace, started: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn = apart.spawn_worker

    def spawn_and_kill(target: str, **settings: str) -> Worker:
        worker = spawn(target, **settings)  # type: ignore[arg-type]
        worker.kill()
        return worker

    monkeypatch.setattr(apart, "spawn_worker", spawn_and_kill)
    with pytest.raises(BackendError, match="was killed by SIGKILL while inductor prepared stage"):
        compiling.compile_whole(mlp, "inductor", "f32", workspace, 60, lambda share: None)


def test_a_package_that_cannot_be_imported_is_named(mlp: Traced, workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StageProgram, "packages", ("no_such_package",))
    with pytest.raises(BackendError, match=r"ModuleNotFoundError while inductor prepared stage .*'no_such_package'"):
        compiling.compile_whole(mlp, "inductor", "f32", workspace, 60, lambda share: None)


def test_ctrl_c_leaves_no_compiler_behind(mlp: Traced, workspace: Workspace, started: list[Worker]) -> None:
    def interrupt(share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compiling.compile_whole(mlp, "inductor", "f32", workspace, 60, interrupt)
    assert_gone(started[0])


def test_nothing_is_compiled_that_cannot_win_or_has_no_time(
    mlp: Traced, workspace: Workspace, started: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, profile = planned(mlp, 1.0, 0.25)

    def reason(plan: Plan, profile: Profile | None, limit_s: float) -> str:
        ready, reasons = compile_baselines(["inductor"], (mlp, profile), plan, ONE, workspace, limit_s)
        assert not ready
        return reasons["inductor alone"]

    assert reason(plan, profile, 60) == "another backend is 4.0 times as fast as eager, which compiling has not caught up with"
    num_ops = len(mlp.graph.ops)
    too_little = f"compiling {num_ops} ops takes about 10 s, and 9 s are allowed; give a larger budget"
    assert reason(plan, None, LEAST_COMPILE_S - 1) == too_little
    assert reason(replace(plan, objective="latency"), profile, 3).startswith(f"compiling {num_ops} ops takes about 10 s")
    monkeypatch.setattr(compiling, "OP_S", 53 / num_ops)
    assert reason(plan, None, 59).startswith(f"compiling {num_ops} ops takes about 60 s, and 59 s are allowed")
    with pytest.raises(UsageError, match="'tensorrt' does not exist"):
        compile_baselines(["tensorrt"], (mlp, profile), plan, ONE, workspace, 60)
    with pytest.raises(UsageError, match="backends must be a list"):
        Setup(backends=[1])  # type: ignore[list-item]
    assert started == []
