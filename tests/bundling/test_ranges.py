"""Bundles of plans for requests of several sizes: with a program for each variant, and with one program for every size."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import autosplit
from autosplit.bundling import driver
from autosplit.bundling.bundler import write_bundle
from autosplit.bundling.crosscheck import check_bundle
from autosplit.bundling.dumps import differences_of, example_inputs, read_dump, write_dump
from autosplit.bundling.manifest import WEIGHTS, read_manifest
from autosplit.bundling.openbundle import Policy, load_bundle
from autosplit.bundling.showing import rows, summary
from autosplit.errors import BundleError, TraceError, UsageError
from autosplit.files import content_hash
from autosplit.tracing.family import Family
from autosplit.tracing.splitting import unsplit
from autosplit.values.plan import UNKNOWN, Plan, Stage
from autosplit.values.shapes import Shapes, sizes_text

pytestmark = pytest.mark.timeout(200)
BOTH = {0: "batch", 1: "seq"}
REQUESTS = [(4, 32), (1, 7), (3, 9), (2, 8), (1, 1)]


class Reader(torch.nn.Module):
    """Each token sees the mean of all tokens that are not masked."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first, self.last = torch.nn.Embedding(500, 32), torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Values of each token, and their mean."""
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask
        words = self.words(ids) * mask.unsqueeze(-1)
        mean = words.sum(1) / mask.sum(1, keepdim=True)
        return {"tokens": self.last(torch.tanh(self.first(words))) + mean.unsqueeze(1), "mean": mean}


@pytest.fixture(scope="module")
def module() -> torch.nn.Module:
    torch.manual_seed(0)
    return Reader().eval()


@pytest.fixture(scope="module")
def family(module: torch.nn.Module) -> Family:
    given = torch.randint(1, 99, (2, 16)), torch.ones(2, 16, dtype=torch.int64)
    shapes = {"ids": BOTH, "attention_mask": BOTH}
    return autosplit.trace(module, given, shapes=shapes, sizes={"batch": "1..4", "seq": "1..32"})


def plan_of(family: Family, *backends: str, dynamic: bool = False) -> Plan:
    """As many stages as backends; four variants."""
    ops, sizes = [op.name for op in family.graph.ops], {dim: sizes_text(found) for dim, found in family.allowed.items()}
    cuts = [len(ops) * k // len(backends) for k in range(len(backends) + 1)]
    stages = [Stage(f"stage{k}", tuple(ops[cuts[k] : cuts[k + 1]]), ("cpu:0",), backend) for k, backend in enumerate(backends)]
    buckets = {dim: (found[len(found) // 4], found[-1]) for dim, found in family.allowed.items()}
    shapes = Shapes({}, sizes, buckets, unpaddable=family.unpaddable, dynamic=tuple(set(backends)) if dynamic else ())
    return Plan(family.variants[0].source, family.graph.hash, "", tuple(stages), UNKNOWN, shapes=shapes)


@pytest.fixture(scope="module")
def folder(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "app.asb"
    networks = {
        "variants": (family, plan_of(family, "onnxruntime", "openvino")),
        "free": (family, plan_of(family, "onnxruntime", "openvino", dynamic=True)),
        "eager": (family, plan_of(family, "eager")),
    }
    write_bundle(networks, path)
    errors = check_bundle(path, networks)
    assert errors["eager"].relative == 0 and max(error.relative for error in errors.values()) < 1e-5
    return path


def request_of(batch: int, seq: int, masked: bool) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seq)
    ids = torch.randint(1, 99, (batch, seq), generator=draw)
    mask = (torch.rand(ids.shape, generator=draw) > 0.3).long().index_fill(1, torch.tensor([0]), 1)
    return {"ids": ids, **({"attention_mask": mask} if masked else {})}


def require_right(module: torch.nn.Module, given: dict[str, torch.Tensor], answer: dict[str, Any]) -> None:
    with torch.inference_mode():
        wanted = module(**given)
    for name, value in wanted.items():
        assert answer[name].shape == value.shape
        torch.testing.assert_close(torch.as_tensor(answer[name]), value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", ["serial", "threads", "processes"])
@pytest.mark.parametrize("network", ["variants", "free", "eager"])
def test_a_request_of_any_size_gets_the_modules_answer(
    module: torch.nn.Module, folder: Path, network: str, policy: Policy
) -> None:
    with load_bundle(folder, network=network, policy=policy, trust=network != "eager", verify=False) as bundle:
        for number, (batch, seq) in enumerate(REQUESTS):
            given = request_of(batch, seq, masked=bool(number % 2))
            require_right(module, given, bundle(**given) if number else bundle(given["ids"]))


@pytest.mark.parametrize("network", ["variants", "free"])
def test_the_driver_answers_requests_of_any_size(module: torch.nn.Module, folder: Path, network: str) -> None:
    bundle = driver.Bundle(folder, network, verify=False)
    requests = [request_of(batch, seq, masked=bool(number % 2)) for number, (batch, seq) in enumerate(REQUESTS)]
    arrays = [{name: value.numpy() for name, value in given.items()} for given in requests]
    for given, alone, piped in zip(requests, map(bundle.run, arrays), bundle.run_many(arrays, "pipelined"), strict=True):
        require_right(module, given, alone)
        require_right(module, given, piped)


def test_weights_of_all_variants_are_in_the_bundle_once(family: Family, folder: Path) -> None:
    manifest = read_manifest(folder)
    weights = sum({tensor.data_ptr(): tensor.nbytes for tensor in unsplit(family.variants[0]).weights.values()}.values())
    assert manifest.files[WEIGHTS].num_bytes < weights + 8192
    assert [len(part.variants) for _, part in manifest.parts] == [3] * 5
    assert [row["variants"] for row in rows(manifest)] == [4, 4, "every size", "every size", 4]
    assert len([name for name in manifest.files if name.endswith(".onnx")]) == 5
    assert "3 networks for requests of batch 1..4, seq 1..32" in summary(folder, manifest)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(5, 3)], "'batch' is 5 in 'ids' axis 0, and sizes are 1..4; make the bundle of a plan for wider sizes"),
        ([(0, 3)], "the request is empty: 'batch' is 0 in 'ids' axis 0, and sizes are 1..4"),
        ([(2, 3), (2, 4)], "'seq' is 3 in 'ids' axis 1 and 4 in 'attention_mask' axis 1"),
        ([(2, 3, 1)], r"input 'ids' is int64\[2, 3, 1\], and int64\[2, 3\] is expected"),
        ([(3,)], "the request is empty: 'seq' is 0"),
        ([(2, 3)] * 3, "the inputs are ids, attention_mask, and given are 0, 1, 2"),
    ],
)
def test_a_request_that_does_not_fit_is_refused_by_both(folder: Path, shapes: list[tuple[int, ...]], message: str) -> None:
    given = [torch.ones(shape, dtype=torch.int64) for shape in shapes]
    with load_bundle(folder, network="variants", verify=False) as bundle, pytest.raises(UsageError, match=message):
        bundle(*given)
    with pytest.raises(ValueError, match=message):
        driver.Bundle(folder, "variants", verify=False).run([value.numpy() for value in given])


def test_a_dump_of_a_smaller_request_is_kept_and_compared(folder: Path, tmp_path: Path) -> None:
    with load_bundle(folder, network="eager", cuts=True, trust=True, verify=False) as bundle:
        assert example_inputs(bundle.network)["ids"].shape == (4, 32)
        for name in ("one", "other"):
            given = {**request_of(2, 5, True)}
            write_dump(bundle, "serial", {name: given[name] for name in bundle.network.inputs}, tmp_path / name)
    assert [row.absolute for row in differences_of(read_dump(tmp_path / "one"), read_dump(tmp_path / "other"))] == [0.0]


def test_sizes_that_cannot_be_padded_run_exactly_or_are_refused(tmp_path: Path) -> None:
    class Pooled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean(1)

    own = autosplit.trace(Pooled().eval(), torch.randn(1, 8, 4), shapes={"x": {1: "seq"}}, sizes={"seq": (4, 6, 8)})
    plan = plan_of(own, "onnxruntime")
    assert plan.shapes is not None
    plan = replace(plan, shapes=replace(plan.shapes, buckets={"seq": (4, 8)}))
    write_bundle({"pooled": (own, plan)}, tmp_path / "app.asb")
    x = torch.randn(1, 4, 4)
    with load_bundle(tmp_path / "app.asb") as bundle:
        torch.testing.assert_close(bundle(x), x.mean(1))
        with pytest.raises(UsageError, match=r"none takes a request of \{'seq': 6\}: padding 'seq'"):
            bundle(torch.randn(1, 6, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda net: net["ranges"].update(sizes={"seq": "1..32"}), "to which variant .* does not fit"),
        (lambda net: net["ranges"]["sizes"].update(seq="all"), "to which variant .* does not fit"),
        (lambda net: net["ranges"]["variants"].pop(), "has 3 variants, and not each of its parts has as many"),
        (lambda net: net["ranges"]["variants"][1].update(seq=33), "to which variant .* does not fit"),
        (lambda net: net["ranges"]["inputs"]["ids"].update({"7": "seq"}), "whose axis 7 is not as long as 'seq'"),
        (lambda net: net["ranges"]["outputs"].update(nothing={"0": "seq"}), "has value 'nothing' of shape"),
        (
            lambda net: net["ranges"].update(masks=["ids", "attention_mask"]),
            "has the mask 'ids', and no other input",
        ),
        (lambda net: net["parts"][0]["variants"][2]["files"].update(onnx="/x"), "names file '/x', which is not in the bundle"),
        (lambda net: net["parts"][0]["variants"][0]["outputs"][0].update(dtype="int8"), "with another shape or dtype"),
    ],
)
def test_ranges_that_do_not_fit_together_are_refused(
    folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    data = json.loads((folder / "manifest.json").read_text())
    change(data["networks"]["variants"])
    data["key"] = content_hash({name: value for name, value in data.items() if name not in ("schema", "key")})
    (tmp_path / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(BundleError, match=message):
        load_bundle(tmp_path)


def test_a_model_that_the_plan_or_the_runtime_does_not_take_is_refused(family: Family, tmp_path: Path) -> None:
    plan = plan_of(family, "onnxruntime", dynamic=True)
    with pytest.raises(UsageError, match="the model is traced for one; trace it with sizes="):
        write_bundle({"net": (family.variants[0], plan)}, tmp_path / "app.asb")
    with pytest.raises(TraceError, match="no export with symbolic sizes"):
        write_bundle({"net": (replace(family, symbolic=None), plan)}, tmp_path / "app.asb")
    assert list(tmp_path.iterdir()) == []
