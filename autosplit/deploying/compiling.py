"""Compile a model for a backend that takes long, in a process apart, so that a time limit and Ctrl-C end it."""

import time
from collections.abc import Callable, Sequence

from autosplit.backends.apart import end_idle, limited
from autosplit.backends.base import get_backend
from autosplit.backends.workspace import Workspace
from autosplit.devices.accelerators import is_accelerator
from autosplit.errors import AutosplitError, BackendError, UsageError
from autosplit.progress import Progress, between, quiet
from autosplit.tracing.capturing import Traced
from autosplit.tracing.splitting import unsplit
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile
from autosplit.values.samples import Precision

LEAST_COMPILE_S, FIRST_S, OP_S = 10.0, 7.0, 0.045
"""Compiling is begun if it may last ``FIRST_S`` and ``OP_S`` for each op, and at least ``LEAST_COMPILE_S``.

Two cores of an AMD EPYC took 16, 32 and 56 s for 11, 286 and 819 ops with empty caches, and 8 s less with headers that were
compiled before.
"""

MOST_TIMES_EAGER = 2.5
"""TorchInductor calls eager's kernels for matrix products and convolutions. With a process a core, where another backend was
further ahead of eager, it stayed 10 to 66 % behind that one (MobileNetV2, ResNet-50, GPT-2), on BERT 5 %; where it was 2.1 to
2.4 times as fast, inductor was ahead of it on ConvNeXt and level on T5 (``benchmarks/models.json``)."""


def compile_baselines(
    backends: Sequence[str],
    subject: tuple[Traced, Profile | None],
    plan: Plan,
    machine: Machine,
    workspace: Workspace,
    limit_s: float,
    progress: Progress = quiet,
) -> tuple[list[str], dict[str, str]]:
    """Compile the unsplit model for backends that no search considers, because they compile for long.

    Args:
        subject: the model, traced for the plan's microbatch, and its profile, which says where another backend is too far ahead.
        plan: the plan beside which these baselines will run.
        workspace: where the model is saved and prepared.
        limit_s: seconds for each backend.
        progress: called with the share of the step ``run``.
    Returns: the backends that are ready; and the reasons why the others are not.
    Raises: UsageError: there is no such backend.
    """
    (traced, profile), ready, reasons = subject, [], {}
    for number, backend in enumerate(backends):
        part = between(progress, number / len(backends), (number + 1) / len(backends))

        def tell(share: float, part: Progress = part, name: str = backend) -> None:
            part("run", share, f"compiling the model for {name}")

        tell(0.0)
        try:
            get_backend(backend)
            if reason := _not_worth_it(len(traced.graph.ops), plan, machine, profile, limit_s):
                reasons[f"{backend} alone"] = reason
                continue
            if not all(is_accelerator(device) for device in machine.devices):
                compile_whole(traced, backend, plan.precision, workspace, limit_s, tell)
            ready.append(backend)
        except UsageError:
            raise
        except (AutosplitError, OSError) as failure:
            reasons[f"{backend} alone"] = str(failure)
    return ready, reasons


def _not_worth_it(num_ops: int, plan: Plan, machine: Machine, profile: Profile | None, limit_s: float) -> str:
    """Why the model is not compiled; '' if it is."""
    least_s = max(LEAST_COMPILE_S, FIRST_S + OP_S * num_ops)
    if limit_s < least_s:
        return f"compiling {num_ops} ops takes about {least_s:.0f} s, and {limit_s:.3g} s are allowed; give a larger budget"
    if profile is None or plan.objective != "throughput":
        return ""
    times = []
    for device in machine.devices:
        backends = {setting.backend for setting in profile.measured if setting.device == device.name}
        if "eager" in backends:
            whole_s = {backend: profile.whole_s(device.name, backend) for backend in backends}
            times.append(whole_s["eager"] / min(whole_s.values()))
    if min(times, default=0.0) > MOST_TIMES_EAGER:
        return f"another backend is {min(times):.1f} times as fast as eager, which compiling has not caught up with"
    return ""


def compile_whole(
    traced: Traced, backend: str, precision: Precision, workspace: Workspace, limit_s: float, tell: Callable[[float], None]
) -> None:
    """Prepare the unsplit model for a backend in the workspace, where plans of one stage find it.

    ``tell`` is called with the share of ``limit_s`` that has passed.

    Raises: BackendError: the backend refuses the model or takes longer, or its compiler died.
    """
    begun_s = time.monotonic()
    try:
        with limited(limit_s, lambda taken_s: tell(taken_s / limit_s)):
            workspace.add(unsplit(traced), backend, precision)
    except BackendError as failure:
        if time.monotonic() - begun_s < limit_s:
            raise
        raise BackendError(f"{failure}; allow more with a larger budget") from failure
    finally:
        end_idle()
