"""A workspace: stages saved once and prepared for their backends, and the outputs of the unsplit model."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from torch.fx import GraphModule

from autosplit.backends.apart import end_idle
from autosplit.backends.base import Precision, get_backend, require_device
from autosplit.devices.accelerators import is_accelerator
from autosplit.errors import BackendError
from autosplit.files import content_hash
from autosplit.scratch import scratch_folder
from autosplit.tracing.capturing import Traced
from autosplit.tracing.programs import weight, weight_names
from autosplit.tracing.reference import Reference
from autosplit.tracing.splitting import StageProgram, save_stage
from autosplit.values.machine import Device


class Workspace:
    """A temporary folder of saved stages, and the outputs that plans are checked against. Gone when it is closed.

    Plans that share a stage share its files. Plans of one traced model share the outputs of the unsplit model.
    """

    def __init__(self) -> None:
        self._temporary = ExitStack()
        self.folder = self._temporary.enter_context(scratch_folder())
        self._saved: dict[str, tuple[Path, StageProgram]] = {}
        """The program keeps its weights in memory, so that no other weight gets the address of one."""
        self._prepared: set[tuple[str, str, str]] = set()
        self._references: list[tuple[Reference, list[tuple[int, int]]]] = []

    def save(self, program: StageProgram, there: Path | None = None) -> Path:
        """The folder of a stage, saved if it was not; ``there``: where it is saved already, to be left there."""
        specs = [repr(spec) for spec in (*program.inputs, *program.outputs)]
        key = content_hash([specs, program.module.code, _state(program.module)])
        if key not in self._saved:
            self._saved[key] = there or self.folder / key, program
            if there is None:
                save_stage(program, self._saved[key][0])
        return self._saved[key][0]

    def add(self, program: StageProgram, backend: str, precision: Precision, devices: Sequence[Device] = ()) -> Path:
        """The folder of a stage, saved and, if it runs on a CPU, prepared if it was not.

        Raises: BackendError: the backend refuses the stage, by op and with the reason.
        """
        folder = self.save(program)
        for device in devices:
            require_device(get_backend(backend), device.name)
        if (folder.name, backend, precision) not in self._prepared and not (devices and all(map(is_accelerator, devices))):
            try:
                get_backend(backend).prepare(program, folder, precision)
            except BackendError as failure:
                raise BackendError(str(failure), failure.refused, backend) from failure
            self._prepared.add((folder.name, backend, precision))
        return folder

    def reference(self, traced: Traced, threads: Mapping[str, int]) -> Reference:
        """The outputs of the unsplit model, for which it runs once with these threads: see ``Reference.of``."""
        state = _state(traced.program)
        for known, then in self._references:
            if known.traced is traced and known.threads == threads and then == state:
                return known
        self._references.append((Reference.of(traced, threads), state))
        return self._references[-1][0]

    def close(self) -> None:
        """Remove every file, and end the processes that compiled stages."""
        end_idle()
        self._temporary.close()

    def __enter__(self) -> "Workspace":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _state(program: GraphModule) -> list[tuple[int, int]]:
    """The address of each weight, and how often it was changed in place; two models of one shape differ in nothing else."""
    weights = [weight(program, name) for name in weight_names(program.graph)]
    return [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in weights]
