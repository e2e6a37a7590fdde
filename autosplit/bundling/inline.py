"""Run the stages of a network in the caller's own process, one after the other, without rings and workers."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType

import torch

from autosplit.errors import StageError, UsageError, raise_faults
from autosplit.running.request import Tensors
from autosplit.running.wiring import StagePlacement, wire
from autosplit.tracing.tensorspec import differences, laid_out


class InlineEngine:
    """Stages as functions of the values that are there; takes requests as a Pipeline does."""

    def __init__(self, stages: Sequence[StagePlacement], inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self.wiring = wire(stages, inputs, outputs)
        self._runs = []
        for stage in stages:
            stage.module.import_packages()
            device = stage.devices[0]
            self._runs.append(stage.module.load(stage.threads or 1, device.name, shared=True))
        last = {spec.name: number for number, stage in enumerate(stages) for spec in stage.inputs}
        self._dropped = [
            [name for name, reader in last.items() if reader == number and name not in outputs] for number in range(len(stages))
        ]

    def run(self, inputs: Sequence[torch.Tensor]) -> Tensors:
        """One request, start to end."""
        names, specs = self.wiring.inputs, [self.wiring.input_specs[name] for name in self.wiring.inputs]
        raise_faults(UsageError, "the inputs do not fit the network", differences(specs, inputs))
        values = {name: laid_out(value, spec) for name, value, spec in zip(names, inputs, specs, strict=True)}
        with torch.inference_mode():
            for stage, run, dropped in zip(self.wiring.stages, self._runs, self._dropped, strict=True):
                given = [values[spec.name] for spec in stage.inputs]
                try:
                    made = run(given)
                except Exception as failure:
                    op = stage.module.failing_op(given)
                    where = f" while executing '{op}'" if op else ""
                    raise StageError(f"stage '{stage.name}' failed{where}: {type(failure).__name__}: {failure}") from failure
                values.update(zip((spec.name for spec in stage.outputs), made, strict=True))
                for name in dropped:
                    del values[name]
        return tuple(values[name] for name in self.wiring.outputs)

    def run_many(self, requests: Sequence[Sequence[torch.Tensor]]) -> list[Tensors]:
        """The answers to all requests, in their order."""
        return [self.run(inputs) for inputs in requests]

    def stream(self, requests: Iterable[Sequence[torch.Tensor]]) -> Iterator[Tensors]:
        """The answers to any number of requests, in their order."""
        return map(self.run, requests)

    def submit(self, inputs: Sequence[torch.Tensor]) -> "Future[Tensors]":
        """The answer as a future that is done."""
        answer: Future[Tensors] = Future()
        try:
            answer.set_result(self.run(inputs))
        except Exception as failure:
            answer.set_exception(failure)
        return answer

    def __enter__(self) -> "InlineEngine":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._runs.clear()
