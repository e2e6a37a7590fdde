"""Find the ops of a stage that a converter refuses, by converting the distinct ops without the others, in halves."""

import errno
from collections.abc import Callable, Sequence

import torch
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from autosplit.backends.opcases import Case, case_of, probe_program
from autosplit.tracing.flattening import is_op
from autosplit.tracing.splitting import StageProgram
from autosplit.tracing.tensorspec import fake_mode, zeros

Convert = Callable[[torch.nn.Module, Sequence[torch.Tensor]], object]
"""Converts a module with its example inputs, or raises."""


def refused_ops(program: StageProgram, convert: Convert) -> dict[str, str]:
    """Op name to the reason for each op that ``convert`` refuses when it stands alone.

    Ops that are one case (see ``opcases``) are tried once. Halving costs about log2(cases) conversions for each refused case.
    Raises: OSError: the disk is full, or no more files may be open, which says nothing about ops.
    """
    with torch.no_grad():
        FakeTensorProp(program.module, fake_mode([])).propagate(*map(zeros, program.inputs))  # into ``meta["val"]``
    cases = {node.name: case for node in filter(is_op, program.module.graph.nodes) if (case := case_of(node)) is not None}
    reasons = _refused(list({case.key: case for case in cases.values()}.values()), convert)
    return {name: reasons[case.key] for name, case in cases.items() if case.key in reasons}


def raise_shortage(failure: BaseException | None) -> None:
    """Raise the OSError among the causes of ``failure`` that reports a full disk or too many open files, if there is one."""
    while failure is not None:
        if isinstance(failure, OSError) and failure.errno in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE):
            raise OSError(failure.errno, failure.strerror) from failure
        failure = failure.__cause__ or failure.__context__


def innermost(failure: BaseException) -> str:
    """The innermost cause of a failure in one line; exporters wrap it several times.

    >>> innermost(ValueError("no kernel\\nhere is what to do"))
    'no kernel'
    """
    while failure.__cause__ is not None:
        failure = failure.__cause__
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(failure).__name__


def _refused(cases: Sequence[Case], convert: Convert) -> dict[str, str]:
    """Key to reason for the ``cases`` that cannot be converted."""
    if not cases:
        return {}
    probe = probe_program(cases)
    try:
        convert(probe.module, list(map(zeros, probe.inputs)))
    except Exception as failure:
        raise_shortage(failure)
        if len(cases) == 1:
            return {cases[0].key: f"{cases[0].node.target}: {innermost(failure)}"}
        middle = len(cases) // 2
        return _refused(cases[:middle], convert) | _refused(cases[middle:], convert)
    return {}
