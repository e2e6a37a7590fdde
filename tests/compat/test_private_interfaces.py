"""Each private interface of another package does what autosplit uses it for, and stands in ``autosplit/compat`` alone."""

import ast
import importlib.metadata
import inspect
import pickle
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from numba.core.caching import IndexDataCacheFile
from torch._subclasses.fake_impls import op_implementations_dict
from torch.export import exported_program

from autosplit import jit
from autosplit.compat import models, numbacache, raysettings, runtimes, torchparts
from autosplit.compat.futures import DoneFuture, SafeFuture
from autosplit.compat.tried import TRIED, needs
from autosplit.errors import MissingExtraError
from autosplit.planners.contiguous import downset_enumeration
from autosplit.planners.loads import add

PACKAGE = Path(__file__).parents[2] / "autosplit"

PUBLIC = {"_replace", "_asdict", "_fields", "_exit", "_repr_html_"}
"""Names of NamedTuples, ``os`` and IPython whose documents promise them."""

OPERATORS = {"ATEN", "torch.ops.aten"}
"""An operator's name may begin with ``_``."""


def private_uses(source: str) -> Iterator[str]:
    """Every private name of another package that the source imports or reads, with its line."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls")}
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Attribute) and node.attr not in own and ast.unparse(node.value) not in OPERATORS:
            names = [node.attr]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.ImportFrom):
            names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            names = [str(argument.value) for argument in node.args[1:2] if isinstance(argument, ast.Constant)]
        if any(name.startswith("_") and not name.startswith("__") and name not in PUBLIC for name in names):
            yield f"{node.lineno}: {ast.unparse(node)}"


def test_private_interfaces_of_others_stand_here_alone() -> None:
    paths = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "compat"]
    found = {str(path.relative_to(PACKAGE)): list(private_uses(path.read_text(encoding="utf-8"))) for path in paths}
    assert {path: uses for path, uses in found.items() if uses} == {}, "move them to autosplit/compat, with a test here"


@pytest.mark.parametrize(
    ("source", "num_uses"),
    [
        ("from torch._ops import OpOverload", 1),
        ("import ray._private.node", 1),
        ("session._sess.run()", 1),
        ("getattr(found, '_backends', None)", 1),
        ("class A:\n    def f(self, other):\n        self._x = other._x", 0),
        ("torch.ops.aten._to_copy.default, row._asdict(), os._exit(0), made.__code__", 0),
    ],
)
def test_a_private_use_is_found(source: str, num_uses: int) -> None:
    assert len(list(private_uses(source))) == num_uses


@pytest.mark.parametrize("package", TRIED)
def test_the_versions_in_the_errors_are_those_that_these_tests_ran_on(package: str) -> None:
    version = importlib.metadata.version(package).partition("+")[0]
    assert version == TRIED[package], "once these tests pass, write the new version to TRIED"


def test_a_part_that_is_gone_is_an_error_with_a_way_out() -> None:
    gone = r"numba .* lacks a part that autosplit uses \(.*_cache.*\)\. .*: pip install 'numba==[\d.]+'"
    with pytest.raises(MissingExtraError, match=gone):
        numbacache.stamp_cache(object(), "stamp", None)
    with pytest.raises(MissingExtraError, match="onnxruntime"), needs("onnxruntime"):
        raise ImportError


def test_numba_keeps_machine_code_by_our_stamp() -> None:
    stamp = jit.source_stamp(Path(jit.__file__).with_name("planners"))
    for function in (add, downset_enumeration.run):
        assert function._cache._cache_file._source_stamp == stamp


def test_a_cache_that_names_a_renamed_class_is_made_anew(tmp_path: Path) -> None:
    # the machine code of the version before ended in a traceback
    file = IndexDataCacheFile(str(tmp_path), "add", "stamp")
    lost = b"cautosplit.planners.loads\nFilling\n."
    Path(file._index_path).write_bytes(pickle.dumps(file._version, protocol=-1) + lost)
    with pytest.raises(AttributeError):
        file._load_index()
    numbacache.stamp_cache(SimpleNamespace(_cache=SimpleNamespace(_cache_file=file)), "stamp", None)
    assert file._load_index() == {}


def test_numba_keeps_machine_code_in_our_folder(tmp_path: Path) -> None:
    file = IndexDataCacheFile("/nowhere", "add", "old")
    numbacache.stamp_cache(SimpleNamespace(_cache=SimpleNamespace(_cache_file=file)), "stamp", tmp_path)
    file.save("key", "code")
    assert file.load("key") == "code" and sorted(path.name for path in tmp_path.iterdir()) == ["add.1.nbc", "add.nbi"]


def test_our_futures_have_every_field_of_a_future() -> None:
    fields = vars(Future())
    assert fields.keys() == vars(SafeFuture()).keys()
    assert fields.keys() <= {*dir(DoneFuture(1, None))}
    assert DoneFuture(1, None).result() == 1 and isinstance(DoneFuture(None, ValueError()).exception(), ValueError)


def test_a_schema_names_operator_and_overload_and_says_what_writes() -> None:
    add_, relu_ = torchparts.schema_of(torch.ops.aten.add.Tensor), torchparts.schema_of(torch.ops.aten.relu_.default)
    assert (add_.name, add_.overload_name, add_.is_mutable, len(add_.returns)) == ("aten::add", "Tensor", False, 1)
    assert [argument.name for argument in add_.arguments] == ["self", "other", "alpha"]
    assert relu_.is_mutable and isinstance(torch.ops.aten.add.Tensor, torchparts.OpOverload)


def test_the_source_of_a_custom_operator_is_its_file() -> None:
    @torch.library.custom_op("autosplit_compat::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    twice.register_fake(torch.empty_like)
    assert torchparts.custom_source(torch.ops.autosplit_compat.twice.default) == __file__
    assert torchparts.custom_source(torch.ops.aten.add.Tensor) is None


def test_a_renamed_weight_has_its_new_name_in_signature_and_state() -> None:
    exported = torch.export.export(torch.nn.Linear(2, 3), (torch.zeros(1, 2),))
    torchparts.renamed(exported, {"weight": "other"})
    targets = {spec.target for spec in exported.graph_signature.input_specs}
    assert targets == {"other", "bias", None} and exported.state_dict.keys() == {"other", "bias"}


def test_the_stores_of_a_module_are_its_own() -> None:
    module = torch.nn.BatchNorm1d(2)
    attributes, buffers, parameters = torchparts.stores_of(module)
    attributes["mark"], buffers["running_mean"] = 3, torch.ones(2)
    assert module.mark == 3 and module.running_mean.sum() == 2 and parameters["weight"] is module.weight


def test_writes_are_counted_but_in_inference_mode() -> None:
    tensor = torch.zeros(2)
    before = torchparts.num_writes(tensor)
    tensor.view(1, 2).add_(1)
    assert torchparts.num_writes(tensor) == before + 1
    with torch.inference_mode():
        assert torchparts.num_writes(torch.zeros(2)) == 0


def test_tensors_under_torch_func_and_fake_tensors_are_known() -> None:
    seen = []
    torch.func.vmap(lambda x: (seen.append(torchparts.is_functorch_wrapped_tensor(x)), x)[1])(torch.zeros(2))
    assert seen == [True] and not torchparts.is_functorch_wrapped_tensor(torch.zeros(2))
    with torchparts.FakeTensorMode() as mode:
        fake = torch.zeros(2)
    assert torchparts.detect_fake_mode([fake]) is mode and torchparts.detect_fake_mode([torch.zeros(2)]) is None


def test_exports_give_operators_the_kernels_of_the_first_one_and_take_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    op, key, marks = (
        torch.ops.aten.linear.default,
        torch._C.DispatchKey.CompositeImplicitAutograd,
        [lambda *_: None, lambda *_: 1],
    )
    exported = torch.export.export(torch.nn.Linear(2, 3), (torch.zeros(1, 2),), strict=False)
    own, usual = dict(op.py_kernels), exported_program._override_composite_implicit_decomp
    code = exported.run_decompositions({}).graph_module.code

    def given(mark: object) -> tuple[dict[object, object], object]:
        with exported_program._override_composite_implicit_decomp({op: mark}):
            found = dict(op.py_kernels), op_implementations_dict[op]
        assert op.py_kernels == own and op not in op_implementations_dict
        return found

    names = given(marks[0])[0].keys()
    for _ in range(2):
        with runtimes.kept_kernels():
            first, again, other = (given(mark) for mark in (marks[0], marks[0], marks[1]))
            assert first == again and first[0].keys() == other[0].keys() == names
            assert (first[0][key], other[0][key]) == tuple(marks)
            assert exported.run_decompositions({}).graph_module.code == code
        assert exported_program._override_composite_implicit_decomp is usual
    monkeypatch.setitem(op.py_kernels, torch._C.DispatchKey.CPU, marks[1])
    own = dict(op.py_kernels)
    with runtimes.kept_kernels():
        assert given(marks[0])[0][torch._C.DispatchKey.CPU] is marks[1]
    monkeypatch.delattr(exported_program, "_override_composite_implicit_decomp")
    with runtimes.kept_kernels():
        assert not hasattr(exported_program, "_override_composite_implicit_decomp")


def test_containers_are_those_of_an_exported_program() -> None:
    exported = torch.export.export(torch.nn.Linear(2, 3), (torch.zeros(1, 2),))
    assert exported.call_spec.in_spec == torchparts.pytree.tree_structure(((torch.zeros(1, 2),), {}))
    [(path, _)] = torchparts.pytree.tree_flatten_with_path(({"a": 1},))[0]
    assert torchparts.pytree.keystr(path) == "[0]['a']"


def test_ray_reads_its_settings_again() -> None:
    raylet = pytest.importorskip("ray._raylet")
    modes = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", "0" * 64)
        for mode in ("token", "disabled"):
            patch.setenv("RAY_AUTH_MODE", mode)
            raysettings.reread_settings()
            modes.append(raylet.get_authentication_mode())
    raysettings.reread_settings()
    assert modes == [raylet.AuthenticationMode.TOKEN, raylet.AuthenticationMode.DISABLED]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> object:
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    helper, path = onnx.helper, tmp_path_factory.mktemp("twice") / "twice.onnx"
    x, y = (helper.make_tensor_value_info(name, 1, [2]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "twice", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def test_a_binding_reads_and_writes_memory_of_torch(session: object) -> None:
    binding, x, y = runtimes.Binding(session, torch.device("cpu")), torch.tensor([1.0, 2.0]), torch.empty(2)
    binding.input("x", 1, [2], x.data_ptr())
    binding.output("y", 1, [2], y.data_ptr())
    binding.run()
    assert y.tolist() == [2, 4]


def test_batch_norms_of_openvino_are_folded(tmp_path: Path) -> None:
    onnx, openvino = pytest.importorskip("onnx"), pytest.importorskip("openvino")
    helper = onnx.helper
    x, y = (helper.make_tensor_value_info(name, 1, [1, 2, 4, 4]) for name in "xy")
    weights = [helper.make_tensor("w", 1, [2, 2, 1, 1], [1.0] * 4), *(helper.make_tensor(n, 1, [2], [2.0, 3.0]) for n in "sbmv")]
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"]), helper.make_node("BatchNormalization", [*"csbmv"], ["y"])]
    onnx.save(helper.make_model(helper.make_graph(nodes, "norm", [x], [y], weights), ir_version=10), tmp_path / "norm.onnx")
    model = openvino.Core().read_model(tmp_path / "norm.onnx")
    assert "BatchNormInference" in {node.get_type_name() for node in model.get_ops()}
    runtimes.fold_constants(model)
    assert "BatchNormInference" not in {node.get_type_name() for node in model.get_ops()}


def test_a_package_of_torch_holds_the_files_of_several_models(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one.so", "other.so")]
    for file in files:
        file.write_bytes(b"native code")
    runtimes.write_package(tmp_path / "all.pt2", {file.stem: [str(file)] for file in files})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch.export.pt2_archive._package", None)
        with pytest.raises(MissingExtraError, match="pip install 'torch=="):
            runtimes.write_package(tmp_path / "none.pt2", {})
    names = torch.export.pt2_archive.PT2ArchiveReader(str(tmp_path / "all.pt2")).get_file_names()
    assert {Path(name).name for name in names} >= {"one.so", "other.so"}


def test_inductor_takes_our_arguments(tmp_path: Path) -> None:
    """``tests/backends`` compile and run stages, which takes long."""
    inspect.signature(torch._inductor.aot_compile).bind(torch.nn.ReLU(), (torch.ones(2),), options={})
    with pytest.raises(RuntimeError, match=r"relu\.so"):
        runtimes.open_library(tmp_path / "relu.so")


def test_transformers_marks_what_a_class_lacks_and_how_a_model_attends() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel(transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    assert models.attention_of(model) == "sdpa" and models.attention_of(torch.nn.ReLU()) == ""
    t5 = transformers.T5Config(
        d_model=8, d_kv=4, num_heads=2, relative_attention_num_buckets=8, relative_attention_max_distance=9
    )
    layer = transformers.models.t5.modeling_t5.T5Attention(t5, has_relative_attention_bias=True)
    distances = torch.tensor([-20, -2, -1, 0, 1, 20])
    assert models.distance_buckets(layer, distances, both_ways=False).tolist() == [7, 2, 1, 0, 0, 0]
    assert models.distance_buckets(layer, distances, both_ways=True).tolist() == [3, 2, 1, 0, 5, 7]
    placeholder = SimpleNamespace(_backends=["torchvision"])
    assert models.missing_packages(placeholder) == ["torchvision"] and models.missing_packages(transformers.BertModel) == []
