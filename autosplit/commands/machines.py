"""The machine that a command is given: devices of this machine, or the hosts of a cluster, open while the command needs them."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from autosplit.commands import options
from autosplit.commands.console import say
from autosplit.errors import UsageError
from autosplit.planning.estimating import require_costs
from autosplit.values.machine import Machine

if TYPE_CHECKING:
    from autosplit.deploying.setup import Hosts


def named_machine(given: options.Devices, devices: str | None = None, here: bool = True, timed: bool = True) -> Machine:
    """The devices that a command names on one machine; arguments as for ``opened_machine``.

    Raises: ProfileError: the times of a device that is not here are not known. Other errors as ``machine_for``.
    """
    from autosplit.devices.discovering import absent_devices, machine_for

    named = devices if given.devices is None and given.machine is None else given.devices
    machine = machine_for(named, given.machine, given.memory, here=here)
    if timed:
        require_costs(machine, absent_devices(machine), getattr(given, "profile_of", ""))
    return machine


@contextlib.contextmanager
def opened_machine(
    given: options.Devices, devices: str | None = None, here: bool = True, timed: bool = True
) -> "Iterator[tuple[Machine, Hosts | None]]":
    """Yield the devices that a command names, and the hosts that they are on, if it names a cluster.

    Args:
        devices: names of the devices to use if the options name none.
        here: as for ``machine_for``.
        timed: whether the times of a device that is not here must be known.
    Raises: UsageError: a cluster and a machine file. Other errors as ``named_machine`` and ``Cluster``.
    """
    if given.cluster is None:
        yield named_machine(given, devices, here, timed), None
        return
    from autosplit.clusters.cluster import Cluster
    from autosplit.devices.discovering import parse_memory

    if given.machine is not None:
        raise UsageError("devices are given twice, by --cluster and by a machine file; leave one of them out")
    say(f"cluster {given.cluster}: looking for its nodes")
    named = devices if given.devices is None else given.devices
    with Cluster(given.cluster) as cluster:
        machine = cluster.machine if named is None else cluster.machine.only(name.strip() for name in named.split(","))
        if given.memory is not None:
            machine = machine.with_memory(parse_memory(given.memory, machine))
        say(f"cluster {given.cluster}: {', '.join(cluster.hosts)}")
        yield machine, cluster
