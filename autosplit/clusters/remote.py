"""HostsPipeline: an engine over several hosts, which continues without a lost host."""

from collections.abc import Sequence

from autosplit.clusters.fleet import Fleet
from autosplit.clusters.hostsdeployment import ENDING_S, Events, HostsDeployment, Lost
from autosplit.clusters.hoststransport import HostsTransport
from autosplit.deploying.replanning import Replanner
from autosplit.errors import AutosplitError, WorkerError
from autosplit.running.engine import Engine
from autosplit.running.stage import StagePlacement
from autosplit.running.wiring import Wiring, wire


class HostsPipeline(Engine):
    """A pipeline over the hosts of a cluster, with the calls of every Engine.

    Where a host is lost, its stages move to other hosts if ``replan`` finds room there, and requests without a result run again.
    Otherwise every request fails with a WorkerError that names the host.

    Args:
        cluster: the hosts.
        stages, inputs, outputs: as for Pipeline; each device is on a host.
        replan: finds stages for the hosts that are left; None gives up with the first host.
        queue_capacity: as for Pipeline.
    """

    def __init__(
        self,
        cluster: Fleet,
        stages: Sequence[StagePlacement],
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        replan: Replanner | None = None,
        queue_capacity: int | None = None,
    ) -> None:
        self._cluster, self._replan = cluster, replan
        super().__init__(self._over_hosts, wire(stages, inputs, outputs), queue_capacity)

    def close(self, *, drain: bool = True) -> None:
        """End as ``Engine.close``, on all hosts."""
        try:
            super().close(drain=drain)
        finally:
            if self._replan is not None:
                self._replan.close()

    def _over_hosts(self, wiring: Wiring) -> HostsTransport:
        events = Events()
        return HostsTransport(HostsDeployment(self._cluster, wiring, events), events, self._without)

    def _without(self, lost: Lost, deployment: HostsDeployment, events: Events) -> HostsDeployment:
        """A deployment on the hosts that are left. Raises: AutosplitError: there is none; the message names the lost host."""
        self._cluster.lose(lost.host, lost.reason)
        deployment.close(timeout_s=ENDING_S)
        what = f"host '{lost.host}' was lost: {lost.reason}"
        if self._replan is None:
            raise WorkerError(f"{what}. Its stages have no other host; open the pipeline again without it.")
        try:
            stages = self._replan(self._cluster.machine)
            wiring = wire(stages, deployment.wiring.inputs, deployment.wiring.outputs)
            found = HostsDeployment(self._cluster, wiring, events)
        except AutosplitError as failure:
            raise WorkerError(f"{what}, and the hosts that are left cannot take its stages: {failure}") from None
        self._note_replanned(what, stages)
        return found
