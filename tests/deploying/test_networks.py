"""A plan of a model at several sizes: right answers at each size, one copy of the weights, swaps, and memory that is counted."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import autosplit
from autosplit.backends.base import installed
from autosplit.backends.workspace import Workspace
from autosplit.deploying.networks import deploy, place
from autosplit.devices.limits import affinity
from autosplit.devices.processes import memory_held
from autosplit.errors import PlanError, UsageError
from autosplit.generating.attention import KVCache
from autosplit.running.engine import Engine
from autosplit.serving.hostmanager import HostManager
from autosplit.tracing.capturing import Traced
from autosplit.tracing.family import as_family
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import UNKNOWN, Plan, Stage

pytestmark = pytest.mark.timeout(120)
ONE = Machine.of([parse_device(f"cpu:{affinity()[0]}")])
SIZES = (8, 4, 2, 1)
WIDTH = 1024
WEIGHTS_BYTES = 3 * 4 * WIDTH**2


class Deep(torch.nn.Module):
    """Layers of 4 MiB each, and a value that reads the size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Three layers, and the rows turned round."""
        result: torch.Tensor = self.third(torch.relu(self.second(torch.relu(self.first(x)))))
        return result.view(x.shape[0], -1).flip(0)


@pytest.fixture(scope="module")
def module() -> Deep:
    torch.manual_seed(0)
    return Deep().eval()


@pytest.fixture(scope="module")
def family(module: Deep) -> list[Traced]:
    return [autosplit.trace(module, torch.randn(size, WIDTH)) for size in SIZES]


def plan_of(traced: Traced, backend: str, num_stages: int = 1) -> Plan:
    """A plan with equal stages on one core."""
    ops = [op.name for op in traced.graph.ops]
    cuts = [round(len(ops) * number / num_stages) for number in range(num_stages + 1)]
    parts = [tuple(ops[begin:end]) for begin, end in pairwise(cuts)]
    stages = tuple(Stage(f"stage{n}", part, (ONE.devices[0].name,), backend) for n, part in enumerate(parts))
    return Plan(traced.source, traced.graph.hash, "", stages, UNKNOWN)


def held_bytes(engine: Engine) -> list[int]:
    """The private memory and mapped weights of each worker."""
    before = [ready.before_bytes for ready in engine._transport.deployment.ready]  # type: ignore[attr-defined]
    return [memory_held(pid, own).held_bytes for pid, own in zip(engine.pids, before, strict=True)]


def require_answers(engine: Engine, module: Deep, sizes: Sequence[int]) -> None:
    """Requests of these sizes, in flight together, give what the module gives."""
    inputs = [torch.randn(size, WIDTH) for size in sizes]
    for x, future in zip(inputs, [engine.submit([x]) for x in inputs], strict=True):
        assert torch.allclose(future.result(60)[0], module(x), atol=1e-4)


@pytest.mark.parametrize("backend", ["eager", "onnxruntime", "openvino"])
def test_answers_are_right_at_each_size_over_one_copy_of_the_weights(backend: str, module: Deep, family: list[Traced]) -> None:
    if backend not in installed():
        pytest.skip(f"{backend} is not installed")
    held = []
    for variants in ((), family[1:]):
        with Workspace() as workspace, HostManager() as host:
            engine = deploy(host, "deep", as_family(family[0], variants), plan_of(family[0], backend), ONE, workspace)
            require_answers(engine, module, [8] if not variants else [1, 8, 4, 4, 2, 1, 8])
            held += held_bytes(engine)
            counted = engine.wiring.stages[0].needs_bytes(ONE.devices[0].name)
    packed_anew = 3 * WEIGHTS_BYTES if backend == "openvino" else 0
    assert counted == WEIGHTS_BYTES + packed_anew
    assert held[1] - held[0] < packed_anew + WEIGHTS_BYTES


@pytest.mark.skipif("openvino" not in installed(), reason="openvino is not installed")
def test_products_beside_a_custom_operator_reserve_their_weights_once() -> None:
    """OpenVINO packs none of them, for no size."""

    class Attending(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.cache = torch.nn.Linear(64, 3 * 64), KVCache(2, 8, 1, 64)

        def forward(self, x: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            q, k, v = self.first(x).view(1, -1, 3, 64).transpose(1, 2).chunk(3, 1)
            return self.cache(q, k, v, slots, positions)

    module = Attending().eval()
    tokens = [(torch.randn(size, 64), torch.arange(size) % 2, torch.arange(size)) for size in (4, 2)]
    first, *others = (autosplit.trace(module, some) for some in tokens)
    with Workspace() as workspace:
        [stage] = place(as_family(first, others), plan_of(first, "openvino"), ONE, workspace)
        assert stage.needs_bytes(ONE.devices[0].name) == first.graph.weight_bytes


def test_new_weights_reach_every_size(module: Deep, family: list[Traced], tmp_path: Path) -> None:
    changed = Deep().eval()
    changed.load_state_dict({name: value + 0.01 for name, value in module.state_dict().items()})
    with Workspace() as workspace, HostManager() as host:
        stages = place(as_family(family[0], family[1:]), plan_of(family[0], "eager", 2), ONE, workspace)
        groups = {"all": [stage.name for stage in stages]}
        engine = host.add_network("deep", stages, family[0].graph.inputs, family[0].graph.outputs, groups=groups)
        require_answers(engine, module, [1, 8, 2])
        engine.swap("all", dict(changed.named_parameters()), tmp_path)
        require_answers(engine, changed, [1, 8, 2, 4])
        with pytest.raises(UsageError, match=r"'x' is float32\[3,1024\].*\n.*exactly the shapes of one of 4 variants"):
            engine.run([torch.randn(3, WIDTH)])


def test_weights_that_depend_on_the_size_are_refused() -> None:
    class Sized(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tensor([float(x.shape[0])])

    sizes = [autosplit.trace(Sized().eval(), torch.randn(size, 4)) for size in (4, 2)]
    with Workspace() as workspace, pytest.raises(PlanError, match="is another one at other sizes"):
        place(as_family(sizes[0], sizes[1:]), plan_of(sizes[0], "eager"), ONE, workspace)
