"""``open_pipeline``: a plan as a running service, for requests of one size or of any size within ranges."""

from contextlib import ExitStack

from autosplit.arguments import checked
from autosplit.backends.workspace import Workspace
from autosplit.deploying.networks import deploy, machine_of_plan
from autosplit.deploying.replanning import devices_left
from autosplit.deploying.service import Service
from autosplit.deploying.setup import Hosts
from autosplit.devices.discovering import Devices
from autosplit.errors import UsageError
from autosplit.running.engine import Engine
from autosplit.running.pipeline import Pipeline
from autosplit.serving.hostmanager import HostManager
from autosplit.shapes.service import ShapedService
from autosplit.tracing.capturing import Traced
from autosplit.tracing.family import Family
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile


@checked
def open_pipeline(
    traced: Traced | Family,
    plan: Plan,
    devices: Devices | None = None,
    *,
    hosts: Hosts | None = None,
    profile: Profile | None = None,
    max_wait_s: float = 0.0,
) -> Service:
    """The plan as a running service; its workers live until ``close`` or the end of the ``with`` block.

    Args:
        traced: the model, traced for the plan's microbatch, or at the sizes of a plan for several. ``rows_family(traced)`` takes
            requests of fewer rows than the plan, and joins them.
        plan: the plan.
        devices: the devices, or their names, as a list or with commas between; by default those that the plan names.
        hosts: the hosts of the plan, if it is on a ``Cluster``.
        profile: lets the plan go on after a device or a host of a cluster was lost: it is planned anew for the other ``devices``.
        max_wait_s: seconds for which a request for a model of several sizes may wait for others, to be computed together.
    Raises: UsageError: the plan is for several sizes, and the model is traced for one; or it is of a generator. PlanError,
        BackendError, WorkerError: as ``deploy``. DeviceError, UsageError: as ``machine_for``.
    """
    if plan.sequences is not None:
        raise UsageError("the plan is of a generator, which keeps sequences; open it with autosplit.open_generator(family, plan)")
    if not isinstance(traced, Family):
        if plan.shapes is not None:
            raise UsageError("the plan is for requests of several sizes, and the model is traced for one; trace it with sizes=")
        return Service(traced, *open_engine(traced, plan, devices, hosts, profile))
    family = traced if plan.shapes is None else traced.only(plan.shapes.variants)
    engine, opened = open_engine(family, plan, devices, hosts, profile)
    try:
        return ShapedService(family, engine, max_wait_s=max_wait_s, opened=opened)
    except BaseException:
        opened.close()
        raise


def open_engine(
    model: Traced | Family,
    plan: Plan,
    devices: Devices | None,
    hosts: Hosts | None = None,
    profile: Profile | None = None,
    shared: Workspace | None = None,
) -> tuple[Engine, ExitStack]:
    """The plan as a running network of flat tensors, and the stack that closes it; see ``open_pipeline``.

    ``shared``: where stages are saved and prepared, to be closed by the caller.
    """
    machine = hosts.machine if hosts is not None else machine_of_plan(plan, devices)
    with ExitStack() as opened:
        workspace = shared or opened.enter_context(Workspace())
        replan = None
        if profile is not None:
            replan = opened.enter_context(devices_left(model, plan, profile, machine, hosts))
        host = opened.enter_context(HostManager(engine_factory=Pipeline if hosts is None else hosts.engine_factory()))
        engine = deploy(host, model.graph.name, model, plan, machine, workspace, replan)
        if shared is None:
            workspace.keep_files_only()
        return engine, opened.pop_all()
