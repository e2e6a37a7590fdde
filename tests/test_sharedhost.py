"""Several models planned for one host, run beside each other and opened: by the call and by the command."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

import autosplit
from autosplit import cli, sharedhost
from autosplit.errors import UsageError
from autosplit.measuring import store as stores
from autosplit.planning.sharing import Sharing, Tenant
from autosplit.sharedhost import chosen_again
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import Plan, Prediction, Source, Stage
from autosplit.values.planfile import read_plan
from autosplit.values.profile import Profile

SPECS = {"wide": "autosplit.examples.mlp:mlp?depth=2&width=256", "deep": "autosplit.examples.mlp:mlp?depth=4&width=64"}
RATES = {"wide": 20.0, "deep": 40.0}
TWO_GPUS = [{"name": "cuda:0", "count": 2, "memory": "24GB", "speed": {"flops": 8.0e13, "bytes_per_s": 9.0e11}}]
CORES = [{"name": "cpu:0", "count": 8, "speed": {"flops": 1.0e11, "bytes_per_s": 2.0e10}}]
NPU = [
    {"name": "cpu:0", "speed": {"flops": 1.0e11, "bytes_per_s": 2.0e10}},
    {"name": "npu:0", "speed": {"flops": 1.0e13, "bytes_per_s": 1.0e11}, "operators": ["aten.linear*"], "one_model": True},
]


@pytest.mark.timeout(300)
def test_models_run_beside_each_other_and_answer_as_alone(tmp_path: Path) -> None:
    setup = autosplit.Setup(backends="eager", store=tmp_path, progress=False)
    budget = autosplit.Budget(search_s=0.5, num_rounds=1)
    traced = {name: autosplit.trace(spec) for name, spec in SPECS.items()}
    found = autosplit.share(traced, RATES, "cpu:0,cpu:1", setup=setup, budget=budget)
    assert len(found.rounds) == 1 and found.measured > 0 and not found.faults
    assert found.sharing.factor <= found.sharing.bound * (1 + 1e-3)
    assert {name: one.count for name, one in found.paced.items()}.keys() == RATES.keys()
    assert all(row["measured_latency_s"] > 0 for row in found.rows()) and len(found.sentences) == 4
    assert all(row["slowdown"] > 0 and row["slowdown"] != 1.0 for row in found.rows())
    assert "wide" in found._repr_html_()
    with found.open() as services:
        for name, one in traced.items():
            [x] = one.example_inputs
            assert torch.allclose(services[name](x), one.program(x)[0], atol=1e-5)


@pytest.mark.parametrize(("second_s", "moves"), [(0.97, False), (0.5, True)])
def test_other_plans_replace_those_that_ran_only_if_they_are_clearly_ahead(second_s: float, moves: bool) -> None:
    stage, predicted = Stage("s", ("op",), ("cpu:0",)), Prediction(1.0, 1.0, 1.0, 0.0, 1.0)
    ran, other = (Plan(Source("m:f"), "g", "p", (stage,), predicted, loads_s={"cpu:0": load_s}) for load_s in (1.0, second_s))
    first = Sharing((Tenant("a", 0.5),), (ran,), Machine.of([parse_device("cpu:0")]), 2.0)
    found = chosen_again(first, [1.5], lambda asked: replace(first, tenants=tuple(asked), plans=(other,)))
    assert found.tenants[0].slowdown == 1.5 and found.plans == ((other,) if moves else (ran,))
    assert found.factor == pytest.approx(1 / (0.5 * 1.5 * (second_s if moves else 1.0)))


def test_an_accelerator_that_was_left_out_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, traced = Machine.of(map(parse_device, ("cuda:0", "cpu:0"))), autosplit.trace(SPECS["wide"])
    known = Profile.given(traced.graph, {(op.name, "cpu:0"): 1e-5 for op in traced.graph.ops})
    note = "cuda:0 is left out: no backend is left there"
    monkeypatch.setattr(sharedhost, "measure", lambda *_, **__: replace(known, notes=(note,)))
    setup = autosplit.Setup(progress=False, store=None)
    shared = autosplit.share({"wide": traced}, {"wide": 20.0}, machine, setup=setup, budget=0)
    assert shared.plans["wide"].devices == ("cpu:0",) and shared.notes == (f"'wide': {note}",)


def test_rates_and_models_must_fit() -> None:
    with pytest.raises(UsageError, match="'deep' has no rate"):
        autosplit.share(SPECS, {"wide": 1.0})


@pytest.mark.timeout(300)
@pytest.mark.parametrize("devices", [TWO_GPUS, CORES, NPU], ids=["gpus", "cores", "npu"])
def test_a_file_of_models_is_planned_for_devices_that_are_not_here(
    devices: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stores, "user_root", lambda: Path("profiles"))
    Path("machine.yaml").write_text(yaml.safe_dump({"devices": devices}))
    entries = {name: {"model": spec, "rate_per_s": RATES[name], "max_latency": "1s"} for name, spec in SPECS.items()}
    Path("models.yaml").write_text(yaml.safe_dump({"models": entries}))
    words = ["search", "models.yaml", "--machine", "machine.yaml", "--budget", "0s", "--backend", "eager", "--json"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["factor"] > 1 and data["measured"] is None and len(data["models"]) == 2
    assert "slow each other down; that is not in these figures" in data["sentences"][-1]
    assert all("on estimates of" in read_plan(Path(row["plan"])).method for row in data["models"])
    for row in data["models"]:
        assert row["loads"] and 0 < row["alone_s"] <= row["latency_s"] < 1 and read_plan(Path(row["plan"])).devices


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["m:a", "m:b", "--rates", "1"], "--rates has 1 rates for 2 models"),
        (["m:a", "m:b"], "--rates has 0 rates for 2 models"),
        (["m:a", "m:b", "--rates", "1,0"], "m:b.rate_per_s: Input should be greater than 0"),
        (["m:a", "m:a", "--rates", "1,2"], "model 'm:a' is given twice"),
        (["m:a", "m:b", "--rates", "1,2", "--pin", "x=cpu:0"], "leave out --pin"),
        (["models.yaml"], "models file 'models.yaml' does not exist"),
        (["faulty.yaml"], "models.a.rate_per_s: Field required"),
        (["faulty.yaml"], "models.a.max_latency: 'soon' is not a duration"),
        (["faulty.yaml", "--rates", "1"], "leave out --rates"),
    ],
)
def test_what_is_asked_wrongly_is_refused_at_once(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("faulty.yaml").write_text("models: {a: {model: 'm:a', max_latency: soon}}")
    done = CliRunner().invoke(cli.app, ["search", *words, "--json"])
    assert done.exit_code == 1 and said in json.loads(done.stdout)["message"]
