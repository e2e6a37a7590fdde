"""Workers that are killed, hang or run out of memory, for real: every other answer arrives, right and in order."""

import os
import re
import shutil
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from pipelines import CORES, request, spawned, wait_until

from autosplit.devices import forkserver
from autosplit.errors import StageError
from autosplit.running import recovery, ringtransport
from autosplit.running.modules import StageFolder
from autosplit.running.pipeline import Pipeline
from autosplit.running.provisioner import Deployment, provision
from autosplit.running.stage import StagePlacement
from autosplit.running.wiring import Wiring
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import StageProgram, save_stage, unsplit

pytestmark = pytest.mark.timeout(100)


@pytest.fixture(scope="module")
def mlp_stage() -> StageProgram:
    return unsplit(trace(load_model("autosplit.examples.mlp:mlp?depth=2&width=8")))


def test_a_thousand_requests_survive_killed_workers() -> None:
    """The first and the last stage are on one device, and each is a process of its own."""
    stages = [spawned("a", "slow_increment", "x", "u"), spawned("b", "double", "u", "v", CORES[-1:])]
    stages.append(spawned("c", "increment", "v", "y"))
    with Pipeline(stages, ["x"], ["y"]) as pipeline:

        def kill() -> None:
            for victim in (0, 1, 2):  # far enough from each other that none strikes the requests of the one before
                wait_until(lambda victim=victim: pipeline.occupancy.num_answered > 100 + 250 * victim)
                os.kill(pipeline.pids[victim], signal.SIGKILL)
                wait_until(lambda victim=victim: pipeline.restarts > victim)

        killer = threading.Thread(target=kill)
        killer.start()
        answers = pipeline.run_many([request(number) for number in range(1000)])
        killer.join()
        assert pipeline.stats().restarts == 3
    assert [float(answer[0][0]) for answer in answers] == [2 * number + 3 for number in range(1000)]


def test_a_request_that_kills_or_hangs_its_worker_is_given_up_alone() -> None:
    hung = r"hung: it was killed after running for \d+\.\d s \(limit 1 s\)"
    for function, story in (("die_on_7", "was killed by SIGKILL"), ("hang_on_7", hung)):
        with Pipeline([spawned("a", function, "x", "y", hang_s=1)], ["x"], ["y"]) as pipeline:
            futures = [pipeline.submit(request(number)) for number in range(10)]
            text = str(futures[7].exception(60))
            assert re.search(rf"stage 'a' \(replica 0, device '{CORES[0].name}'\) {story} while it ran request 7", text)
            answers = [float(future.result(60)[0][0]) for future in futures if future is not futures[7]]
            assert answers == [1, 2, 3, 4, 5, 6, 7, 9, 10]
            assert pipeline.restarts == 2


def test_a_worker_that_dies_while_others_still_load_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def provision_and_kill(wiring: Wiring) -> Deployment:
        deployment = provision(wiring)
        os.kill(deployment.workers[0].pid, signal.SIGKILL)
        assert deployment.workers[0].wait(20)
        return deployment

    monkeypatch.setattr(ringtransport, "provision", provision_and_kill)
    with Pipeline([spawned("a", "increment", "x", "u"), spawned("b", "double", "u", "y")], ["x"], ["y"]) as pipeline:
        assert pipeline.run(request(1))[0][0] == 4
        assert pipeline.restarts == 1


def test_a_stage_that_dies_at_every_request_fails_each_alone_and_stays_open() -> None:
    with Pipeline([spawned("a", "die", "x", "y")], ["x"], ["y"], max_restarts=1) as pipeline:
        futures = [pipeline.submit(request(number)) for number in range(2)]
        for number, future in enumerate(futures):
            assert re.search(rf"exited with code 3 while it ran request {number}; .* tried 2 times", str(future.exception(60)))
        assert pipeline.failure is None and pipeline.restarts == 4


def test_five_workers_outlive_the_process_that_they_were_forked_from_and_no_request_is_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forkserver, "_wanted", [])  # of the exporter, which takes 2 s
    monkeypatch.setattr(recovery, "MAX_TRIES", 1)  # a request that is blamed is given up at once
    stages = [spawned("a", "slow_increment", "x", "u", [CORES[0]] * 3), spawned("b", "double", "u", "y", [CORES[-1]] * 2)]
    with Pipeline(stages, ["x"], ["y"], max_restarts=1) as pipeline:
        futures = [pipeline.submit(request(number)) for number in range(50)]
        os.kill(psutil.Process(pipeline.pids[0]).ppid(), signal.SIGKILL)
        wait_until(lambda: pipeline.restarts >= 5)
        assert [float(future.result(90)[0][0]) for future in futures] == [2 * number + 2 for number in range(50)]


def test_a_folder_that_a_cleaner_empties_is_written_again_for_a_restart(mlp_stage: StageProgram, tmp_path: Path) -> None:
    folder = tmp_path / "workspace" / "stage"
    save_stage(mlp_stage, folder)
    stage = StagePlacement("a", StageFolder(folder), mlp_stage.inputs, mlp_stage.outputs, CORES[:1])
    names = [spec.name for spec in mlp_stage.inputs], [spec.name for spec in mlp_stage.outputs]
    inputs = [torch.randn(spec.shape) for spec in mlp_stage.inputs]
    with Pipeline([stage], *names) as pipeline:
        before = pipeline.run(inputs)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        shutil.rmtree(tmp_path / "workspace")
        os.kill(pipeline.pids[0], signal.SIGKILL)
        assert torch.equal(pipeline.run(inputs)[0], before[0]) and pipeline.restarts == 1
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
        assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700


def test_running_out_of_memory_fails_the_request_alone_and_a_worker_that_stands_still_is_replaced() -> None:
    with Pipeline([spawned("a", "exhaust", "x", "y", hang_s=1)], ["x"], ["y"]) as pipeline:
        futures = [pipeline.submit(request(number)) for number in range(9)]
        assert futures[8].result(30)[0][0] == 9
        with pytest.raises(StageError, match=r"failed on request 7: RuntimeError.*memory"):
            futures[7].result(30)
        assert pipeline.restarts == 0
        os.kill(pipeline.pids[0], signal.SIGSTOP)
        assert pipeline.run(request(1))[0][0] == 2
        assert pipeline.restarts == 1


def test_the_end_of_a_pipeline_does_not_wait_for_a_stopped_fork_server() -> None:
    """Amid a recovery it took the ten seconds that a fork server has for an answer, and one more for each worker."""
    pipeline = Pipeline([spawned("a", "increment", "x", "u"), spawned("b", "increment", "u", "y")], ["x"], ["y"])
    server = pipeline._transport.deployment.workers[0].server  # type: ignore[attr-defined]
    os.kill(server.pid, signal.SIGSTOP)
    os.kill(pipeline.pids[0], signal.SIGKILL)
    wait_until(lambda: pipeline.health()[1].state == "paused")
    begun_s = time.monotonic()
    pipeline.close(drain=False)
    taken_s = time.monotonic() - begun_s
    with suppress(ProcessLookupError):
        os.kill(server.pid, signal.SIGCONT)
    assert taken_s < 5
