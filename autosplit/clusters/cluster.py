"""Cluster: several hosts that profile a model and run its plans as one machine."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from autosplit.arguments import checked
from autosplit.clusters import hostprofile
from autosplit.clusters.fleet import Fleet
from autosplit.clusters.hoststransport import HostsPipeline
from autosplit.measuring.store import Store
from autosplit.running.engine import Engine
from autosplit.tracing.capturing import Traced
from autosplit.values.profile import Profile
from autosplit.values.samples import Precision


@checked
class Cluster(Fleet):
    """The hosts of a Ray cluster, given to calls as ``Setup(hosts=cluster)``; best used in a ``with`` block. ::

    with autosplit.Cluster("local:2") as cluster:
        result = autosplit.auto(module, inputs=(x,), setup=autosplit.Setup(hosts=cluster))
        with result.open() as model:
            y = model(x)
    """

    def measure(
        self, traced: Traced, backends: Sequence[str], precision: Precision, store: Path | None = None, remeasure: bool = False
    ) -> Profile:
        """Profile a model on all hosts and keep the measurements in the folder ``store``: see ``hostprofile.measure``."""
        return hostprofile.measure(traced, self, backends, precision, None if store is None else Store(store), remeasure)

    def engine_factory(self) -> Callable[..., Engine]:
        """A function that makes pipelines on these hosts, in place of ``Pipeline``."""
        return functools.partial(HostsPipeline, self)
