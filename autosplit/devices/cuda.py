"""CUDA devices: the calls of torch.cuda behind the interface in ``accelerators``, and nothing else.

Only workers open a device, since that takes hundreds of megabytes of its memory. Products and convolutions are computed in full
float32 unless the user's precision is TF32, which torch by default allows for convolutions.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from autosplit.devices.accelerators import Accelerator, Event, Facts, Work

DRIVER = Path("/proc/driver/nvidia/version")
VISIBLE = "CUDA_VISIBLE_DEVICES"
WARM_UP_PASSES = 3
MILLI = 1e-3


@dataclass(frozen=True, slots=True)
class CudaEvent:
    """A CUDA event with times."""

    event: torch.cuda.Event = field(default_factory=lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]

    def record(self, queue: torch.cuda.Stream) -> None:
        """Mark the end of the work in the stream now."""
        self.event.record(queue)

    def hold(self, queue: torch.cuda.Stream) -> None:
        """Let later work of ``queue`` wait for the event."""
        queue.wait_event(self.event)

    def synchronise(self) -> None:
        """Block until all work before the mark is done."""
        self.event.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        """Seconds between the marks, from milliseconds."""
        assert isinstance(earlier, CudaEvent)  # one provider's events are never mixed with another's
        return float(earlier.event.elapsed_time(self.event)) * MILLI


class Cuda(Accelerator):
    """One CUDA device, or one instance of a device that is divided (MIG), which CUDA shows as a device of its own."""

    ONNX_PROVIDER = "CUDAExecutionProvider"

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        torch.cuda.set_device(self._device)
        self._pool: Any = None
        self.allow_tf32(False)

    @staticmethod
    def count() -> int:
        """Number of devices that torch sees; the management library answers, so CUDA is not started."""
        return torch.cuda.device_count()

    @staticmethod
    def remark() -> str:
        """The reason why devices are hidden or renumbered: a torch without CUDA, no driver, or CUDA_VISIBLE_DEVICES."""
        if torch.version.cuda is None:
            return f"torch {torch.__version__} is built without CUDA"
        driver = driver_version()
        if not driver and not Cuda.count():
            return "no NVIDIA driver is loaded"
        if VISIBLE in os.environ:
            return f"{VISIBLE}={os.environ[VISIBLE]!r}, and the numbers of the devices that it names begin at 0"
        return f"driver {driver or 'not known'}, torch {torch.__version__}"

    @property
    def device(self) -> torch.device:
        """``cuda:N``."""
        return self._device

    def facts(self) -> Facts:
        """Name, memory, compute capability, and the versions of driver and CUDA."""
        properties = torch.cuda.get_device_properties(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        capability = f"{properties.major}.{properties.minor}"
        return Facts(properties.name, total, free, capability, driver_version(), f"CUDA {torch.version.cuda}")

    def queue(self) -> torch.cuda.Stream:
        """A stream."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def event(self) -> Event:
        """An event with times."""
        return CudaEvent()

    def enqueue(self, queue: torch.cuda.Stream, work: Work) -> None:
        """Call ``work`` with the stream as the current one."""
        with torch.cuda.stream(queue):
            work()

    def capture(self, queue: torch.cuda.Stream, work: Work) -> Work:
        """A CUDA graph of ``work``, recorded after passes in which libraries choose algorithms and allocate.

        All graphs of a device share one pool of memory, since they run one after the other in one stream.
        """
        queue.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(queue):
            for _ in range(WARM_UP_PASSES):
                work()
        torch.cuda.current_stream(self._device).wait_stream(queue)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=queue):
            work()
        self._pool = graph.pool()
        return graph.replay

    def staging(self, num_bytes: int) -> torch.Tensor:
        """Pinned host memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def allow_tf32(self, allow: bool) -> None:
        """Set torch's flags for products and convolutions, and the one of ONNX Runtime's sessions that are opened from now on."""
        # Set the old flags: torch's readers of cuDNN flags fail once the newer ones, by kind of op, differ from the old ones.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self._tf32 = allow

    def synchronise(self) -> None:
        """Wait for all streams of the device."""
        torch.cuda.synchronize(self._device)

    def onnx_options(self, queue: torch.cuda.Stream) -> Mapping[str, str]:
        """Device, our stream, and whether TF32 is allowed."""
        tf32 = str(int(self._tf32))
        return {"device_id": str(self._device.index), "user_compute_stream": str(queue.cuda_stream), "use_tf32": tf32}


def driver_version(path: Path = DRIVER) -> str:
    """The kernel driver's version, or '' where none is loaded."""
    try:
        words = path.read_text(encoding="utf-8").split("\n")[0].split()
    except OSError:
        return ""
    return next((word for word in words if word[0].isdigit() and "." in word), "")
