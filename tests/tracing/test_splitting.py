import errno
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autosplit.compat.torchparts import pytree
from autosplit.errors import PlanError
from autosplit.files import content_hash
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import DESCRIBED, WEIGHTS, load_stage, place_stage, save_stage, split
from autosplit.tracing.tensorspec import copy_into, empty_like_spec, extent_bytes, spec_of

TEXT = "hidden_size=32&num_hidden_layers=1&num_attention_heads=2&intermediate_size=64&vocab_size=100"
SPECS = {
    "resnet": "transformers:ResNetForImageClassification?depths=1,1&hidden_sizes=8,16&embedding_size=8&image_size=32",
    "bert": f"transformers:BertModel?{TEXT}&max_position_embeddings=16",
    "vit": "transformers:ViTModel?hidden_size=32&num_hidden_layers=1&num_attention_heads=2&intermediate_size=64&image_size=32",
    "gpt2": "transformers:GPT2Model?n_embd=32&n_layer=1&n_head=2&vocab_size=100&n_positions=16",
    "t5": "transformers:T5Model?d_model=32&num_layers=1&d_ff=64&num_heads=2&d_kv=16&vocab_size=100",
    "swin": "transformers:SwinModel?image_size=32&patch_size=2&embed_dim=16&depths=2,1&num_heads=2,2&window_size=4",
    "unet": "autosplit.examples.unet:unet?size=16&channels=4&levels=2",
    "mlp": "autosplit.examples.mlp:mlp?width=16&depth=5",
    "branches": "autosplit.examples.branches:branches?size=16&channels=4&depth=2",
    "tied": "autosplit.examples.tied:tied?vocabulary=50&width=16",
}


def test_a_saved_stage_computes_the_bits_of_the_module(tmp_path):
    """A weight that requires a gradient is multiplied by another kernel where an input is transposed, as inside a GRU."""
    net = nn.GRU(32, 32, batch_first=True).eval()
    net.bias_hh_l0.requires_grad_(False)
    traced = trace(load_model(net, inputs=torch.randn(2, 10, 32)))
    [stage] = split(traced, [[op.name for op in traced.graph.ops]])
    save_stage(stage, tmp_path / "gru")
    loaded = load_stage(tmp_path / "gru", trust=True)
    assert {name for name, weight in loaded.weights.items() if not weight.requires_grad} == {"bias_hh_l0"}
    assert traced.module_error.absolute == 0.0
    with torch.inference_mode():
        assert torch.equal(loaded.module(*traced.example_inputs)[0], net(*traced.example_inputs)[0])


class Odd(nn.Module):
    """Values that a copy must get right: expanded, with gaps, overlapping, unaligned, transposed, empty, tuples, constants."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(65, 65)
        self.register_buffer("table", torch.randn(65))

    def forward(self, x, unused):
        y = self.linear(x)
        expanded = self.table[None, :].expand(9, 65)
        gaps, unaligned = y[:, 3:40], y[:, 1:65]
        windows = self.table.unfold(0, 9, 4)
        product = unaligned.t() @ gaps + windows.sum()
        low, high = torch.tanh(expanded * 0.5).chunk(2, dim=1)
        positions = torch.arange(9)[:, None] + torch.zeros(1)
        return {
            "product": product,
            "halves": [low, high[:, 1:]],
            "x": x,
            "none": y[:, :0],
            "positions": positions,
            "again": product,
        }


@cache
def traced(name):
    torch.manual_seed(0)
    if name == "odd":
        return trace(load_model(Odd().eval(), inputs=(torch.randn(9, 65), torch.zeros(3))))
    return trace(load_model(SPECS[name], batch=2, seq_len=8 if name == "t5" else None))


def run_stages(programs, traced_model, inputs=None):
    """Hand each value on as a transport does: a copy of the layout that the spec gives."""
    values = dict(zip(traced_model.graph.inputs, inputs or traced_model.example_inputs, strict=True))
    with torch.inference_mode():
        for program in programs:
            handed = []
            for spec in program.inputs:
                handed.append(empty_like_spec(spec))
                copy_into(handed[-1], values[spec.name])
            outputs = program.module(*handed)
            assert isinstance(outputs, tuple)
            for spec, output in zip(program.outputs, outputs, strict=True):
                assert spec_of(spec.name, output) == spec
                values[spec.name] = output
    return traced_model.unflatten_outputs([values[name] for name in traced_model.graph.outputs])


def reference(traced_model):
    with torch.inference_mode():
        return traced_model.unflatten_outputs(traced_model.program(*traced_model.example_inputs))


def assert_same(ours, expected):
    (our_leaves, our_spec), (expected_leaves, expected_spec) = pytree.tree_flatten(ours), pytree.tree_flatten(expected)
    assert our_spec == expected_spec
    for mine, theirs in zip(our_leaves, expected_leaves, strict=True):
        assert torch.equal(mine, theirs) if isinstance(theirs, torch.Tensor) else mine == theirs


def even(graph, num_stages):
    ops = [op.name for op in graph.ops]
    cuts = [len(ops) * stage // num_stages for stage in range(num_stages + 1)]
    return [ops[start:end] for start, end in pairwise(cuts)]


def shuffled(graph, random, num_stages):
    """A random topological order, cut at random places: every partition whose stages are in order can come out."""
    waiting = {op.name: {graph.producer[value] for value in op.inputs if value in graph.producer} for op in graph.ops}
    order = []
    while waiting:
        ready = [name for name, needs in waiting.items() if needs <= set(order)]
        order.append(random.choice(ready))
        del waiting[order[-1]]
    cuts = [0, *sorted(random.sample(range(1, len(order)), num_stages - 1)), len(order)]
    stages = [order[start:end] for start, end in pairwise(cuts)]
    for stage in stages:
        random.shuffle(stage)
    return stages


def saved_and_loaded(programs, folder):
    for position, program in enumerate(programs):
        save_stage(program, folder / str(position))
    return [load_stage(folder / str(position), trust=True) for position in range(len(programs))]


@pytest.mark.parametrize("name", [*SPECS, "odd"])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_equal_the_unsplit_model_and_so_do_loaded_ones(name, num_stages, tmp_path):
    model = traced(name)
    programs = split(model, even(model.graph, num_stages))
    assert [program.name for program in programs] == [f"stage{stage}" for stage in range(num_stages)]
    expected = reference(model)
    assert_same(run_stages(programs, model), expected)
    assert_same(run_stages(saved_and_loaded(programs, tmp_path), model), expected)


@pytest.mark.parametrize("name", ["unet", "branches", "tied", "odd", "bert", "gpt2"])
@given(random=st.randoms(use_true_random=False), data=st.data())
@settings(max_examples=8, deadline=None)
def test_any_convex_stages_equal_the_unsplit_model(name, random, data):
    model = traced(name)
    num_stages = data.draw(st.integers(1, min(8, len(model.graph.ops))))
    stages = shuffled(model.graph, random, num_stages)
    programs = split(model, stages)
    assert [set(program.ops) for program in programs] == [set(stage) for stage in stages]
    assert_same(run_stages(programs, model), reference(model))


@pytest.mark.parametrize("name", ["tied", "odd"])
def test_every_op_a_stage_of_its_own(name, tmp_path):
    model = traced(name)
    programs = split(model, [[op.name] for op in model.graph.ops])
    assert_same(run_stages(saved_and_loaded(programs, tmp_path), model), reference(model))


def test_other_inputs_than_the_example():
    model = traced("unet")
    image = torch.randn(2, 3, 16, 16)
    programs = split(model, even(model.graph, 3))
    assert torch.equal(run_stages(programs, model, [image]), model.run(image))


def test_values_that_cross_are_those_that_are_needed():
    model = traced("branches")
    first, last = split(model, even(model.graph, 2))
    made_late = {value for op in model.graph.ops if op.name in last.ops for value in op.outputs}
    needed_late = {value for op in model.graph.ops if op.name in last.ops for value in op.inputs} - made_late
    assert {spec.name for spec in last.inputs} == needed_late
    assert {spec.name for spec in first.outputs} == needed_late - set(model.graph.inputs)
    assert tuple(spec.name for spec in last.outputs) == model.graph.outputs


def test_ops_without_inputs_and_unused_inputs_are_placed():
    model = traced("odd")
    constants = [op.name for op in model.graph.ops if not op.inputs]
    assert constants
    rest = [op.name for op in model.graph.ops if op.inputs]
    programs = split(model, [constants, rest])
    assert programs[0].inputs == ()
    assert model.graph.inputs[1] not in {spec.name for program in programs for spec in program.inputs}
    assert_same(run_stages(programs, model), reference(model))


def test_tied_weight_is_in_both_stages_when_they_both_read_it():
    model = traced("tied")
    ops = [op.name for op in model.graph.ops]
    programs = split(model, [ops[:1], ops[1:]])
    assert all("embedding.weight" in program.weights for program in programs)
    whole = split(model, [ops])[0]
    assert whole.weight_bytes == model.graph.weight_bytes
    assert (
        sum(program.weight_bytes for program in programs) == model.graph.weight_bytes + whole.weights["embedding.weight"].nbytes
    )


def test_a_stage_folder_holds_its_own_weights_only(tmp_path):
    torch.manual_seed(0)
    packed = torch.randn(8, 256, 256)

    class Packed(nn.Module):
        """Eight weights that are slices of one storage, as some checkpoints have them."""

        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList(packed.unbind())

        def forward(self, x):
            for weight in self.weights:
                x = torch.tanh(x @ weight)
            return x

    model = trace(load_model(Packed().eval(), inputs=torch.randn(1, 256)))
    programs = split(model, even(model.graph, 8))
    loaded = saved_and_loaded(programs, tmp_path)
    for stage, program in enumerate(loaded):
        own = 256 * 256 * 4
        assert (program.weight_bytes, list(program.weights)) == (own, [f"weights.{stage}"])
        assert own <= sum(file.stat().st_size for file in (tmp_path / str(stage)).iterdir()) < own + 20_000
    assert_same(run_stages(loaded, model), reference(model))


def test_loaded_weights_are_mapped_and_aligned(tmp_path):
    program = saved_and_loaded(split(traced("mlp"), even(traced("mlp").graph, 1)), tmp_path)[0]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in program.weights.values())
    assert str(tmp_path / "0" / WEIGHTS) in Path("/proc/self/maps").read_text()


def test_an_expanded_value_crosses_as_what_it_repeats():
    model = traced("odd")
    expanded = [spec for spec in model.specs.values() if 0 in spec.stride and extent_bytes(spec) < spec.num_bytes]
    assert expanded
    assert_same(run_stages(split(model, [[op.name] for op in model.graph.ops]), model), reference(model))


class Unaligned(nn.Module):
    """A product of MKL, whose bits are others when an operand starts at another place within 64 bytes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1024, 1024)

    def forward(self, x):
        return self.linear(x[1:].view(2, 1024))


def test_start_within_64_bytes_is_kept():
    torch.manual_seed(0)
    model = trace(load_model(Unaligned().eval(), inputs=torch.randn(2049)))
    programs = split(model, [[op.name] for op in model.graph.ops])
    assert programs[-1].inputs[0].offset_bytes == 4
    assert_same(run_stages(programs, model), reference(model))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stages: [stages[0][1:], stages[1]], r"\(1 fault\):\n  \* op '\w+' is on no stage"),
        (lambda stages: [stages[0], stages[1] + stages[0][:1]], "is on stage 0 and on stage 1"),
        (lambda stages: [[*stages[0], "fc"], stages[1]], "stage 0 names op 'fc', which the graph does not have"),
        (lambda stages: [stages[1], stages[0]], "on stage 0 reads '.*' from stage 1; a tensor goes to the same or a later stage"),
        (lambda stages: [*stages, []], "stage 2 has no ops"),
        (lambda stages: [[*stages[0], "fc"], stages[1][1:]], r"\(2 faults\)"),
    ],
)
def test_stages_that_do_not_fit_list_their_faults(change, message):
    model = traced("mlp")
    with pytest.raises(PlanError, match=message):
        split(model, change(even(model.graph, 2)))


def spoil(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / WEIGHTS).unlink(), "cannot be read: No such file"),
        (lambda folder: (folder / "stage.json").unlink(), "does not exist"),
        (lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-50]), "it is truncated"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"x" * (folder / WEIGHTS).stat().st_size), "cannot be read"),
        (lambda folder: (folder / "stage.json").write_text((folder / "stage.json").read_text()[:-100]), "truncated or not valid"),
        (lambda folder: spoil(folder / "stage.json", lambda data: data.update(schema=99)), "schema version 99"),
        (lambda folder: spoil(folder / "stage.json", lambda data: data.pop("nodes")), "is incomplete"),
        (lambda folder: spoil(folder / "stage.json", lambda data: data["nodes"].pop(2)), "was changed after it was saved"),
        (lambda folder: (folder / WEIGHTS).replace(folder / "w").replace(folder.parent / "1" / WEIGHTS), "No such file"),
    ],
)
def test_a_damaged_folder_is_refused(damage, message, tmp_path):
    model = traced("mlp")
    saved_and_loaded(split(model, even(model.graph, 2)), tmp_path)
    damage(tmp_path / "0")
    with pytest.raises(PlanError, match=message):
        load_stage(tmp_path / "0")


def forge(folder, change):
    """Change ``stage.json``, and have both files say that it is what was saved."""
    path, weights = folder / "stage.json", folder / WEIGHTS
    data = json.loads(path.read_text())
    saved = data["key"]
    change(data)
    if all(field in data for field in DESCRIBED):
        data["key"] = data["weights_key"] = content_hash({field: data[field] for field in DESCRIBED})
        weights.write_bytes(weights.read_bytes().replace(saved.encode(), data["key"].encode()))
    path.write_text(json.dumps(data))


def nested(depth):
    return [nested(depth - 1)] if depth else []


FORGERIES = {
    "no dtype": lambda data: data["inputs"][0].update(dtype="nn"),
    "no dtype of a weight": lambda data: data["weights"][0].update(dtype="nn"),
    "a negative stride": lambda data: data["outputs"][0].update(stride=[-1, 1]),
    "a negative stride of a weight": lambda data: data["weights"][0].update(stride=[-1, 1]),
    "a shape of texts": lambda data: data["inputs"][0].update(shape=["a", "b"]),
    "a shape of texts of a weight": lambda data: data["weights"][0].update(shape=["a", "b"]),
    "a shape that is too large": lambda data: data["weights"][0].update(shape=[0, 2**70]),
    "fewer strides than sizes": lambda data: data["inputs"][0].update(stride=[1]),
    "a start past the boundary": lambda data: data["inputs"][0].update(offset_bytes=64),
    "nodes that are a number": lambda data: data.update(nodes=5),
    "a device that there is not": lambda data: data["nodes"][-2]["args"].append({"device": "abacus"}),
    "a node in brackets": lambda data: data["nodes"][-2].update(args=nested(300)),
    "a word of Python as a name": lambda data: data["nodes"][-2].update(kwargs={"class": 1}),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_stage_file_that_nobody_saved_is_refused(forgery, tmp_path):
    saved_and_loaded(split(traced("mlp"), even(traced("mlp").graph, 1)), tmp_path)
    forge(tmp_path / "0", FORGERIES[forgery])
    with pytest.raises(PlanError, match=r"stage\.json' is incomplete: .*\. Save the stage again"):
        load_stage(tmp_path / "0")


JUNK = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just([]) | st.just({}) | st.just([[]])


def places(data):
    for key in data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield data, key
        yield from places(data[key])


@given(data=st.data(), junk=JUNK)
@settings(max_examples=examples(100), deadline=None)
def test_a_stage_file_with_anything_in_the_place_of_anything_is_loaded_or_refused(data, junk):
    def change(content):
        container, key = data.draw(st.sampled_from(list(places(content))))
        container[key] = junk

    with TemporaryDirectory() as folder:
        save_stage(split(traced("mlp"), even(traced("mlp").graph, 1))[0], Path(folder) / "stage")
        forge(Path(folder) / "stage", change)
        with suppress(PlanError):
            load_stage(Path(folder) / "stage")


def test_weights_of_another_stage_are_refused(tmp_path):
    model = traced("mlp")
    ops = [op.name for op in model.graph.ops]
    saved_and_loaded(split(model, [ops[:4], ops[4:8], ops[8:]]), tmp_path)
    (tmp_path / "0" / WEIGHTS).replace(tmp_path / "1" / WEIGHTS)
    with pytest.raises(PlanError, match=r"belongs to another stage|bytes are expected|truncated"):
        load_stage(tmp_path / "1")


def test_saving_again_replaces_the_folder_and_leaves_nothing_beside_it(tmp_path):
    model = traced("mlp")
    first, last = split(model, even(model.graph, 2))
    save_stage(first, tmp_path / "stage")
    (tmp_path / "stage" / "prepared.onnx").write_text("old")
    save_stage(last, tmp_path / "stage")
    assert load_stage(tmp_path / "stage").ops == last.ops
    assert [path.name for path in tmp_path.iterdir()] == ["stage"]
    assert sorted(path.name for path in (tmp_path / "stage").iterdir()) == ["stage.json", WEIGHTS]


def before_a_stage_is_put_in_place(monkeypatch, place, act):
    """Acts once, just before a folder that is not there is made by moving another one to its place."""
    waiting = [act]

    def acting_before(move):
        def moved(path, target):
            if Path(target) == place and not place.exists() and waiting:
                waiting.pop()()
            return move(path, target)

        return moved

    monkeypatch.setattr(Path, "rename", acting_before(Path.rename))
    monkeypatch.setattr(Path, "replace", acting_before(Path.replace))
    return waiting


def test_a_stage_that_cannot_be_put_in_place_leaves_the_old_one(tmp_path, monkeypatch):
    model = traced("mlp")
    first, last = split(model, even(model.graph, 2))
    save_stage(first, tmp_path / "stage")

    def fail():
        raise OSError(errno.EIO, "the disk is gone")

    before_a_stage_is_put_in_place(monkeypatch, tmp_path / "stage", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        save_stage(last, tmp_path / "stage")
    assert load_stage(tmp_path / "stage").ops == first.ops
    assert [path.name for path in tmp_path.iterdir()] == ["stage"]


def test_a_writer_that_comes_second_replaces_what_the_first_one_wrote(tmp_path, monkeypatch):
    model = traced("mlp")
    first, last = split(model, even(model.graph, 2))
    save_stage(first, tmp_path / "stage")
    save_stage(first, tmp_path / "other")
    waiting = before_a_stage_is_put_in_place(
        monkeypatch, tmp_path / "stage", lambda: shutil.copytree(tmp_path / "other", tmp_path / "stage")
    )
    save_stage(last, tmp_path / "stage")
    assert not waiting and load_stage(tmp_path / "stage").ops == last.ops
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "stage"]


def test_many_writers_at_once_leave_one_whole_stage(tmp_path):
    program = split(traced("mlp"), even(traced("mlp").graph, 1))[0]
    with ThreadPoolExecutor(4) as writers:
        list(writers.map(lambda _: save_stage(program, tmp_path / "stage"), range(40)))
    assert load_stage(tmp_path / "stage").ops == program.ops
    assert [path.name for path in tmp_path.iterdir()] == ["stage"]


def test_a_file_in_the_place_of_a_stage_is_left_alone(tmp_path):
    program = split(traced("mlp"), even(traced("mlp").graph, 1))[0]
    (tmp_path / "stage").write_text("mine")
    with pytest.raises(NotADirectoryError):
        save_stage(program, tmp_path / "stage")
    assert (tmp_path / "stage").read_text() == "mine" and [path.name for path in tmp_path.iterdir()] == ["stage"]


def test_a_weights_file_that_would_run_code_is_refused(tmp_path):
    model = traced("mlp")
    saved_and_loaded(split(model, even(model.graph, 1)), tmp_path)

    class Harmful:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"stage": "", "weights": Harmful()}, tmp_path / "0" / WEIGHTS)
    size = (tmp_path / "0" / WEIGHTS).stat().st_size
    spoil(tmp_path / "0" / "stage.json", lambda data: data.update(weights_file_bytes=size))
    with pytest.raises(PlanError, match="cannot be read"):
        load_stage(tmp_path / "0")
    assert not (tmp_path / "ran").exists()


def test_stage_on_another_device():
    model = traced("odd")
    program = split(model, [[op.name for op in model.graph.ops]])[0]
    moved = place_stage(program, "meta")
    assert all(tensor.device.type == "meta" for tensor in moved.weights.values())
    outputs = moved.module(*(torch.empty(spec.shape, device="meta") for spec in moved.inputs))
    assert all(output.device.type == "meta" for output in outputs)
    assert [tuple(output.shape) for output in outputs] == [spec.shape for spec in program.outputs]
    assert_same(run_stages([program], model), reference(model))


def test_what_is_made_of_nothing_is_made_on_the_other_device():
    """The trace says that ``arange`` lies in host memory, and is made here to say nothing of the window."""

    class Windowed(nn.Module):
        def forward(self, x):
            return x * torch.hann_window(8) + torch.arange(8) + x.new_ones(8)

    model = trace(load_model(Windowed().eval(), inputs=(torch.randn(2, 8),)))
    [program] = split(model, [[op.name for op in model.graph.ops]])
    next(node for node in program.module.graph.nodes if node.name == "hann_window").kwargs = {}
    moved = place_stage(program, "meta")
    made = [node for node in moved.module.graph.nodes if node.op == "call_function" and not node.all_input_nodes]
    assert [(node.name, str(node.kwargs["device"])) for node in made] == [("hann_window", "meta"), ("arange", "meta")]
    assert moved.module(torch.empty(2, 8, device="meta"))[0].device.type == "meta"
