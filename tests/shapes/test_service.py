"""Requests of any size on a few variants: right answers in any order, joined while they wait, refused outside the ranges."""

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autosplit.backends.workspace import Workspace
from autosplit.deploying.networks import deploy
from autosplit.devices.limits import affinity
from autosplit.errors import DeadlineError, RefusedError, UsageError
from autosplit.running.engine import Engine
from autosplit.serving.hostmanager import HostManager
from autosplit.shapes import service as services
from autosplit.shapes.batching import Bucket
from autosplit.shapes.service import ShapedService, measured
from autosplit.tracing.family import Family, trace_family
from autosplit.tracing.loading import Model, load_model
from autosplit.tracing.padding import with_checked_padding
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import UNKNOWN, Plan, Stage

pytestmark = pytest.mark.timeout(120)
ONE = Machine.of([parse_device(f"cpu:{affinity()[0]}")])
BOTH = {0: "batch", 1: "seq"}


class Reader(torch.nn.Module):
    """Each token sees the mean of all tokens that are not masked."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = torch.nn.Embedding(100, 8), torch.nn.Linear(8, 8)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Values of each token, and their mean."""
        words = self.words(input_ids)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        shares = mask.unsqueeze(-1) / mask.sum(1, keepdim=True).clamp(min=1).unsqueeze(-1)
        mean = (words * shares).sum(1)
        return {"tokens": torch.tanh(self.layer(words)) + mean.unsqueeze(1), "mean": mean}


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return load_model(Reader().eval(), inputs=call(2, 16, 0, True))


@pytest.fixture(scope="module")
def family(model: Model) -> Family:
    whole = trace_family(model, {"input_ids": BOTH, "attention_mask": BOTH}, {"batch": range(1, 5), "seq": range(1, 33)})
    return whole.only([{"batch": batch, "seq": seq} for batch in (4, 1) for seq in (32, 8)])


@contextlib.contextmanager
def deployed(family: Family) -> Iterator[Engine]:
    """The family as one stage in this process."""
    traced = family.variants[0]
    stages = (Stage("all", tuple(op.name for op in traced.graph.ops), (ONE.devices[0].name,)),)
    plan = Plan(traced.source, traced.graph.hash, "", stages, UNKNOWN, process="caller")
    with Workspace() as workspace, HostManager() as host:
        yield deploy(host, "bert", family, plan, ONE, workspace)


@pytest.fixture(scope="module")
def engine(family: Family) -> Iterator[Engine]:
    with deployed(family) as found:
        yield found


@pytest.fixture(scope="module")
def service(family: Family, engine: Engine) -> Iterator[ShapedService]:
    with ShapedService(family, engine) as found:
        yield found


def call(batch: int, seq: int, seed: int, masked: bool) -> dict[str, torch.Tensor]:
    """A request with a mask of its own, or without one."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 99, (batch, seq), generator=draw)
    mask = (torch.rand(ids.shape, generator=draw) > 0.3).long().index_fill(1, torch.tensor([0]), 1)
    return {"input_ids": ids, **({"attention_mask": mask} if masked else {})}


def require_right(model: Model, inputs: dict[str, torch.Tensor], answer: Any) -> None:
    """The answer is what the module gives for the unpadded request."""
    with torch.inference_mode():
        own = model.module(**inputs)
    for name in ("tokens", "mean"):
        assert answer[name].shape == own[name].shape
        assert torch.allclose(answer[name], own[name], atol=1e-5)


requests = st.lists(
    st.builds(call, st.integers(1, 4), st.integers(1, 32), st.integers(0, 999), st.booleans()), min_size=1, max_size=12
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests)
def test_answers_equal_the_modules_whatever_the_sizes_and_the_order(
    model: Model, service: ShapedService, asked: list[dict[str, torch.Tensor]]
) -> None:
    futures = [service.submit(**inputs, priority=number % 3) for number, inputs in enumerate(asked)]
    for inputs, future in zip(asked, futures, strict=True):
        require_right(model, inputs, future.result(30))


class Held:
    """Batches that an engine computes once they are let go."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.free, self.shapes = engine, threading.Event(), list[tuple[int, ...]]()

    def submit_unbounded(self, inputs: Any, **settings: Any) -> "Future[Any]":
        """Note the shape of a batch, and compute it later."""
        self.shapes.append(tuple(inputs[0].shape))
        future: Future[Any] = Future()

        def answer() -> None:
            self.free.wait(30)
            future.set_result(self.engine.run(inputs))

        threading.Thread(target=answer).start()
        return future


@pytest.fixture
def priced(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows take as long as two alone, whatever would be measured on a busy machine."""
    costs = {(4, 32): 4.0, (4, 8): 1.0, (1, 32): 2.0, (1, 8): 0.5}
    buckets = [Bucket(number, sizes, costs[sizes["batch"], sizes["seq"]]) for number, sizes in enumerate(family.sizes)]
    monkeypatch.setattr("autosplit.shapes.service.measured", lambda family, engine: buckets)


@pytest.fixture
def held(family: Family, engine: Engine, priced: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ShapedService, Held]]:
    """A service whose stages are held up by two long requests."""
    slow = Held(engine)
    with ShapedService(family, engine, queue_capacity=5) as service:
        monkeypatch.setattr(engine, "submit_unbounded", slow.submit_unbounded)
        for number in (1, 2):
            service.submit(**call(1, 32, 0, False))
            while len(slow.shapes) < number:
                time.sleep(1e-3)
        yield service, slow
        slow.free.set()


def test_requests_that_wait_are_joined_where_that_saves_time(model: Model, held: tuple[ShapedService, Held]) -> None:
    service, slow = held
    asked = [call(1, seq, seq, True) for seq in (3, 30, 8, 5, 7)]
    futures = [service.submit(**inputs) for inputs in asked]
    kept = [{name: value.clone() for name, value in inputs.items()} for inputs in asked]
    for inputs in asked:
        inputs["input_ids"].fill_(1)
    slow.free.set()
    for inputs, future in zip(kept, futures, strict=True):
        require_right(model, inputs, future.result(30))
    assert slow.shapes == [(1, 32), (1, 32), (4, 8), (1, 32)]
    assert futures[0].result()["mean"].untyped_storage().nbytes() == 4 * 8


def test_batches_begin_with_the_most_urgent_request_and_leave_out_late_and_cancelled_ones(
    held: tuple[ShapedService, Held],
) -> None:
    service, slow = held
    late, gone = service.submit(**call(1, 8, 0, True), deadline_s=0.01), service.submit(**call(1, 8, 0, True))
    last, first = service.submit(**call(4, 9, 0, True), priority=1), service.submit(**call(3, 8, 0, True))
    assert gone.cancel()
    long, least = service.submit(**call(1, 32, 0, True)), service.submit(**call(1, 32, 0, True), priority=2)
    with pytest.raises(RefusedError, match=r"2 requests are running \(limit 8\) and 5 are waiting \(limit 5\)"):
        service.submit(**call(1, 1, 0, True), timeout_s=0)
    time.sleep(0.02)
    slow.free.set()
    assert isinstance(late.exception(30), DeadlineError)
    assert all(future.result(30) for future in (first, long, last, least))
    assert slow.shapes[2:] == [(4, 8), (1, 32), (4, 32), (1, 32)]


def test_a_request_waits_for_others_up_to_max_wait(family: Family, engine: Engine, priced: None) -> None:
    with ShapedService(family, engine, max_wait_s=1e4) as service:
        service.submit(**call(4, 8, 0, True)).result(30)
        service.submit(**call(1, 8, 0, True), deadline_s=2).result(30)
        alone = service.submit(**call(1, 8, 0, True))
        time.sleep(0.02)
        assert not alone.done()
        service.submit(**call(3, 5, 0, True)).result(30)
        assert alone.result(30)


@pytest.mark.parametrize(
    ("batch", "seq", "message"),
    [
        (5, 8, r"'batch' is 5, and sizes are 1..4; trace or search again with --batch 1..5"),
        (1, 40, r"'seq' is 40, and sizes are 1..32; trace or search again with --seq-len 1..40"),
        (0, 8, "the request is empty: 'batch' is 0"),
    ],
)
def test_sizes_outside_the_ranges_are_refused_with_a_way_out(service: ShapedService, batch: int, seq: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        service.submit(input_ids=torch.ones(batch, seq, dtype=torch.int64))


def test_inputs_that_do_not_fit_are_refused_at_once(service: ShapedService) -> None:
    ids = torch.ones(1, 8, dtype=torch.int64)
    with pytest.raises(UsageError, match=r"'input_ids' is float32 \[1, 8\], and int64 \[batch, seq\] is expected"):
        service.submit(input_ids=ids.float())
    with pytest.raises(UsageError, match="'seq' is 8 in 'input_ids' axis 1 and 9 in 'attention_mask' axis 1"):
        service.submit(input_ids=ids, attention_mask=torch.ones(1, 9, dtype=torch.int64))
    with pytest.raises(UsageError, match="'input_ids' is ndarray, and a dense tensor is expected"):
        service.submit(input_ids=ids.numpy())


def test_a_dimension_that_cannot_be_padded_runs_at_the_sizes_of_variants_only(
    model: Model, family: Family, engine: Engine
) -> None:
    strict = replace(family, unpaddable={"seq": "op 'mean' mixes elements along it"})
    with ShapedService(strict, engine) as service:
        require_right(model, asked := call(3, 8, 0, True), service(**asked))
        with pytest.raises(
            UsageError, match=r"'seq' is 9, and the variants have \[8, 32\]. It cannot be padded: op 'mean' mixes"
        ):
            service(**call(3, 9, 0, True))


class Flat(torch.nn.Module):
    """Rows and places along one axis, which is as long as their product, and the places but one."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two outputs that cannot be cut back."""
        return x.relu().flatten(0, 1), x[:, 1:] * 2


def test_outputs_whose_axes_are_functions_of_sizes_come_whole() -> None:
    model = load_model(Flat().eval(), inputs=(torch.randn(2, 4, 3),))
    found = with_checked_padding(trace_family(model, {"x": BOTH}, {"batch": (1, 2), "seq": (2, 4)}))
    assert found.unpaddable.keys() == {"batch", "seq"}
    found = found.only([{"batch": batch, "seq": seq} for batch in (1, 2) for seq in (2, 4)])
    with deployed(found) as engine, ShapedService(found, engine) as service:
        for batch, seq in ((1, 4), (2, 2)):
            x = torch.randn(batch, seq, 3)
            assert all(map(torch.equal, service(x), model.module(x)))


def test_the_end_answers_what_was_taken_in(family: Family, engine: Engine) -> None:
    service = ShapedService(family, engine, max_wait_s=60)
    future = service.submit(**call(1, 3, 0, True))
    service.close()
    assert future.done() and future.exception() is None
    with pytest.raises(RefusedError, match="the pipeline is closed"):
        service.submit(**call(1, 3, 0, True))


def test_a_first_request_is_not_the_only_one_that_times_a_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one of each size makes memory. Alone it made the largest size look slower than the others together."""
    ran, now_s = list[str](), 0.0

    def run(size: str) -> None:
        nonlocal now_s
        now_s += {"large": 0.2, "small": 0.1}[size] if size not in ran else {"large": 0.05, "small": 0.04}[size]
        ran.append(size)

    family: Any = SimpleNamespace(
        variants=[SimpleNamespace(example_inputs=size) for size in ("large", "small")], sizes=[{"rows": 9}, {"rows": 8}]
    )
    engine: Any = SimpleNamespace(run=run)
    monkeypatch.setattr(services, "time", SimpleNamespace(perf_counter=lambda: now_s))
    assert [one.seconds for one in measured(family, engine)] == pytest.approx([0.05, 0.04])
    assert ran[:4] == ["large", "small"] * 2
