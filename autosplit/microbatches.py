"""Microbatches: the model traced and measured for parts of a request, called by a search that cuts requests."""

from collections.abc import Callable
from dataclasses import dataclass

from autosplit import measuring
from autosplit.deploying.microbatching import require_independent
from autosplit.deploying.setup import Budget, Setup
from autosplit.modeltrace import trace
from autosplit.tracing.capturing import Traced
from autosplit.values.machine import Machine
from autosplit.values.profile import Profile


def may_cut(traced: Traced, profile: Profile, budget: Budget) -> bool:
    """Whether a search may try microbatches: a spec names the model, and measuring it once more takes less than the budget."""
    source = traced.source
    return source.batch > 1 and bool(source.spec) and 0 < measuring.shortest_measurement_s(profile) < budget.search_s


@dataclass(frozen=True)
class Microbatches:
    """Traces and measures a model for fewer items; ``measure`` is ``api.measure``."""

    whole: Traced
    machine: Machine
    setup: Setup
    measure: Callable[..., Profile]

    def __call__(self, microbatch: int) -> tuple[Traced, Profile]:
        """The trace and the profile for ``microbatch`` items. Raises: as ``trace``, ``require_independent`` and ``measure``."""
        source = self.whole.source
        part = trace(source.spec, batch=microbatch, seq_len=source.seq_len, values=source.values, trust_backends=source.trusted)
        require_independent(self.whole, part)
        return part, self.measure(part, self.machine, setup=self.setup)
