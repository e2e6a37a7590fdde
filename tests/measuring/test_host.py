import contextlib
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from autosplit.backends.base import get_backend
from autosplit.backends.eager import EagerBackend
from autosplit.backends.profiling import RuntimeNode
from autosplit.devices.limits import affinity
from autosplit.errors import BackendError, DeviceError, UsageError, WorkerError
from autosplit.measuring import Store, host, measure, recalling, timing, turns, worker
from autosplit.measuring import bench as benches
from autosplit.measuring.bench import WorkerBench
from autosplit.measuring.cutting import Cut
from autosplit.measuring.parts import Part
from autosplit.measuring.steps import Progress
from autosplit.measuring.timing import Rounds, Timed
from autosplit.measuring.worker import INPUTS, Bench, Load, Prepare, Prepared, Resume, TimeCut, TimeOps, TimeWhole
from autosplit.tracing.capturing import Traced, trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import save_stage, split
from autosplit.values.machine import Device, Machine, parse_device
from autosplit.values.profile import Profile
from autosplit.values.samples import Setting

MODEL = "autosplit.examples.mlp:mlp?depth=4&width=16"
CORES = affinity()[:2]


@pytest.fixture(scope="module")
def traced() -> Traced:
    return trace(load_model(MODEL))


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine.of([parse_device(f"cpu:{core}") for core in CORES])


@torch.library.custom_op("measuring::zeroless", mutates_args=())
def zeroless(x: torch.Tensor) -> torch.Tensor:
    """An operator that takes no zeros."""
    if not x.all():
        raise ValueError("there is a zero")
    return x + 1


@zeroless.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Unread(torch.nn.Module):
    """Reads its second input only."""

    def forward(self, length, x, width):
        return x + 1


class Zeroless(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return zeroless(x) * 2


class FakeBench:
    """Answers at once with made-up times: op number n takes n + 1 ms in eager, and other backends run one fused node."""

    def __init__(self, traced: Traced, machine: Machine) -> None:
        self.traced = traced
        self.canaries = {device.name: 1e-3 for device in machine.devices}
        self.backend = ""
        self.commands: list[tuple[str, object]] = []
        self.begun: list[tuple[str, object]] = []
        self.without: set[str] = set()
        self.divided: dict[str, list[list[str]]] = {}
        self.wrong: set[str] = set()
        self.waited = 0.0
        self.slow: list[float] = []
        """Seconds of the first turn, and of those after it, where they are not the usual ones."""
        self.slow_again: list[float] = []

    def prepare(self, backend: str, precision: str) -> None:
        if backend in self.without:
            raise BackendError(f"op 'linear': no {backend} for it")

    def load(self, devices: Sequence[Device]) -> None:
        self.begun += [(device.name, Load(Path("whole"), device.cores)) for device in devices]

    def divide(self, backend: str, precision: str, failure: BackendError) -> None:
        raise failure

    def parts(self, backend: str) -> list[Part]:
        ops = [op.name for op in self.traced.graph.ops]
        return [Part(tuple(part), Path(part[0])) for part in self.divided.get(backend, [ops])]

    def time_cuts(self, group: Sequence[Setting], precision: str, rounds: Rounds) -> dict[str, float]:
        return {setting.device: 3e-9 for setting in group}

    def is_divided(self, backend: str) -> bool:
        return backend in self.divided

    def refused(self, backend: str) -> dict[str, str]:
        taken = {op for part in self.parts(backend) for op in part.ops}
        return {op.name: "no rule" for op in self.traced.graph.ops if op.name not in taken}

    def require(self, devices: Sequence[Device], part: Part) -> None:
        pass

    def names(self, backend: str, part: Part) -> dict[str, str]:
        return {}

    def take_canaries(self, devices: Sequence[Device]) -> None:
        pass

    def begin(self, commands: dict) -> None:
        self.commands += commands.items()
        self.begun += commands.items()

    def finish(self) -> dict:
        begun, self.begun = self.begun, []
        self.num_busy = len(begun)
        return {device: self.answer(command) for device, command in begun}

    def all(self, commands: dict) -> dict:
        self.begin(commands)
        return self.finish()

    def answer(self, command: object) -> object:
        ops = [op.name for op in self.traced.graph.ops]
        match command:
            case Resume(backend, _):
                self.backend = backend
                return None
            case Prepare(backend, _, weights):
                fault = f"backend '{backend}' gives wrong numbers" if backend in self.wrong else ""
                self.backend = backend
                return Prepared(dict.fromkeys(ops, 1.0) if weights else {}, 0.00123, fault)
            case TimeWhole() if self.num_busy > 1 or len(CORES) == 1:
                whole_s = self.slow_again.pop() if self.slow_again else 1.0 if self.backend == "eager" else 0.25
                return (whole_s, whole_s)
            case TimeWhole():
                return (0.97, 0.97)
            case Load():
                return None
        if self.backend == "eager":
            nodes = tuple(RuntimeNode(op, "op", ((n + 1) * 1e-3,) * 3) for n, op in enumerate(ops))
            return Timed((self.slow.pop() if self.slow else 1.0,) * 3, nodes, self.waited)
        return Timed((0.25, 0.25), (RuntimeNode("subgraph", "Fused", (0.2, 0.2)),), self.waited)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, traced: Traced, machine: Machine) -> FakeBench:
    """In place of worker processes; the canary takes 1 ms, as it did when the fake measured."""
    fake = FakeBench(traced, machine)
    monkeypatch.setattr(host, "open_bench", lambda traced, machine, linking, workspace: contextlib.nullcontext(fake))
    monkeypatch.setattr(recalling, "now_s", lambda cores, then_s: then_s)
    return fake


def fake_measure(traced: Traced, machine: Machine, backends: tuple[str, ...] = ("eager",), **options) -> Profile:
    return measure(traced, machine, backends, links=False, **options)


def test_occurrences_of_a_signature_pool_their_samples_and_sum_to_the_whole(traced, machine, bench) -> None:
    profile = fake_measure(traced, machine)
    setting = Setting(machine.devices[0].name, "eager", 1)
    linear = next(op for op in traced.graph.ops if op.name == "linear_1")
    same = [op for op in traced.graph.ops if op.signature == linear.signature]
    assert len(profile.op_samples(linear, setting).samples_s) == 3 * len(same)
    assert sum(profile.table(traced.graph, "eager", [setting.device]).values()) == pytest.approx(1.0)
    assert profile.measured[setting].source == "in-graph" and profile.whole_s(*setting, busy=False) == (
        1.0 if len(CORES) == 1 else 0.97
    )
    assert not profile.missing(traced.graph, profile.measured)


def test_a_backend_that_says_too_little_shares_its_time_as_eager_took_it(traced, machine, bench) -> None:
    profile = fake_measure(traced, machine, ("eager", "onnxruntime"))
    device = machine.devices[0].name
    first, last = traced.graph.ops[0].name, traced.graph.ops[-1].name
    ratio = profile.op_s(last, device, "eager") / profile.op_s(first, device, "eager")
    assert profile.op_s(last, device, "onnxruntime") / profile.op_s(first, device, "onnxruntime") == pytest.approx(ratio)
    assert profile.measured[Setting(device, "onnxruntime", 1)].source == "proportional"
    assert [command.weights for _, command in bench.commands if isinstance(command, Prepare)] == [False] * 2 * len(CORES)


def test_without_eager_the_worker_finds_the_weights(traced, machine, bench) -> None:
    profile = fake_measure(traced, machine, ("onnxruntime",))
    assert all(command.weights for _, command in bench.commands if isinstance(command, Prepare))
    assert len(set(profile.table(traced.graph, "onnxruntime").values())) == 1


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.parametrize("canary_s,num_alone", [(1.1e-3, 1), (1.2e-3, 2)])
def test_devices_are_timed_at_once_and_then_one_of_each_kind_alone(traced, machine, bench, canary_s, num_alone) -> None:
    first, second = (Setting(device.name, "eager", 1) for device in machine.devices)
    bench.canaries[second.device] = canary_s
    profile = fake_measure(traced, machine)
    kinds = [type(command) for _, command in bench.commands]
    assert kinds == [*[Prepare] * 2, *[TimeOps] * 2, *[TimeWhole] * num_alone, *[Resume] * 2, *[TimeWhole] * 2]
    assert profile.measured[first].alone and bool(profile.measured[second].alone) == (num_alone == 2)
    assert profile.whole_s(*first, busy=False) == profile.whole_s(*second, busy=False) == 0.97


@pytest.mark.parametrize(
    ("first_s", "samples_s"), [(1.1, (1.1,) * 3 + (1.0,) * 2), (1.9, (1.0,) * 2), (0.7, (0.7,) * 3)], ids=["near", "slow", "fast"]
)
def test_of_two_turns_that_are_far_apart_the_faster_one_counts(traced, machine, bench, tmp_path, first_s, samples_s) -> None:
    bench.slow = [first_s] * len(CORES)
    profile = fake_measure(traced, machine, store=tmp_path)
    for device in machine.devices:
        measured = profile.measured[Setting(device.name, "eager", 1)]
        assert sorted(measured.whole.samples_s) == sorted(samples_s)
        assert measured.alone is None or measured.alone.median_s == min(0.97, samples_s[0])
    bench.commands.clear()
    assert fake_measure(traced, machine, store=tmp_path).measured == profile.measured and not bench.commands


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.parametrize("third_s", [1.0, 1.9], ids=["a slow moment met both turns", "the devices share their memory"])
def test_devices_that_took_longer_together_than_alone_have_a_third_turn(traced, machine, bench, third_s) -> None:
    bench.slow, bench.slow_again = [1.9] * 2, [third_s, third_s, 1.9, 1.9]
    profile = fake_measure(traced, machine)
    assert [profile.whole_s(device.name, "eager") for device in machine.devices] == [third_s] * 2
    assert sum(isinstance(command, Resume) for _, command in bench.commands) == 2 * 2


def test_what_there_is_no_room_to_keep_is_loaded_again(traced, machine, bench, monkeypatch) -> None:
    monkeypatch.setattr(turns, "memory_limit_bytes", lambda: 10_000)  # of a control group: the machine has more
    fake_measure(traced, machine, ("eager", "onnxruntime"))
    prepares = [command for _, command in bench.commands if isinstance(command, Prepare)]
    assert [(p.backend, p.keep) for p in prepares] == [
        (backend, False) for backend in ("eager", "onnxruntime", "eager", "onnxruntime") for _ in CORES
    ]
    assert not any(isinstance(command, Resume) for _, command in bench.commands)


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_more_devices_than_are_timed_at_once_are_timed_in_turns(traced, machine, bench, monkeypatch) -> None:
    monkeypatch.setattr(host, "MAX_AT_ONCE", 1)
    profile = fake_measure(traced, machine, ("eager", "onnxruntime"))
    assert len(profile.measured) == 2 * len(CORES) and not profile.notes
    kinds = [type(command) for _, command in bench.commands]
    assert kinds == [Prepare, TimeOps] * 4 + [Resume, TimeWhole] * 4


def test_a_second_run_measures_nothing_and_another_model_or_count_does(traced, machine, bench, tmp_path) -> None:
    first = fake_measure(traced, machine, store=tmp_path)
    bench.commands.clear()
    again = fake_measure(traced, machine, store=tmp_path)
    assert not bench.commands and again == first and not again.notes
    fake_measure(traced, machine, store=Store(tmp_path), remeasure=True)
    assert bench.commands


def test_a_drifted_canary_measures_again_and_says_which_and_why(traced, machine, bench, tmp_path, monkeypatch) -> None:
    fake_measure(traced, machine, store=tmp_path)
    monkeypatch.setattr(recalling, "now_s", lambda cores, then_s: then_s * (0.7 if cores == (CORES[0],) else 1.05))
    bench.commands.clear()
    profile = fake_measure(traced, machine, store=tmp_path)
    assert bench.commands
    [note] = profile.notes
    assert note.startswith(f"eager on cpu:{CORES[0]} with 1 thread: stored, but the canary takes 30% less time than then")


def test_other_versions_measure_again_and_say_so(traced, machine, bench, tmp_path, monkeypatch) -> None:
    fake_measure(traced, machine, store=tmp_path)
    monkeypatch.setattr(host.discovering, "versions", lambda backends: {"torch": "99"})
    notes = fake_measure(traced, machine, store=tmp_path).notes
    assert len(notes) == len(CORES) and all("here it is torch 99" in note for note in notes)


def test_a_truncated_file_is_measured_again_with_a_warning(traced, machine, bench, tmp_path) -> None:
    first = fake_measure(traced, machine, store=tmp_path)
    path = Store(tmp_path).folder(traced.graph) / f"cpu-{CORES[0]}.json"
    path.write_text(path.read_text()[:200])
    again = fake_measure(traced, machine, store=tmp_path)
    assert set(again.measured) == set(first.measured)
    assert any("truncated" in note and "is measured again" in note for note in again.notes)


def test_a_backend_that_refuses_is_left_out_unless_it_is_the_only_one(traced, machine, bench) -> None:
    bench.without = {"onnxruntime"}
    profile = fake_measure(traced, machine, ("eager", "onnxruntime"))
    assert {setting.backend for setting in profile.measured} == {"eager"}
    assert profile.notes == ("onnxruntime is left out: op 'linear': no onnxruntime for it",)
    with pytest.raises(BackendError, match="no onnxruntime for it"):
        fake_measure(traced, machine, ("onnxruntime",))


def test_where_a_cut_could_not_be_timed_a_note_names_the_backend_and_the_device(traced, machine, bench) -> None:
    first = machine.devices[0].name
    bench.time_cuts = lambda group, precision, rounds: {setting.device: 3e-9 for setting in group[1:]}
    [note] = fake_measure(traced, machine, ("eager", "onnxruntime")).notes
    assert note.startswith(f"onnxruntime on {first}: what a cut costs could not be timed")


def test_a_backend_that_refuses_some_ops_is_measured_on_the_rest(traced, machine, bench, tmp_path) -> None:
    first, second, third, *rest = (op.name for op in traced.graph.ops)
    bench.divided = {"onnxruntime": [[first], [third, *rest]]}
    profile = fake_measure(traced, machine, ("eager", "onnxruntime"), store=tmp_path)
    [note] = profile.notes
    assert note == f"onnxruntime refuses op '{second}' (no rule); stages of another backend run what it refuses"
    for device in machine.devices:
        measured = profile.measured[Setting(device.name, "onnxruntime", 1)]
        assert set(measured.ops) == {first, third, *rest} and measured.whole.samples_s == (0.5, 0.5)
        assert measured.cut_s_per_byte is None and profile.measured[Setting(device.name, "eager", 1)].cut_s_per_byte == 3e-9
        assert profile.op_s(second, device.name, "onnxruntime") == profile.whole_s(device.name, "onnxruntime") == math.inf
        table = profile.table(traced.graph, "onnxruntime", [device.name])
        assert (second, device.name) not in table and sum(table.values()) == pytest.approx(0.5)
    assert not profile.missing(traced.graph, profile.measured)
    bench.commands.clear()
    again = fake_measure(traced, machine, ("eager", "onnxruntime"), store=tmp_path)
    assert again.measured == profile.measured and again.notes == profile.notes and not bench.commands
    with pytest.raises(BackendError, match=f"no backend is left on '{machine.devices[0].name}' for op '{second}'"):
        fake_measure(traced, machine, ("onnxruntime",))


def test_a_backend_with_wrong_numbers_is_left_out_by_name(traced, machine, bench) -> None:
    bench.wrong = {"openvino"}
    profile = fake_measure(traced, machine, ("eager", "openvino"))
    assert {setting.backend for setting in profile.measured} == {"eager"}
    assert profile.notes == ("openvino is left out: backend 'openvino' gives wrong numbers",)
    assert {measured.error for measured in profile.measured.values()} == {0.00123}
    with pytest.raises(BackendError, match="'openvino' gives wrong numbers"):
        fake_measure(traced, machine, ("openvino",))


def test_each_precision_has_a_profile_of_its_own(traced, machine, bench, tmp_path) -> None:
    fake_measure(traced, machine, ("eager", "onnxruntime"), store=tmp_path)
    bench.commands.clear()
    coarse = fake_measure(traced, machine, ("eager", "onnxruntime"), store=tmp_path, precision="bf16")
    assert [command.precision for _, command in bench.commands if isinstance(command, Prepare)] == ["bf16"] * len(CORES)
    assert coarse.precision == "bf16" and {setting.backend for setting in coarse.measured} == {"eager"}
    [note] = coarse.notes
    assert note.startswith("onnxruntime is left out: backend 'onnxruntime' does not compute in bf16")
    bench.commands.clear()
    assert fake_measure(traced, machine, store=tmp_path, precision="bf16").measured == coarse.measured
    assert fake_measure(traced, machine, ("eager", "onnxruntime"), store=tmp_path).precision == "f32" and not bench.commands
    with pytest.raises(BackendError, match="does not compute in bf16"):
        fake_measure(traced, machine, ("onnxruntime",), precision="bf16")


def test_a_worker_names_the_backend_whose_numbers_are_wrong(traced, tmp_path, monkeypatch) -> None:
    class Zeros(EagerBackend):
        name, exact = "zeros", False

        def load(self, folder, threads, precision="f32", shared=True):
            run = super().load(folder, threads, precision, shared)
            return lambda inputs: [value * 0 for value in run(inputs)]

    [program] = split(traced, [[op.name for op in traced.graph.ops]])
    save_stage(program, tmp_path)
    torch.save(list(traced.example_inputs), tmp_path / INPUTS)
    get_backend("eager").prepare(program, tmp_path, "bf16")
    bench = Bench()
    bench.obey(Load(tmp_path, CORES[:1]))
    with torch.inference_mode():
        assert bench.obey(Prepare("eager", 1, False)) == Prepared({}, 0.0)
        assert 0 < bench.obey(Prepare("eager", 1, False, "bf16")).error < 0.02
        monkeypatch.setattr(worker, "get_backend", lambda name: Zeros())
        monkeypatch.setattr(timing, "get_backend", lambda name: Zeros())
        for precision in ("f32", "bf16"):
            assert "backend 'zeros'" in bench.obey(Prepare("eager", 1, False, precision)).fault

        def broken(self, folder, threads, precision="f32"):
            raise BackendError("the session does not take the file")

        monkeypatch.setattr(Zeros, "load", broken)
        assert bench.obey(Prepare("eager", 1, False)).fault == "the session does not take the file"
        monkeypatch.setattr(Zeros, "load", lambda *_: 1 / 0)
        assert bench.obey(Prepare("eager", 1, False)).fault == "backend 'eager' failed: division by zero"


def test_disturbed_measurements_carry_a_note(traced, machine, bench) -> None:
    bench.waited = 0.4
    profile = fake_measure(traced, machine)
    words = "other processes had the core for 40% of the time; measure again (--remeasure) when it is quiet"
    assert all(words in note for note in profile.notes) and len(profile.notes) == len(CORES)
    assert all("40%" in measured.provenance.note for measured in profile.measured.values())


def test_progress_ends_at_one_and_never_falls(traced, machine, bench) -> None:
    seen: list[Progress] = []
    fake_measure(traced, machine, ("eager", "onnxruntime"), progress=seen.append)
    done = [progress.done for progress in seen]
    assert done[-1] == 1 and seen[-1].left_s == 0 and sorted(done) == done
    assert {"timing eager", "preparing onnxruntime"} <= {progress.what for progress in seen}


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_thread_counts_are_measured_one_after_the_other(traced, bench) -> None:
    wide = Machine.of([parse_device(f"cpu:{CORES[0]}-{CORES[-1]}")])
    bench.canaries = {wide.devices[0].name: 1e-3}
    name = wide.devices[0].name
    profile = fake_measure(traced, wide, threads={name: [1, 2]})
    assert [setting.threads for setting in profile.measured] == [1, 2]
    with pytest.raises(UsageError, match="has 2 cores, so it cannot run 3 threads"):
        fake_measure(traced, wide, threads={name: [3]})


def test_devices_that_cannot_be_measured_are_refused(traced, machine) -> None:
    with pytest.raises(DeviceError, match=r"'null:0' cannot be measured.*Profile\.given"):
        measure(traced, Machine.of([parse_device("null:0")]))
    with pytest.raises(DeviceError, match="names core 9999"):
        measure(traced, Machine.of([parse_device("cpu:9999")]))
    with pytest.raises(UsageError, match="no backend is named"):
        measure(traced, machine, ())
    with pytest.raises(UsageError, match="'tpu'"):
        measure(traced, machine, ("tpu",))


def test_stages_beside_a_cut_that_cannot_run_have_no_cost(tmp_path: Path) -> None:
    model = trace(load_model(Zeroless().eval(), inputs=(torch.ones(4),), name="zeroless"))
    [whole] = split(model, [[op.name for op in model.graph.ops]])
    save_stage(whole, tmp_path / "stage")
    folders = (tmp_path / "stage",) * 3
    assert Bench().obey(TimeCut(folders, "eager", 1, "f32", host.Rounds(0.0))) is None
    bench = WorkerBench(None, SimpleNamespace(ops=()), Path(), None, {}, Cut(("a",), ("b",), 8))
    bench.all = lambda commands: dict.fromkeys(commands) | {"cpu:1": 4e-6}
    bench._cuts["eager"] = folders
    assert bench.time_cuts([Setting("cpu:0", "eager", 1), Setting("cpu:1", "eager", 1)], "f32", host.Rounds(0.0)) == {
        "cpu:1": 5e-7
    }


def test_bench_obeys_only_in_order() -> None:
    with pytest.raises(RuntimeError, match="before it loaded"):
        Bench().obey(Prepare("eager", 1, False))
    with pytest.raises(RuntimeError, match="before it prepared"):
        Bench().obey(TimeWhole(host.Rounds(0.1)))


@pytest.mark.timeout(120)
def test_real_workers_measure_and_leave_nothing_behind(traced, machine, tmp_path) -> None:
    profile = measure(traced, machine, ("eager", "onnxruntime"), store=tmp_path, budget_s=1.0, links=False)
    assert set(profile.measured) == {Setting(d.name, b, 1) for b in ("eager", "onnxruntime") for d in machine.devices}
    for setting, measured in profile.measured.items():
        assert sum(profile.table(traced.graph, setting.backend, [setting.device]).values()) == pytest.approx(
            measured.whole.median_s
        )
        assert measured.provenance.canary_s > 0 and measured.provenance.versions["torch"] == torch.__version__
        assert (measured.cut_s_per_byte is None) == (setting.backend == "eager")
    assert {m.source for s, m in profile.measured.items() if s.backend == "onnxruntime"} == {"profiler"}
    assert Store(tmp_path).load(traced.graph).measured == profile.measured
    assert not list(children())


@pytest.mark.timeout(120)
def test_what_fails_in_a_worker_comes_with_its_traceback(traced, machine, tmp_path) -> None:
    broken = replace(traced, example_inputs=(torch.zeros(3, 5),))
    with pytest.raises(WorkerError, match=r"(?s)failed at Prepare.*Traceback.*shapes cannot be multiplied"):
        measure(broken, Machine.of(machine.devices[:1]), store=tmp_path, links=False)
    assert not list(children()) and not list(tmp_path.glob("*/cpu*.json"))


@pytest.mark.timeout(120)
def test_ctrl_c_keeps_what_was_measured_and_stops_the_workers(traced, machine, tmp_path, monkeypatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    seen: list[list[int]] = []

    def interrupt(progress: Progress) -> None:
        if progress.what == "timing onnxruntime":
            seen.append(children(os.getpid()))
            raise KeyboardInterrupt

    both, store = ("eager", "onnxruntime"), tmp_path / "store"
    with pytest.raises(KeyboardInterrupt):
        measure(traced, machine, both, store=store, budget_s=1.0, progress=interrupt, links=False)
    assert seen[0] and not children()
    stored = Store(store).load(traced.graph)
    assert {setting.backend for setting in stored.measured} == {"eager"} and not stored.notes
    assert not list((tmp_path / "tmp").iterdir())


SCRIPT = f"""
import sys
from pathlib import Path
from autosplit.devices.limits import affinity
from autosplit.tracing.loading import load_model
from autosplit.values.machine import Machine, parse_device
from autosplit.measuring import measure, recalling
from autosplit.tracing.capturing import trace

recalling.now_s = lambda cores, then_s: then_s
machine = Machine.of([parse_device(f"cpu:{{affinity()[0]}}")])
traced = trace(load_model({MODEL!r}))
print("traced", flush=True)
sys.stdin.readline()
measure(traced, machine, store=Path(sys.argv[1]), budget_s=1.0, progress=lambda now: print(now.what, flush=True), links=False)
"""


@pytest.mark.timeout(120)
def test_two_processes_at_once_measure_each_thing_once(traced, machine, tmp_path, monkeypatch) -> None:
    # A neighbour on the core must not look like another machine to the second of two processes.
    monkeypatch.setattr(recalling, "now_s", lambda cores, then_s: then_s)
    here: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "traced\n"
        other.stdin.write("go\n")
        other.stdin.flush()
        measure(
            traced,
            Machine.of(machine.devices[:1]),
            store=tmp_path,
            budget_s=1.0,
            progress=lambda now: here.append(now.what),
            links=False,
        )
        there = other.communicate(timeout=100)[0].splitlines()
    assert other.returncode == 0
    assert sorted("timing eager" in told for told in (here, there)) == [False, True]
    assert not list(tmp_path.glob("*/*.broken*"))


def children(pid: int | None = None) -> list[int]:
    """The living workers of a process: the forks of the child that imports for them all."""
    deadline = time.monotonic() + 5
    while True:
        parents: dict[int, int] = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                _name, rest = stat.read_text().rsplit(")", 1)
                state, parent = rest.split()[:2]
                if state != "Z" and "autosplit.devices.forking" in (stat.parent / "cmdline").read_text():
                    parents[int(stat.parent.name)] = int(parent)
        found = [child for child, parent in parents.items() if parents.get(parent) == (pid or os.getpid())]
        if pid is not None or not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def test_a_dead_worker_is_named() -> None:
    class Dead:
        connection = SimpleNamespace(send=lambda command: (_ for _ in ()).throw(BrokenPipeError()))

        def fate(self) -> str:
            return "was killed by SIGKILL"

    with pytest.raises(WorkerError, match="measures on 'cpu:0' was killed by SIGKILL"):
        WorkerBench(None, SimpleNamespace(ops=()), Path(), None, {"cpu:0": Dead()}, None).all(
            {"cpu:0": TimeWhole(host.Rounds(1.0))}
        )


def test_another_measurement_takes_twelve_passes_on_all_devices_at_once(traced) -> None:
    ops = [op.name for op in traced.graph.ops]
    profile = Profile.given(traced.graph, {(op, device): 0.5 for op in ops for device in ("cpu:0", "cpu:1")})
    assert host.least_s(profile) == pytest.approx(12 * 0.5 * len(ops))


def test_a_committed_profile_is_found_for_the_model_as_it_is_traced_today() -> None:
    traced = trace(load_model("autosplit.examples.mlp:mlp_512"))
    stored = Store(Path(__file__).parents[2] / "profiles").load(traced.graph)
    assert {setting.backend for setting in stored.measured} >= {"eager", "onnxruntime"}
    assert not stored.missing(traced.graph, stored.measured)


def test_inputs_that_no_op_reads_are_not_given_to_the_stage(monkeypatch) -> None:
    model = trace(load_model(Unread().eval(), inputs=(torch.ones(3), torch.zeros(2, 2), torch.ones(1))))
    monkeypatch.setattr(benches, "prepare_to_spawn", lambda: None)
    monkeypatch.setattr(benches, "measuring_worker", lambda device, name, fds: contextlib.nullcontext())
    with benches.open_bench(model, Machine.of([parse_device("cpu:0")]), None, None) as opened:
        [x] = torch.load(opened.folder / INPUTS)
    assert torch.equal(x, torch.zeros(2, 2))
