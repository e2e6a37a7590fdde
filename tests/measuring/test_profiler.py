import contextlib
import errno
import math
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from autosplit.backends import apart
from autosplit.backends.base import get_backend
from autosplit.backends.eager import EagerBackend
from autosplit.backends.profiling import RuntimeNode
from autosplit.devices.limits import affinity
from autosplit.devices.processes import receive, spawn_worker
from autosplit.errors import BackendError, DeviceError, UsageError, WorkerError
from autosplit.measuring import (
    Store,
    cache_lookup,
    measure,
    measuring_worker,
    profiler,
    rounds,
    settings,
    shortest_measurement_s,
    stage_timer,
    store,
)
from autosplit.measuring.cut_cost import typical_cut
from autosplit.measuring.measuring_worker import DeviceFaults, MeasuringWorker, Prepared, Workers
from autosplit.measuring.model_files import BackendFiles, ModelFiles, Subgraph
from autosplit.measuring.profiler import WAITING, _Steps, measure_together
from autosplit.measuring.stage_timer import INPUTS, PassBudget, Timed
from autosplit.tracing.capturing import Traced, trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import save_stage, split
from autosplit.values.graph import Graph
from autosplit.values.machine import Machine, parse_device
from autosplit.values.profile import Profile
from autosplit.values.samples import Footprint, Setting

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


class Zeroless(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return zeroless(x) * 2


class FakeWorkers:
    """Answers at once with made-up times: op number n takes n + 1 ms in eager, and other backends run one fused node."""

    def __init__(self, traced: Traced, machine: Machine) -> None:
        self.traced = traced
        self.calibration_s = {device.name: 1e-3 for device in machine.devices}
        self.backend = ""
        self.calls: list[tuple[str, str, Sequence[Any]]] = []
        """Device, method and arguments of each call but those of the calibration and of cuts."""
        self.without: set[str] = set()
        self.divided: dict[str, list[list[str]]] = {}
        self.faults: dict[tuple[str, str], str] = {}
        """Backend and device to the fault there."""
        self.uncut: set[str] = set()
        self.waited = 0.0
        self.slow: list[float] = []
        """Seconds of the first round, and of those after it, where they are not the usual ones."""
        self.slow_again: list[float] = []

    def prepare(self, files: ModelFiles, backend: str) -> BackendFiles:
        if backend in self.without:
            raise BackendError(f"op 'linear': no {backend} for it")
        graph = files.traced.graph
        if backend not in self.divided:
            return BackendFiles([Subgraph(graph, files.folder)], cut=(Path("before"), Path("behind"), Path("both")))
        parts = [replace(graph, ops=tuple(op for op in graph.ops if op.name in part)) for part in self.divided[backend]]
        taken = {op for part in self.divided[backend] for op in part}
        refused = {op.name: "no rule" for op in graph.ops if op.name not in taken}
        return BackendFiles([Subgraph(part, Path(part.ops[0].name)) for part in parts], refused)

    def divide(self, files: ModelFiles, backend: str, failure: BackendError) -> BackendFiles:
        raise failure

    def begin(self, function: Callable[..., Any], arguments: Mapping[str, Sequence[Any]]) -> list[tuple[str, str, Sequence[Any]]]:
        calls = [(device, function.__name__, given) for device, given in arguments.items()]
        self.calls += [call for call in calls if call[1] in ("prepare", "time")]
        return calls

    def results(self, calls: Sequence[tuple[str, str, Sequence[Any]]]) -> dict[str, Any]:
        self.num_busy = len(calls)
        preparing = {device: given[1] for device, name, given in calls if name == "prepare"}
        if faults := {device: self.faults[one, device] for device, one in preparing.items() if (one, device) in self.faults}:
            raise DeviceFaults(faults, lost="died" in str(faults))
        return {device: self.answer(device, name, *given) for device, name, given in calls}

    def call(self, function: Callable[..., Any], arguments: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        return self.results(self.begin(function, arguments))

    def prepares(self) -> list[Sequence[Any]]:
        return [given for _, name, given in self.calls if name == "prepare"]

    def times(self) -> list[Sequence[Any]]:
        return [(*given, False, False)[:3] for _, name, given in self.calls if name == "time"]

    def kinds(self) -> list[str]:
        return [name if name == "prepare" else "ops" if True in given[1:2] else "whole" for _, name, given in self.calls]

    def answer(self, device: str, name: str, *given: Any) -> object:
        ops = [op.name for op in self.traced.graph.ops]
        match name, given:
            case "calibrate", _:
                return self.calibration_s[device]
            case "time_cut", _:
                return None if device in self.uncut else 3e-9 * typical_cut(self.traced.graph).num_bytes
            case "prepare", (_, backend, _, _, eager, _):
                self.backend = backend
                return Prepared(dict.fromkeys(ops, 1.0) if eager else {}, 0.00123)
            case "time", (_, True, _):
                pass
            case "time", _ if self.num_busy > 1 or len(CORES) == 1:
                whole_s = self.slow_again.pop() if self.slow_again else 1.0 if self.backend == "eager" else 0.25
                return Timed((whole_s, whole_s), ())
            case "time", _:
                return Timed((0.97, 0.97), ())
        if self.backend == "eager":
            nodes = tuple(RuntimeNode(op, "op", ((n + 1) * 1e-3,) * 3) for n, op in enumerate(ops))
            return Timed((self.slow.pop() if self.slow else 1.0,) * 3, nodes, self.waited)
        return Timed((0.25, 0.25), (RuntimeNode("subgraph", "Fused", (0.2, 0.2)),), self.waited)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch, traced: Traced, machine: Machine) -> FakeWorkers:
    """In place of worker processes; the calibration kernel takes 1 ms, as it did when the fake measured."""
    fake = FakeWorkers(traced, machine)
    monkeypatch.setattr(profiler, "prepare_to_spawn", lambda: None)
    monkeypatch.setattr(profiler, "Workers", lambda devices, fds, packages: contextlib.nullcontext(fake))
    monkeypatch.setattr(ModelFiles, "prepare", lambda files, backend: fake.prepare(files, backend))
    monkeypatch.setattr(ModelFiles, "divide", lambda files, backend, failure: fake.divide(files, backend, failure))
    return fake


def assert_complete(profile: Profile, graph: Graph) -> None:
    """Every op has a time in every setting, or its backend refuses it."""
    for setting, measured in profile.measured.items():
        assert {*profile.table(graph, setting), *measured.refused} == {op.name for op in graph.ops}


def fake_measure(traced: Traced, machine: Machine, backends: tuple[str, ...] = ("eager",), **options) -> Profile:
    return measure(traced, machine, backends, links=False, **options)


def test_a_step_that_takes_longer_than_usual_tells_its_seconds() -> None:
    """A U-Net with inductor showed nothing for 40 s."""
    told: list[tuple[float, str]] = []
    steps = _Steps(lambda share, text: told.append((share, text)), [("preparing inductor", 6.0), ("timing", 2.0)])
    steps.next()
    steps.watch(3.0)
    steps.watch(40.0)
    steps.watch(1.0)  # of another call
    steps.next()
    assert told == [
        (0.0, "preparing inductor"),
        (0.375, "preparing inductor"),
        (0.75, "preparing inductor, 40 s so far"),
        (0.75, "preparing inductor"),
        (0.75, "timing"),
    ]


def test_occurrences_of_a_signature_pool_their_samples_and_sum_to_the_whole(traced, machine, pool) -> None:
    profile = fake_measure(traced, machine)
    setting = Setting(machine.devices[0].name, "eager", 1)
    linear = next(op for op in traced.graph.ops if op.name == "linear_1")
    same = [op for op in traced.graph.ops if op.signature == linear.signature]
    assert len(profile.op_samples(linear, setting).samples_s) == 3 * len(same)
    assert sum(profile.table(traced.graph, setting).values()) == pytest.approx(1.0)
    assert profile.measured[setting].source == "in-graph" and profile.whole_s(*setting, busy=False) == (
        1.0 if len(CORES) == 1 else 0.97
    )
    assert_complete(profile, traced.graph)


def test_a_backend_that_says_too_little_shares_its_time_as_eager_took_it(traced, machine, pool) -> None:
    profile = fake_measure(traced, machine, ("eager", "onnxruntime"))
    device = machine.devices[0].name
    first, last = traced.graph.ops[0].name, traced.graph.ops[-1].name
    ratio = profile.op_s(last, device, "eager") / profile.op_s(first, device, "eager")
    assert profile.op_s(last, device, "onnxruntime") / profile.op_s(first, device, "onnxruntime") == pytest.approx(ratio)
    assert profile.measured[Setting(device, "onnxruntime", 1)].source == "proportional"
    assert [eager for *_, eager, _ in pool.prepares()] == [False] * 6 * len(CORES)


def test_without_eager_the_worker_times_its_ops_in_the_first_round(traced, machine, pool) -> None:
    profile = fake_measure(traced, machine, ("onnxruntime",))
    eager = [eager for *_, eager, _ in pool.prepares()]
    assert eager == [True] * len(CORES) + [False] * len(CORES)
    for setting in profile.measured:
        assert len(set(profile.table(traced.graph, setting).values())) == 1


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.parametrize("calibration_s,num_alone", [(1.1e-3, 1), (1.2e-3, 2)])
def test_devices_are_timed_at_once_and_then_one_of_each_kind_alone(traced, machine, pool, calibration_s, num_alone) -> None:
    first, second = (Setting(device.name, "eager", 1) for device in machine.devices)
    pool.calibration_s[second.device] = calibration_s
    profile = fake_measure(traced, machine)
    kinds = ["prepare"] * 4 + ["ops"] * 2 + ["whole"] * num_alone + ["prepare"] * 2 + ["whole"] * (2 + num_alone)
    assert pool.kinds() == kinds
    assert profile.measured[first].alone and bool(profile.measured[second].alone) == (num_alone == 2)
    assert profile.whole_s(*first, busy=False) == profile.whole_s(*second, busy=False) == 0.97


@pytest.mark.parametrize(
    ("first_s", "samples_s"), [(1.1, (1.1,) * 3 + (1.0,) * 2), (1.9, (1.0,) * 2), (0.7, (0.7,) * 3)], ids=["near", "slow", "fast"]
)
def test_of_two_rounds_that_are_far_apart_the_faster_one_counts(traced, machine, pool, tmp_path, first_s, samples_s) -> None:
    pool.slow = [first_s] * len(CORES)
    profile = fake_measure(traced, machine, store=tmp_path)
    for device in machine.devices:
        measured = profile.measured[Setting(device.name, "eager", 1)]
        assert sorted(measured.whole.samples_s) == sorted(samples_s)
        assert measured.alone is None or measured.alone.median_s == min(0.97, samples_s[0])
    pool.calls.clear()
    assert fake_measure(traced, machine, store=tmp_path).measured == profile.measured and not pool.calls


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.parametrize("third_s", [1.0, 1.9], ids=["a slow moment met both rounds", "the devices share their memory"])
def test_devices_that_took_longer_together_than_alone_have_a_third_round(traced, machine, pool, third_s) -> None:
    pool.slow, pool.slow_again = [1.9] * 2, [third_s, third_s, 1.9, 1.9]
    profile = fake_measure(traced, machine)
    assert [profile.whole_s(device.name, "eager") for device in machine.devices] == [third_s] * 2
    assert sum(wake and not ops for _, ops, wake in pool.times()) == 2 * 2


@pytest.mark.parametrize(("limit_bytes", "order"), [(10**12, "abababab"), (10_000, "aabb")])
def test_models_take_turns_in_rounds_unless_memory_holds_one_at_a_time(
    traced, machine, pool, monkeypatch, limit_bytes, order
) -> None:
    monkeypatch.setattr(rounds, "memory_limit_bytes", lambda: limit_bytes)
    both = {"a": traced, "b": trace(load_model(MODEL, batch=traced.source.batch + 1))}
    found = measure_together(list(both.values()), machine, links=False)
    for one, profile in zip(both.values(), found, strict=True):
        assert_complete(profile, one.graph)
    pairs = pairwise((given[0], name) for device, name, given in pool.calls if device == machine.devices[0].name)
    prepared = [folder for (folder, before), (_, name) in pairs if (before, name) == ("prepare", "time")]
    names = dict(zip(dict.fromkeys(prepared), both, strict=True))
    assert "".join(names[folder] for folder in prepared) == order


def test_what_there_is_no_room_to_keep_is_loaded_again(traced, machine, pool, monkeypatch) -> None:
    monkeypatch.setattr(rounds, "memory_limit_bytes", lambda: 10_000)  # of a control group: the machine has more
    fake_measure(traced, machine, ("eager", "onnxruntime"))
    assert [(backend, keep) for _, backend, *_, keep in pool.prepares()] == [
        (backend, False) for backend in ("eager", "eager", "onnxruntime", "eager", "onnxruntime") for _ in CORES
    ]
    assert not any(wake and not ops for _, ops, wake in pool.times())


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_more_devices_than_are_timed_at_once_are_timed_in_groups(traced, machine, pool, monkeypatch) -> None:
    monkeypatch.setattr(settings, "MAX_AT_ONCE", 1)
    profile = fake_measure(traced, machine, ("eager", "onnxruntime"))
    assert len(profile.measured) == 2 * len(CORES) and not profile.notes
    assert pool.kinds() == ["prepare"] * 2 + ["prepare", "ops"] * 4 + ["prepare", "whole"] * 4


def test_a_second_run_measures_nothing_and_another_model_or_count_does(traced, machine, pool, tmp_path) -> None:
    first = fake_measure(traced, machine, store=tmp_path)
    pool.calls.clear()
    again = fake_measure(traced, machine, store=tmp_path)
    assert not pool.calls and again == first and not again.notes
    fake_measure(traced, machine, store=Store(tmp_path), remeasure=True)
    assert pool.calls


def test_a_drifted_calibration_measures_again_and_says_which_and_why(traced, machine, pool, tmp_path, monkeypatch) -> None:
    first = fake_measure(traced, machine, store=tmp_path)
    drifted, held = next(setting for setting in first.measured if setting.device == f"cpu:{CORES[0]}"), Footprint(1, 2, 3)
    first = first.with_measured(drifted, replace(first.measured[drifted], footprints={"stage": held}))
    Store(tmp_path).save(traced.graph, first)
    monkeypatch.setattr(cache_lookup, "kernel_now_s", lambda cores, then_s: then_s * (0.7 if cores == (CORES[0],) else 1.05))
    pool.calls.clear()
    profile = fake_measure(traced, machine, store=tmp_path)
    assert pool.calls
    [note] = profile.notes
    assert note.startswith(
        f"eager on cpu:{CORES[0]} with 1 thread: stored, but the calibration kernel takes 30% less time than then"
    )
    assert profile.measured[drifted].footprints == {"stage": held}, "memory does not depend on the speed"
    assert Store(tmp_path).load(traced.graph).measured[drifted].footprints == {"stage": held}


def test_other_versions_measure_again_and_say_so(traced, machine, pool, tmp_path, monkeypatch) -> None:
    fake_measure(traced, machine, store=tmp_path)
    monkeypatch.setattr(settings.discovering, "versions", lambda backends: {"torch": "99"})
    notes = fake_measure(traced, machine, store=tmp_path).notes
    assert len(notes) == len(CORES) and all("here it is torch 99" in note for note in notes)


def test_a_truncated_file_is_measured_again_with_a_warning(traced, machine, pool, tmp_path) -> None:
    first = fake_measure(traced, machine, store=tmp_path)
    path = Store(tmp_path).folder(traced.graph) / f"cpu-{CORES[0]}.json"
    path.write_text(path.read_text()[:200])
    again = fake_measure(traced, machine, store=tmp_path)
    assert set(again.measured) == set(first.measured)
    assert any("truncated" in note and "is measured again" in note for note in again.notes)


def test_a_store_on_a_full_disk_costs_one_note_and_no_measurement(traced, machine, pool, tmp_path, monkeypatch) -> None:
    def full(path: Path, *_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(store, "write_atomic", full)
    profile = fake_measure(traced, machine, store=tmp_path)
    assert {setting.device for setting in profile.measured} == {device.name for device in machine.devices}
    [note] = profile.notes
    assert "could not keep what was measured: " in note and "No space left on device; make room" in note


def test_a_backend_that_refuses_is_left_out_unless_it_is_the_only_one(traced, machine, pool) -> None:
    pool.without = {"onnxruntime"}
    profile = fake_measure(traced, machine, ("eager", "onnxruntime"))
    assert {setting.backend for setting in profile.measured} == {"eager"}
    assert profile.notes == ("onnxruntime is left out: op 'linear': no onnxruntime for it",)
    with pytest.raises(BackendError, match="no onnxruntime for it"):
        fake_measure(traced, machine, ("onnxruntime",))


def test_where_a_cut_could_not_be_timed_a_note_names_the_backend_and_the_device(traced, machine, pool) -> None:
    first = machine.devices[0].name
    pool.uncut = {first}
    profile = fake_measure(traced, machine, ("eager", "onnxruntime"))
    [note] = profile.notes
    assert note.startswith(f"onnxruntime on {first}: the cost of a cut could not be timed")
    costs = {device.name: profile.measured[Setting(device.name, "onnxruntime", 1)].cut_s_per_byte for device in machine.devices}
    assert costs == {device.name: None if device.name == first else 3e-9 for device in machine.devices}


def test_a_backend_that_refuses_some_ops_is_measured_on_the_rest(traced, machine, pool, tmp_path) -> None:
    first, second, third, *rest = (op.name for op in traced.graph.ops)
    pool.divided = {"onnxruntime": [[first], [third, *rest]]}
    profile = fake_measure(traced, machine, ("eager", "onnxruntime"), store=tmp_path)
    [note] = profile.notes
    assert note == f"onnxruntime refuses op '{second}' (no rule); stages of another backend run what it refuses"
    for device in machine.devices:
        measured = profile.measured[Setting(device.name, "onnxruntime", 1)]
        assert set(measured.ops) == {first, third, *rest} and measured.whole.samples_s == (0.5, 0.5)
        assert measured.cut_s_per_byte is None and profile.measured[Setting(device.name, "eager", 1)].cut_s_per_byte == 3e-9
        assert profile.op_s(second, device.name, "onnxruntime") == profile.whole_s(device.name, "onnxruntime") == math.inf
        table = profile.table(traced.graph, Setting(device.name, "onnxruntime", 1))
        assert second not in table and sum(table.values()) == pytest.approx(0.5)
    assert_complete(profile, traced.graph)
    pool.calls.clear()
    again = fake_measure(traced, machine, ("eager", "onnxruntime"), store=tmp_path)
    assert again.measured == profile.measured and again.notes == profile.notes and not pool.calls
    with pytest.raises(BackendError, match=f"no backend is left on '{machine.devices[0].name}' for op '{second}'"):
        fake_measure(traced, machine, ("onnxruntime",))


def test_a_backend_with_wrong_numbers_is_left_out_by_name(traced, machine, pool) -> None:
    pool.faults = {("openvino", device.name): "backend 'openvino' gives wrong numbers" for device in machine.devices}
    profile = fake_measure(traced, machine, ("eager", "openvino"))
    assert {setting.backend for setting in profile.measured} == {"eager"}
    assert profile.notes == ("openvino is left out: backend 'openvino' gives wrong numbers",)
    assert {measured.error for measured in profile.measured.values()} == {0.00123}
    way_out = f"No other backend is asked for on '{machine.devices[0].name}'; add eager to the backends"
    with pytest.raises(BackendError, match=f"'openvino' gives wrong numbers. {way_out}"):
        fake_measure(traced, machine, ("openvino",))


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.parametrize("fault", ["its worker died", "the kernel is not supported"])
def test_a_backend_that_fails_on_one_device_is_left_out_there(traced, machine, pool, tmp_path, monkeypatch, fault) -> None:
    first, second = (device.name for device in machine.devices)
    pool.faults = {("openvino", second): fault}
    profile = fake_measure(traced, machine, ("eager", "openvino"), store=tmp_path)
    assert set(profile.measured) == {Setting(first, "eager", 1), Setting(second, "eager", 1), Setting(first, "openvino", 1)}
    assert profile.notes == (f"openvino is left out on {second}: {fault}",)
    assert Store(tmp_path).load(traced.graph).measured == profile.measured
    pool.faults[("eager", second)] = fault
    with pytest.raises(BackendError, match=fault):
        fake_measure(traced, machine, ("eager", "openvino"), remeasure=True)
    monkeypatch.setattr("autosplit.measuring.measurement.is_accelerator", lambda device: device.name == second)
    profile = fake_measure(traced, machine, ("eager", "openvino"), remeasure=True)
    assert {setting.device for setting in profile.measured} == {first}
    [*_, note] = profile.notes
    assert note == f"{second} is left out: no backend is left there" and profile.left_out(machine) == {second: note}
    pool.faults |= {(backend, first): fault for backend in ("eager", "openvino")}
    with pytest.raises(BackendError, match=fault):
        fake_measure(traced, machine, ("eager", "openvino"), remeasure=True)


def test_each_precision_has_a_profile_of_its_own(traced, machine, pool, tmp_path) -> None:
    fake_measure(traced, machine, ("eager", "onnxruntime"), store=tmp_path)
    pool.calls.clear()
    coarse = fake_measure(traced, machine, ("eager", "onnxruntime"), store=tmp_path, precision="bf16")
    assert [precision for _, _, _, precision, *_ in pool.prepares()] == ["bf16"] * 3 * len(CORES)
    assert coarse.precision == "bf16" and {setting.backend for setting in coarse.measured} == {"eager"}
    [note] = coarse.notes
    assert note.startswith("onnxruntime is left out: backend 'onnxruntime' does not compute in bf16")
    pool.calls.clear()
    assert fake_measure(traced, machine, store=tmp_path, precision="bf16").measured == coarse.measured
    assert fake_measure(traced, machine, ("eager", "onnxruntime"), store=tmp_path).precision == "f32" and not pool.calls
    with pytest.raises(BackendError, match="does not compute in bf16"):
        fake_measure(traced, machine, ("onnxruntime",), precision="bf16")


def test_a_worker_names_the_backend_whose_numbers_are_wrong(traced, tmp_path, monkeypatch) -> None:
    class Zeros(EagerBackend):
        name, exact = "zeros", False

        def load(self, folder, threads, precision="f32", shared=True, trust=False):
            run = super().load(folder, threads, precision, shared, trust)
            return lambda inputs: [value * 0 for value in run(inputs)]

    [program] = split(traced, [[op.name for op in traced.graph.ops]])
    save_stage(program, tmp_path)
    torch.save(list(traced.example_inputs), tmp_path / INPUTS)
    get_backend("eager").prepare(program, tmp_path, "bf16")

    def prepared(precision="f32") -> Prepared | str:
        worker = MeasuringWorker()
        worker.open("cpu:0", CORES[:1], {})
        try:
            return worker.prepare(tmp_path, "eager", 1, precision)
        except BackendError as failure:
            return str(failure)

    with torch.inference_mode():
        assert prepared() == Prepared({}, 0.0)
        assert 0 < prepared("bf16").error < 0.02
        monkeypatch.setattr(measuring_worker, "get_backend", lambda name: Zeros())
        monkeypatch.setattr(stage_timer, "get_backend", lambda name: Zeros())
        for precision in ("f32", "bf16"):
            assert "backend 'zeros'" in prepared(precision)

        def broken(self, folder, threads, precision="f32", shared=True, trust=False):
            raise BackendError("the session does not take the file")

        monkeypatch.setattr(Zeros, "load", broken)
        assert prepared() == "the session does not take the file"
        monkeypatch.setattr(Zeros, "load", lambda *_, **__: 1 / 0)
        assert prepared() == "backend 'eager' failed: division by zero"


def test_disturbed_measurements_carry_a_note(traced, machine, pool) -> None:
    pool.waited = 0.4
    profile = fake_measure(traced, machine)
    words = "other processes had the core for up to 40% of the time; measure again (--remeasure) when it is quiet"
    assert profile.notes == (f"eager on {', '.join(device.name for device in machine.devices)}: {words}",)
    assert all("40%" in measured.provenance.note for measured in profile.measured.values())


def test_progress_ends_at_one_and_never_falls(traced, machine, pool) -> None:
    seen: dict[str, float] = {}
    fake_measure(traced, machine, ("eager", "onnxruntime"), progress=lambda step, share, text: seen.setdefault(text, share))
    assert [*seen.values()] == sorted(seen.values()) and seen["starting the workers"] == 0 and seen["done"] == 1
    assert {"timing eager", "preparing onnxruntime"} <= set(seen)


def test_nothing_is_timed_before_the_work_of_the_caller_has_ended(traced, machine, pool) -> None:
    seen: list[str] = []

    def meanwhile() -> None:
        time.sleep(0.05)
        seen.append("the caller's work")

    fake_measure(traced, machine, progress=lambda step, share, text: seen.append(text), meanwhile=meanwhile)
    assert 0 < seen.index("the caller's work") < seen.index("timing eager")


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_thread_counts_are_measured_one_after_the_other(traced, pool) -> None:
    wide = Machine.of([parse_device(f"cpu:{CORES[0]}-{CORES[-1]}")])
    pool.calibration_s = {wide.devices[0].name: 1e-3}
    profile = fake_measure(traced, wide)
    assert [setting.threads for setting in profile.measured] == [len(CORES), 1]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"machine": "cpu:0"}, "machine must be a Machine, but is 'cpu:0'"),
        ({"precision": "fp8"}, "precision must be one of f32, tf32, bf16, f16, but is 'fp8'"),
        ({"backends": "eager"}, "backends must be a list"),
    ],
)
def test_misused_arguments_are_refused_in_a_sentence(traced, machine, wrong, said) -> None:
    with pytest.raises(UsageError, match=said):
        measure(traced, **{"machine": machine, **wrong})


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
    model = trace(load_model(Zeroless().eval(), inputs=(torch.ones(4),)))
    [whole] = split(model, [[op.name for op in model.graph.ops]])
    save_stage(whole, tmp_path / "stage")
    folders = (tmp_path / "stage",) * 3
    assert MeasuringWorker().time_cut(folders, "eager", 1, "f32", PassBudget(0.0)) is None


def test_a_stage_is_timed_only_after_it_was_prepared() -> None:
    with pytest.raises(RuntimeError, match="before it prepared"):
        MeasuringWorker().time(PassBudget(0.1))


@pytest.fixture
def compilers_end(monkeypatch) -> None:
    """Workspaces end the processes that compile, which other tests keep."""
    monkeypatch.setattr(apart, "num_keeping", 0)


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("compilers_end")
def test_real_workers_measure_and_leave_nothing_behind(traced, machine, tmp_path) -> None:
    profile = measure(traced, machine, ("eager", "onnxruntime"), store=tmp_path, budget_s=0.3, links=False)
    assert set(profile.measured) == {Setting(d.name, b, 1) for b in ("eager", "onnxruntime") for d in machine.devices}
    for setting, measured in profile.measured.items():
        assert sum(profile.table(traced.graph, setting).values()) == pytest.approx(measured.whole.median_s)
        assert measured.provenance.calibration_s > 0 and measured.provenance.versions["torch"] == torch.__version__
        assert (measured.cut_s_per_byte is None) == (setting.backend == "eager")
    assert {m.source for s, m in profile.measured.items() if s.backend == "onnxruntime"} == {"profiler"}
    assert Store(tmp_path).load(traced.graph).measured == profile.measured
    assert not list(children())


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("compilers_end")
def test_what_fails_in_a_worker_comes_with_its_traceback(traced, machine, tmp_path) -> None:
    broken = replace(traced, example_inputs=(torch.zeros(3, 5),))
    with pytest.raises(WorkerError, match=r"(?s)failed during prepare on 'cpu.*Traceback.*shapes cannot be multiplied"):
        measure(broken, Machine.of(machine.devices[:1]), store=tmp_path, links=False)
    assert not list(children()) and not list(tmp_path.glob("*/cpu*.json"))


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("compilers_end")
def test_ctrl_c_keeps_what_was_measured_and_stops_the_workers(traced, machine, tmp_path, monkeypatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    seen: list[list[int]] = []

    def interrupt(step: str, share: float, text: str) -> None:
        if text == "timing onnxruntime":
            seen.append(children(os.getpid()))
            raise KeyboardInterrupt

    both, store = ("eager", "onnxruntime"), tmp_path / "store"
    with pytest.raises(KeyboardInterrupt):
        measure(traced, machine, both, store=store, budget_s=0.3, progress=interrupt, links=False)
    assert seen[0] and not children()
    stored = Store(store).load(traced.graph)
    assert {setting.backend for setting in stored.measured} == {"eager"} and not stored.notes
    assert not list((tmp_path / "tmp").iterdir())


def there(connection: Connection) -> None:
    """Measure in another process: tell each step, and at last what was measured."""
    cache_lookup.kernel_now_s = lambda cores, then_s: then_s  # a neighbour on the core is no other machine
    machine, store = connection.recv()
    traced = trace(load_model(MODEL))
    connection.send("traced")
    connection.recv()
    found = measure(
        traced, machine, store=store, budget_s=0.3, progress=lambda step, share, text: connection.send(text), links=False
    )
    connection.send(found.measured)


def test_of_two_processes_at_once_one_measures_and_the_other_waits(traced, machine, tmp_path) -> None:
    """That two processes have the same graph is in ``tests/tracing/test_fresh_process.py``."""
    one, told, other = Machine.of(machine.devices[:1]), list[str](), spawn_worker(f"{__name__}:there", name="other")
    heard = partial(receive, other, 60.0, "while it measured")

    def tell(step: str, share: float, text: str) -> None:
        if text == "timing eager" and not told:
            other.connection.send("go")
            told.extend(iter(heard, WAITING))

    other.connection.send((one, tmp_path))
    assert heard() == "traced"
    here = measure(traced, one, store=tmp_path, budget_s=0.3, progress=tell, links=False)
    assert told == ["looking up what was measured before"] and heard() == "done"
    assert heard() == here.measured
    other.close()
    assert not list(tmp_path.glob("*/*.broken*"))


def children(pid: int | None = None) -> list[int]:
    """The living workers of a process: the forks of the child that imports for them all."""
    deadline = time.monotonic() + 30
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


def killed(_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleeping(_: object) -> None:
    time.sleep(60)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("work", "limit_s", "said"), [(killed, 60.0, "was killed by SIGKILL"), (sleeping, 0.5, "gave no answer within 0.5 s")]
)
def test_a_worker_that_died_or_hangs_is_named_and_replaced(machine, monkeypatch, work, limit_s, said) -> None:
    name = machine.devices[0].name
    with Workers(machine.devices[:1]) as workers:
        assert workers.call(MeasuringWorker.calibrate, {name: ()})[name] > 0
        monkeypatch.setattr(measuring_worker, "LIMIT_S", limit_s)
        with pytest.raises(DeviceFaults, match=f"worker 'measuring {name}' {said} during {work.__name__}") as caught:
            workers.call(work, {name: ()})
        assert caught.value.lost and [*caught.value.by_device] == [name]
        monkeypatch.undo()
        assert workers.call(MeasuringWorker.calibrate, {name: ()})[name] > 0


def test_another_measurement_takes_nine_passes_on_all_devices_at_once(traced) -> None:
    ops = [op.name for op in traced.graph.ops]
    profile = Profile.given(traced.graph, {(op, device): 0.5 for op in ops for device in ("cpu:0", "cpu:1")})
    assert shortest_measurement_s(profile) == pytest.approx(9 * 0.5 * len(ops))


def test_a_committed_profile_is_found_for_the_model_as_it_is_traced_today() -> None:
    traced = trace(load_model("autosplit.examples.mlp:mlp_512"))
    stored = Store(Path(__file__).parents[2] / "profiles").load(traced.graph)
    assert {setting.backend for setting in stored.measured} >= {"eager", "onnxruntime"}
    assert_complete(stored, traced.graph)
