"""Timing by events on a simulated accelerator with a clock of its own: no time of this machine is in these numbers."""

from dataclasses import replace

import pytest
import torch
from simulated import Simulated

from autosplit.devices.accelerators import Facts
from autosplit.errors import BackendError
from autosplit.measuring import measuring_worker as worker
from autosplit.measuring import settings
from autosplit.measuring.accelerator_timer import AcceleratorTimer, EventOpTimer, event_op_timer
from autosplit.measuring.cache_lookup import look_up
from autosplit.measuring.link_ends import OnAccelerator
from autosplit.measuring.settings import wanted_settings
from autosplit.measuring.stage_timer import INPUTS, LoadedStage, PassBudget
from autosplit.measuring.store import Store
from autosplit.tracing.capturing import Traced, trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import save_stage, split
from autosplit.values.machine import Machine, parse_device
from autosplit.values.profile import Profile
from autosplit.values.samples import Measured, Samples, Setting

STEP_S = 0.5


class Clock:
    """Half a second later each time that somebody looks."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return self.looks * STEP_S


@pytest.fixture(scope="module")
def traced() -> Traced:
    return trace(load_model("autosplit.examples.mlp:mlp?depth=2&width=8"))


@pytest.fixture(scope="module")
def program(traced):
    return split(traced, [[op.name for op in traced.graph.ops]])[0]


@pytest.fixture
def device() -> Simulated:
    device = Simulated()
    device.clock = Clock()
    return device


def on_device(traced: Traced, device: Simulated) -> list[torch.Tensor]:
    """The inputs of a model in the memory of the device."""
    return [value.to(device.device) for value in traced.example_inputs]


def test_every_op_is_between_two_events_and_a_pass_is_waited_for_once(program, traced, device) -> None:
    probe = event_op_timer(program, device, device.queue(), "f32")
    for _ in range(3):
        probe.sample(on_device(traced, device))
    assert {node.name: node.samples_s for node in probe.nodes()} == dict.fromkeys(program.ops, (STEP_S,) * 3)
    assert device.calls["record"] == 3 * 2 * len(program.ops)
    assert device.calls["synchronise"] == device.calls["enqueue"] == 3


def test_casts_of_bf16_count_for_their_op(program, traced, device) -> None:
    probe = event_op_timer(program, device, device.queue(), "bf16")
    probe.sample(on_device(traced, device))
    seconds = {node.name: node.samples_s[0] for node in probe.nodes()}
    assert set(seconds) == set(program.ops) and sum(seconds.values()) > STEP_S * len(seconds)


def test_picks_are_no_ops(device) -> None:
    class Halves(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one, other = x.chunk(2)
            return one + other

    traced = trace(load_model(Halves().eval(), inputs=(torch.randn(4, 4),)))
    [whole] = split(traced, [[op.name for op in traced.graph.ops]])
    probe = EventOpTimer(whole.module, device, device.queue())
    probe.sample(traced.example_inputs)
    assert [node.name for node in probe.nodes()] == list(whole.ops)


def test_the_whole_is_timed_as_it_runs_without_the_copies(program, traced, device, tmp_path) -> None:
    save_stage(program, tmp_path / "stage")
    timer = AcceleratorTimer(LoadedStage(program, tmp_path / "stage", traced.example_inputs), "eager", device)
    assert torch.equal(timer.run(traced.example_inputs)[0], program.module(*traced.example_inputs)[0])
    budget = PassBudget(0.0, least=3, overlap_s=0.0)
    device.calls.clear()
    assert timer.time(budget).whole_s == (STEP_S,) * 3
    assert (device.calls["enqueue"], device.calls["event.synchronise"]) == (3, 3)
    timed = timer.time(budget, ops=True)
    assert timed.whole_s == (STEP_S,) * 3 and timed.waited == 0.0
    assert {node.name: node.samples_s for node in timed.nodes} == dict.fromkeys(program.ops, (STEP_S,) * 3)
    assert timer.eager_op_s() == dict.fromkeys(program.ops, STEP_S)


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB"),
            "weights twice: CUDA out of memory. Tried to allocate 2 GiB",
        ),
        (RuntimeError("no kernel image\nis available"), "backend 'eager' failed: no kernel image"),
    ],
)
def test_what_a_device_fails_at_is_a_fault_of_the_backend(failure, said, program, traced, device, tmp_path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise failure

    save_stage(program, tmp_path / "stage")
    torch.save(list(traced.example_inputs), tmp_path / "stage" / INPUTS)
    monkeypatch.setattr(worker, "open_accelerator", lambda name: device)
    monkeypatch.setattr(worker, "AcceleratorTimer", fail)
    measuring = worker.MeasuringWorker()
    measuring.open("cuda:0", (), {})
    with pytest.raises(BackendError, match=said):
        measuring.prepare(tmp_path / "stage", "eager", 1)


def test_data_goes_to_the_device_and_back_through_staging_memory() -> None:
    place = OnAccelerator(Simulated())
    view, back = torch.arange(1024.0), torch.zeros(1024)
    assert place.take(4096, view) > 0
    place.put(4096, back)
    assert torch.equal(back, view)


def test_what_a_device_does_not_run_is_left_out_with_the_reason(monkeypatch) -> None:
    machine = Machine.of([parse_device("cpu:0"), parse_device("cuda:0")])
    monkeypatch.setattr(settings.discovering, "check_here", lambda machine: None)
    found, [note] = wanted_settings(machine, ["eager", "openvino"], "f32")
    assert found == [Setting("cpu:0", "eager", 1), Setting("cuda:0", "eager", 1), Setting("cpu:0", "openvino", 1)]
    assert note.startswith("backend 'openvino' does not run on 'cuda:0': OpenVINO has no plug-in for it")
    with pytest.raises(BackendError, match="no backend is left for 'cuda:0'"):
        wanted_settings(machine, ["openvino"], "f32")


@pytest.mark.parametrize("driver,now_s,note", [("1", 1.1, ""), ("2", 1.0, "measured on GPU"), ("1", 2.0, "takes 100% more")])
def test_what_was_measured_on_another_gpu_is_measured_again(traced, tmp_path, monkeypatch, driver, now_s, note) -> None:
    machine = Machine.of([parse_device("cuda:0")])
    then, now = (Facts("GPU", 2, 1, "9.0", version, "CUDA", seconds) for version, seconds in (("1", 1.0), (driver, now_s)))
    setting = Setting("cuda:0", "eager", 1)
    facts = {"cuda:0": now}
    monkeypatch.setattr(settings.discovering, "facts_of", lambda names: facts)
    stamps = settings.stamps_of(machine, [setting], "f32")
    stamp = replace(stamps[setting], calibration_s=then.calibration_s, accelerator=then.identity, date="2026-01-01")
    ops = {op.signature: Samples((1e-3,)) for op in traced.graph.ops}
    profile = replace(Profile.empty(traced.graph), measured={setting: Measured(ops, provenance=stamp)})
    store = Store(tmp_path)
    store.save(traced.graph, profile)
    known = look_up(traced, machine, store, stamps)
    assert (setting in known.measured) == (not note) and all(note in line for line in known.notes)
