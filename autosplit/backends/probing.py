"""Find the ops of a stage that a converter refuses, by converting the distinct ops without the others, in halves."""

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autosplit.compat.torchparts import OpOverload
from autosplit.tracing.splitting import StageProgram
from autosplit.tracing.tensorspec import zeros

Convert = Callable[[torch.nn.Module, Sequence[torch.Tensor]], object]
"""Converts a module with its example inputs, or raises."""


def refused_ops(program: StageProgram, convert: Convert) -> dict[str, str]:
    """Op name to the reason for each op that ``convert`` refuses when it stands alone.

    A pass on zeros gives the arguments of each op. Ops with the same operator and dtypes are tried once. Halving costs about
    log2(ops) conversions for each refused op.
    Raises: OSError: the disk is full, or no more files may be open, which says nothing about ops.
    """
    probe = _Recorder(program.module)
    with torch.no_grad():
        probe.run(*map(zeros, program.inputs))
    reasons = _refused(list(probe.calls.values()), convert)
    return {name: reasons[kind] for name, kind in probe.kinds.items() if kind in reasons}


def raise_shortage(failure: BaseException | None) -> None:
    """Raise the OSError among the causes of ``failure`` that tells of a full disk or of too many open files, if there is one."""
    while failure is not None:
        if isinstance(failure, OSError) and failure.errno in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE):
            raise OSError(failure.errno, failure.strerror) from failure
        failure = failure.__cause__ or failure.__context__


def one_line(failure: BaseException) -> str:
    """The innermost cause of a failure in one line; exporters wrap it several times.

    >>> one_line(ValueError("no kernel\\nhere is what to do"))
    'no kernel'
    """
    while failure.__cause__ is not None:
        failure = failure.__cause__
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(failure).__name__


@dataclass(frozen=True, slots=True)
class _Call:
    """One op with the values of its arguments."""

    kind: str
    node: fx.Node
    arguments: tuple[tuple[fx.Node, Any], ...]


class _Recorder(fx.Interpreter):
    """Runs the stage and keeps the first call of each kind, which is an operator with the dtypes of its arguments."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.calls: dict[str, _Call] = {}
        self.kinds: dict[str, str] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, and keep its call if it is an op."""
        if n.op == "call_function" and isinstance(n.target, OpOverload):
            arguments = tuple((source, self.env[source]) for source in n.all_input_nodes)
            kind = f"{n.target} {[str(value.dtype) for _, value in arguments]}"
            self.kinds[n.name] = kind
            self.calls.setdefault(kind, _Call(kind, n, arguments))
        return super().run_node(n)


def _refused(calls: Sequence[_Call], convert: Convert) -> dict[str, str]:
    """Kind to reason for the ``calls`` that cannot be converted."""
    if not calls:
        return {}
    graph, root = fx.Graph(), torch.nn.Module()
    made = [_copy_alone(graph, root, call, position) for position, call in enumerate(calls)]
    graph.output(tuple(made))
    examples = [value.contiguous() for call in calls for node, value in call.arguments if node.op != "get_attr"]
    try:
        convert(fx.GraphModule(root, graph), examples)
    except Exception as failure:
        raise_shortage(failure)
        if len(calls) == 1:
            return {calls[0].kind: f"{calls[0].node.target}: {one_line(failure)}"}
        middle = len(calls) // 2
        return _refused(calls[:middle], convert) | _refused(calls[middle:], convert)
    return {}


def _copy_alone(graph: fx.Graph, root: torch.nn.Module, call: _Call, position: int) -> fx.Node:
    """Copy the op to ``graph`` with placeholders for its arguments; weights stay, because some converters need their values."""
    copies = {}
    for number, (source, value) in enumerate(call.arguments):
        name = f"argument_{position}_{number}"
        if source.op == "get_attr":
            root.register_buffer(name, value)
            copies[source] = graph.get_attr(name)
        else:
            copies[source] = graph.placeholder(name)
    return graph.node_copy(call.node, lambda source: copies[source])
