"""Microbatches: the model traced and measured for parts of a request, for a search that cuts requests."""

from collections.abc import Callable

from autosplit import measuring
from autosplit.deploying.microbatching import require_independent
from autosplit.deploying.setup import Budget
from autosplit.modeltrace import trace
from autosplit.tracing.capturing import Traced
from autosplit.values.profile import Profile


def may_cut(traced: Traced, profile: Profile, budget: Budget) -> bool:
    """Whether a search may try microbatches: a spec names the model, and measuring it once more takes less than the budget."""
    source = traced.source
    return source.batch > 1 and bool(source.spec) and 0 < measuring.shortest_measurement_s(profile) < budget.search_s


def cut(whole: Traced, measure: Callable[[Traced], Profile], microbatch: int) -> tuple[Traced, Profile]:
    """The trace and the profile for ``microbatch`` items. Raises: as ``trace``, ``require_independent`` and ``measure``."""
    source = whole.source
    part = trace(source.spec, batch=microbatch, seq_len=source.seq_len, values=source.values, trust_backends=source.trusted)
    require_independent(whole, part)
    return part, measure(part)
