"""A workspace: stages saved once and prepared for their backends, and the outputs of the unsplit model."""

import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import fx

from autosplit.backends.apart import end_idle
from autosplit.backends.base import Precision, convert, get_backend, require_device
from autosplit.backends.checking import Reference, torch_threads
from autosplit.backends.onnxfile import fix_sizes
from autosplit.closing import Closing
from autosplit.compat.torchparts import num_writes
from autosplit.devices.accelerators import is_accelerator
from autosplit.errors import BackendError
from autosplit.files import content_hash
from autosplit.scratch import scratch_folder
from autosplit.tracing.capturing import Traced
from autosplit.tracing.programs import state_names, weight, weight_names
from autosplit.tracing.splitting import StageProgram, save_stage, unsplit
from autosplit.tracing.tensorspec import spec_of
from autosplit.tracing.verifying import distinct_inputs
from autosplit.values.machine import Device

NUM_DISTINCT = 4
"""Different inputs that are sent in turn, so that answers in a wrong order are noticed; a slow model gets two."""

SLOW_S = 0.1
"""A model whose pass takes longer than these seconds is slow, and gets as few requests as possible."""

Microbatch = tuple[torch.Tensor, ...]


def threaded_reference(traced: Traced, threads: Mapping[str, int]) -> Reference:
    """Run the unsplit model in eager on distinct inputs, each op with its stage's threads, whose number can change bits.

    Ops that ``threads`` does not name run with torch's number of threads.
    """
    eager = _Threaded(traced, threads)
    first, *others = distinct_inputs(traced.example_inputs, NUM_DISTINCT)
    work, expected = [first], list[Microbatch]()
    start = time.perf_counter()
    with torch.inference_mode(), torch_threads(torch.get_num_threads()):  # ``eager`` changes it
        expected.append(tuple(eager.run(*first)))
        for inputs in others[:1] if time.perf_counter() - start > SLOW_S else others:
            with suppress(Exception):  # it may take integers in one order only, such as offsets
                expected.append(tuple(eager.run(*inputs)))
                work.append(inputs)
    return Reference(unsplit(traced), work, expected)


class Workspace(Closing):
    """A temporary folder of saved stages, and the outputs that plans are checked against. Gone when it is closed.

    Plans that share a stage share its files. Plans of one traced model share the outputs of the unsplit model.
    """

    def __init__(self) -> None:
        self._temporary = ExitStack()
        self.folder = self._temporary.enter_context(scratch_folder())
        self._saved: dict[str, tuple[Path, StageProgram]] = {}
        """The program keeps its weights in memory, so that no other weight gets the address of one."""
        self._files: dict[str, Path] = {}
        """By its weights, a folder whose file has them."""
        self._prepared: set[tuple[str, str, str]] = set()
        self._refused: set[Path] = set()
        """Stages at every size of which no file can be made."""
        self.watch: Callable[[], None] = lambda: None
        """Called when ``add`` has saved and prepared a stage."""
        self._references: list[tuple[Traced, tuple[Mapping[str, int], list[tuple[int, int]]], Reference]] = []

    def save(self, program: StageProgram, there: Path | None = None, weights_of: Path | None = None) -> Path:
        """The folder of a stage, saved if it was not.

        Args:
            there: where it is saved already, to be left there.
            weights_of: a folder of this workspace, of a stage with the same weights or more, whose file it shares. Without one it
                shares that of any stage here with the same weights.
        """
        specs, state = [repr(spec) for spec in (*program.inputs, *program.outputs)], _state(program.module)
        key = content_hash([specs, program.module.code, state])
        if key not in self._saved:
            self._saved[key] = there or self.folder / key, program
            if there is None:
                weights = content_hash([repr(replace(spec_of(*one), offset_bytes=0)) for one in program.weights.items()] + state)
                folder = self._saved[key][0]
                save_stage(program, folder, weights_of or self._files.get(weights))
                self._files.setdefault(weights, folder)
        return self._saved[key][0]

    def add(
        self,
        program: StageProgram,
        backend: str,
        precision: Precision,
        devices: Sequence[Device] = (),
        weights_of: Path | None = None,
        free: Path | None = None,
    ) -> Path:
        """The folder of a stage, saved and, if it runs on a CPU, prepared if it was not; ``weights_of`` as for ``save``.

        ``free``, for a backend of ``samples.FROM_ONNX``, is the folder of the stage at every size: its export serves for all.
        Raises: BackendError: the backend refuses the stage, by op and with the reason.
        """
        folder = self.save(program, weights_of=weights_of)
        for device in devices:
            require_device(get_backend(backend), device.name)
        if (folder.name, backend, precision) not in self._prepared and not (devices and all(map(is_accelerator, devices))):
            if free is not None and free not in self._refused:
                try:
                    doing = f"while the sizes of stage '{program.name}' were fixed"
                    convert(fix_sizes, program, free, folder.absolute(), doing=doing, saved=folder.absolute())
                except BackendError:  # stages are exported at their sizes
                    self._refused.add(free)
            try:
                get_backend(backend).prepare(program, folder, precision, weights_of)
            except BackendError as failure:
                raise BackendError(str(failure), failure.refused, backend) from failure
            self._prepared.add((folder.name, backend, precision))
        self.watch()
        return folder

    def reference(self, traced: Traced, threads: Mapping[str, int]) -> Reference:
        """The outputs of the unsplit model, for which it runs once with these threads: see ``threaded_reference``."""
        way = threads, _state(traced.program)
        for known, then, reference in self._references:
            if known is traced and then == way:
                return reference
        self._references.append((traced, way, threaded_reference(traced, threads)))
        return self._references[-1][-1]

    def keep_files_only(self, folders: Collection[Path] | None = None) -> None:
        """Let go of the programs with their weights, of the model's outputs, and of the processes that compiled stages.

        Workers that start again load files: those of some stages, if their ``folders`` are given.
        """
        if folders is not None:
            for folder in {one for one, _ in self._saved.values() if one.parent == self.folder}.difference(folders):
                shutil.rmtree(folder, ignore_errors=True)
        self._saved.clear()
        self._files.clear()
        self._references.clear()
        end_idle()

    def close(self) -> None:
        """Remove every file, and end the processes that compiled stages."""
        end_idle()
        self._temporary.close()


def _state(program: fx.GraphModule) -> list[tuple[int, int]]:
    """The address of each weight, and how often it was changed in place; two models of one shape differ in nothing else.

    States change with each run, and are in no file.
    """
    states = state_names(program.graph)
    weights = [weight(program, name) for name in weight_names(program.graph) if name not in states]
    return [(tensor.data_ptr(), num_writes(tensor)) for tensor in weights]


class _Threaded(fx.Interpreter):
    """Runs the unsplit program op by op, with a number of threads for each."""

    def __init__(self, traced: Traced, threads: Mapping[str, int]) -> None:
        super().__init__(traced.program)
        self._threads = threads

    def run_node(self, n: fx.Node) -> object:
        wanted = self._threads.get(n.name)
        if wanted is not None and wanted != torch.get_num_threads():
            torch.set_num_threads(wanted)
        return super().run_node(n)
