import inspect
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from simulated import Simulated, Unrecordable

from autosplit.devices import accelerators, cuda, discovering
from autosplit.devices.accelerators import PROVIDERS, Facts, calibration_s, is_accelerator, open_accelerator, provider
from autosplit.devices.cuda import Cuda, driver_version
from autosplit.values.machine import parse_device


def test_devices_are_served_by_the_provider_of_their_kind() -> None:
    assert provider("cuda") is Cuda
    with patch.dict(PROVIDERS, cuda="simulated:Unrecordable"):
        assert isinstance(open_accelerator("cuda:1"), Unrecordable)
        assert open_accelerator("cuda:1").index == 1
    assert PROVIDERS == {"cuda": "autosplit.devices.cuda:Cuda"}
    assert open_accelerator("cpu:0") is None and not is_accelerator(parse_device("null:0"))


def test_what_a_measurement_depends_on_is_not_the_memory_that_is_free() -> None:
    one, other = (Facts("GPU", 10, free, "9.0", "570.1", "CUDA 12.8", free * 1e-3) for free in (3, 4))
    assert one.identity == other.identity != Facts("GPU", 10, 3, "9.0", "570.2", "CUDA 12.8").identity


def test_the_calibration_kernel_repeats_until_three_agree() -> None:
    device = Simulated()
    ticks = iter([0, 9, 10, 15, 20, 22, 30, 33, 40, 42.01, 50, 52.02])
    device.clock = lambda: float(next(ticks))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerators, "CALIBRATION_SIZE", 8)
        assert calibration_s(device) == pytest.approx(2.01)
    assert device.calls["event.synchronise"] == 6


class Listener:
    """Stands for torch.cuda: notes every call, and returns itself."""

    def __init__(self, calls: list[str], name: str = "") -> None:
        self.calls, self.name = calls, name

    def __getattr__(self, name: str) -> "Listener":
        return Listener(self.calls, name)

    def __call__(self, *args: object, **kwargs: object) -> "Listener":
        self.calls.append(self.name)
        return self

    def __enter__(self) -> None:
        self.calls.append("enter")

    def __exit__(self, *failure: object) -> None:
        self.calls.append("exit")


def test_a_graph_is_warmed_up_on_the_stream_that_records_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's notes on CUDA graphs demand: the streams wait for each other before and after, all work is on one of them."""
    calls: list[str] = []
    monkeypatch.setattr(torch, "cuda", Listener(calls))
    device = object.__new__(Cuda)
    device._device, device._pool = torch.device("cuda", 0), None
    device.capture(Listener(calls), lambda: calls.append("work"))
    warm_up = "current_stream wait_stream stream enter work work work exit current_stream wait_stream"
    assert " ".join(calls) == f"{warm_up} CUDAGraph graph enter work exit pool"


CALLS = {
    torch.cuda.Event: ["enable_timing"],
    torch.cuda.Event.record: ["stream"],
    torch.cuda.Event.elapsed_time: ["end_event"],
    torch.cuda.Event.synchronize: [],
    torch.cuda.Stream: ["device"],
    torch.cuda.Stream.wait_event: ["event"],
    torch.cuda.Stream.wait_stream: ["stream"],
    torch.cuda.stream: ["stream"],
    torch.cuda.current_stream: ["device"],
    torch.cuda.CUDAGraph: [],
    torch.cuda.CUDAGraph.replay: [],
    torch.cuda.CUDAGraph.pool: [],
    torch.cuda.graph: ["cuda_graph", "pool", "stream"],
    torch.cuda.set_device: ["device"],
    torch.cuda.device_count: [],
    torch.cuda.get_device_properties: ["device"],
    torch.cuda.mem_get_info: ["device"],
    torch.cuda.max_memory_allocated: ["device"],
    torch.cuda.synchronize: ["device"],
}
"""What ``autosplit.devices.cuda`` calls, with the parameters that it gives."""


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__qualname__)
def test_torch_still_has_the_calls_that_cuda_makes(call: object) -> None:
    assert set(CALLS[call]) <= set(inspect.signature(call).parameters)


def test_float32_is_not_computed_in_tf32_and_other_flags_of_cudnn_can_be_asked_for() -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "set_device", lambda device: None)
            Cuda(0)
        for backend in (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn):
            assert backend.fp32_precision in ("ieee", "none")
        with torch.backends.cudnn.flags(enabled=True):
            assert not torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_what_hides_a_card_is_told_and_a_new_numbering_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver without a device, a torch without CUDA, and CUDA_VISIBLE_DEVICES, as the driver's library reports them."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda, "driver_version", lambda: "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # not the reason
    assert (
        accelerators.absence("cuda:0")
        == "device 'cuda:0' is not here: this machine has 0 CUDA devices (no NVIDIA driver is loaded)"
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(cuda, "driver_version", lambda: "580.1")
    assert accelerators.absence("cuda:0").endswith(f"0 CUDA devices (driver 580.1, torch {torch.__version__})")
    assert all(device.kind == "cpu" for device in discovering.discover().devices)
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(discovering, "_facts_of", lambda names, remarks: asked.append(remarks) or {})
    for numbers in ("0,1", "1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", numbers)
        monkeypatch.setattr(torch.cuda, "device_count", lambda numbers=numbers: len(numbers.split(",")))
        discovering.facts_of(("cuda:0",))
    assert len(set(asked)) == 2
    told = "1 CUDA device (CUDA_VISIBLE_DEVICES='1', and the numbers of the devices that it names begin at 0)"
    assert accelerators.absence("cuda:1").endswith(told) and not accelerators.absence("cuda:0")


def test_an_instance_of_a_divided_card_is_another_device_with_the_memory_of_its_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    def card(name: str, total_bytes: int) -> Facts:
        properties = SimpleNamespace(name=name, major=9, minor=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total_bytes - 5, total_bytes))
        device = object.__new__(Cuda)
        device._device = torch.device("cuda", 0)
        return device.facts()

    whole, part = card("NVIDIA H100 80GB HBM3", 80 << 30), card("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10 << 30)
    assert (part.free_bytes, part.total_bytes) == ((10 << 30) - 5, 10 << 30)
    assert whole.identity != part.identity  # a measurement of the one is none of the other


def test_the_drivers_version_is_read_where_a_driver_is(tmp_path) -> None:
    path = tmp_path / "version"
    assert driver_version(path) == ""
    path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Tue Jan 28 00:00:00 UTC 2025\nGCC version: 12\n")
    assert driver_version(path) == "570.86.15"
