"""What the workers of a pipeline are told."""

from dataclasses import replace

from pipelines import NULL, double, increment, local

from autosplit.running.provisioner import provision
from autosplit.running.stage import StagePlacement
from autosplit.running.wiring import wire


def on_core(core: int, stage: StagePlacement) -> StagePlacement:
    """The stage on a null device that is said to be one core."""
    return replace(stage, devices=(replace(NULL, cores=(core,)),))


def test_a_worker_hands_over_to_other_cores_before_it_wakes_one_on_its_own() -> None:
    stages = [
        on_core(0, local("a", increment, "x", "u")),
        on_core(0, local("near", double, "u", "v")),
        on_core(1, local("far", double, "u", "w")),
    ]
    deployment = provision(wire(stages, ["x"], ["u", "v", "w"]))
    try:
        names = {ring.handle.fds: deployment.wiring.channels[number] for number, [ring] in enumerate(deployment.rings)}
        targets = [names[port.rings[0].fds].target for port in deployment.worker_configs[0].sinks if port.rings[0]]
        assert [stages[target].name if target >= 0 else "host" for target in targets] == ["far", "host", "near"]
    finally:
        deployment.close()
