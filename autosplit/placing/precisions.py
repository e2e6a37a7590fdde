"""The error of a placed graph against f32: of each part that computes in a lower precision, and of the whole."""

from dataclasses import dataclass

import torch
from torch import fx

from autosplit.errors import BackendError
from autosplit.placing.placed import Placed
from autosplit.tables import number_text
from autosplit.tracing.differing import compare
from autosplit.tracing.programs import Observer

WHOLE = "the whole model"


@dataclass(frozen=True, slots=True)
class PartError:
    """The largest error of a part, or of the whole model, relative to the largest value of the output."""

    part: str
    site: str
    num_ops: int
    relative: float


def errors_of(placed: Placed) -> list[PartError]:
    """The error of each part in a lower precision on exact inputs, and then that of the whole model, on the example inputs."""
    exact: dict[str, torch.Tensor] = {}

    def see(node: fx.Node, value: object) -> None:
        if isinstance(value, torch.Tensor):
            exact[node.name] = value

    traced, found = placed.traced, []
    with torch.inference_mode():
        expected = Observer(traced.program, see).run(*traced.example_inputs)
    runner = placed.runner
    for part in runner.parts:
        if part.part.site.precision != "f32":
            with torch.inference_mode():
                made = part.call([exact[name].to(part.device) for name in part.inputs])
            error = compare(part.outputs, [tensor.cpu() for tensor in made], [exact[name] for name in part.outputs])
            found.append(PartError(part.part.name, str(part.part.site), len(part.part.ops), error.relative))
    whole = compare(traced.graph.outputs, runner(traced.example_inputs), expected)
    return [*found, PartError(WHOLE, "", len(traced.graph.ops), whole.relative)]


def require_error(placed: Placed, max_error: float) -> Placed:
    """Return the placed graph. Raises: BackendError: its error against f32 is above ``max_error``; the parts are named."""
    errors = errors_of(placed)
    if errors[-1].relative <= max_error:
        return placed
    parts = ", ".join(f"{one.part} ({one.num_ops} ops on {one.site}) {number_text(one.relative)}" for one in errors[:-1])
    raise BackendError(
        f"the placed graph is off by {number_text(errors[-1].relative)} of the largest value against f32, and at most "
        f"{number_text(max_error)} is allowed; by itself each part is off by: {parts or 'no part has a lower precision'}. "
        "Give the part with the largest error f32, or allow more."
    )
