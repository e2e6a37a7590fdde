"""A stage whose inputs and outputs lie in memory that stays."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, eq=False)
class StaticIO:
    """A Runnable over memory that stays. One who writes ``inputs`` and reads ``outputs`` itself calls ``compute`` alone.

    A call with tensors takes calls of torch for each of them, and new memory, while the processor's caches are full of weights.

    Attributes:
        inputs: memory with the strides of their specs, which ``compute`` only reads.
        outputs: memory that the next ``compute`` writes anew.
        compute: computes the outputs from the contents of the inputs.
        held: other memory that it reads by address.
    """

    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    compute: Callable[[], None]
    held: object = None

    def checked(self, check: Callable[[Sequence[torch.Tensor]], None]) -> "StaticIO":
        """The stage that checks its inputs first. Raises: as ``check``, when it computes."""

        def compute() -> None:
            check(self.inputs)
            self.compute()

        return replace(self, compute=compute)

    def __call__(self, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Compute from copies of the inputs, to copies of the outputs."""
        with torch.inference_mode():
            for own, value in zip(self.inputs, given, strict=True):
                own.copy_(value)
            self.compute()
            return [one.clone() for one in self.outputs]
