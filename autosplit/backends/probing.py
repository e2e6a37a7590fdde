"""Which ops of a stage a converter refuses: each distinct op is converted alone, on the values it meets in the stage."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autosplit.splitting import StageProgram

Convert = Callable[[torch.nn.Module, Sequence[torch.Tensor]], object]
"""Converts a module with its example inputs, or raises."""


def refused_ops(program: StageProgram, convert: Convert) -> dict[str, str]:
    """Op name to the reason for each op that ``convert`` refuses when it stands alone; runs the stage once on zeros."""
    probe = _Probe(program.module, convert)
    examples = [torch.zeros(spec.shape, dtype=spec.torch_dtype) for spec in program.inputs]
    with torch.no_grad():
        probe.run(*examples)
    return probe.refused


class _Probe(fx.Interpreter):
    """Runs the stage and converts the first op of each operator and argument types on the way."""

    def __init__(self, module: fx.GraphModule, convert: Convert) -> None:
        super().__init__(module)
        self.convert = convert
        self.reasons: dict[str, str | None] = {}
        self.refused: dict[str, str] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node; if it is an op, ask the converter about it."""
        if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload):
            sources = list(n.all_input_nodes)
            values = [self.env[source] for source in sources]
            kinds = [str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__ for value in values]
            key = f"{n.target} {kinds}"
            if key not in self.reasons:
                self.reasons[key] = self._reason(n, sources, values)
            reason = self.reasons[key]
            if reason is not None:
                self.refused[n.name] = reason
        return super().run_node(n)

    def _reason(self, node: fx.Node, sources: Sequence[fx.Node], values: Sequence[Any]) -> str | None:
        alone = fx.Graph()
        copies = {source: alone.placeholder(source.name) for source in sources}
        alone.output(alone.node_copy(node, lambda source: copies[source]))
        try:
            self.convert(fx.GraphModule(torch.nn.Module(), alone), [value.contiguous() for value in values])
        except Exception as failure:
            return f"{node.target}: {one_line(failure)}"
        return None


def one_line(failure: BaseException) -> str:
    """The innermost cause in one line: exporters wrap the reason several times.

    >>> one_line(ValueError("no kernel\\nhere is what to do"))
    'no kernel'
    """
    while failure.__cause__ is not None:
        failure = failure.__cause__
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(failure).__name__
