"""Which values share memory: views, and results that may be written over an input. Found by a pass over fake tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import fx

from autosplit.compat.torchparts import FakeTensor, FakeTensorMode
from autosplit.memory.stages import ValueMemory
from autosplit.tracing.capturing import Traced
from autosplit.tracing.flattening import is_op, is_pick
from autosplit.tracing.programs import Observer, weight, weight_names
from autosplit.tracing.tensorspec import extent_bytes, fake_mode


@dataclass(frozen=True)
class Aliases:
    """How the values of a model share memory.

    Attributes:
        views: value to the value or weight that its op reads and whose memory it shares.
        overwrites: value to the inputs of its op that it may be written over: the op reads each element of the input once, before
            it writes that element (torch's tag ``pointwise``), and both have one layout.
        num_bytes: bytes of memory from the first to the last element of each value.
    """

    views: Mapping[str, str]
    overwrites: Mapping[str, tuple[str, ...]]
    num_bytes: Mapping[str, int]


_FOUND: "WeakKeyDictionary[Traced, Aliases]" = WeakKeyDictionary()


def aliases_of(traced: Traced) -> Aliases:
    """The aliases of a model, found once. Nothing is computed: a fake tensor has strides and a storage, but no numbers."""
    if traced not in _FOUND:
        _FOUND[traced] = _found(traced)
    return _FOUND[traced]


def values_of(traced: Traced, variants: Sequence[Traced] = ()) -> ValueMemory:
    """The memory of a model's values, also at the sizes of ``variants``, whose values share memory as its own do."""
    aliases = aliases_of(traced)
    others = tuple({name: extent_bytes(spec) for name, spec in one.specs.items()} for one in variants)
    return ValueMemory(aliases.num_bytes, aliases.views, others)


def _found(traced: Traced) -> Aliases:
    owner: dict[fx.Node, int] = {}
    views: dict[str, str] = {}
    kept: list[torch.UntypedStorage] = []

    def see(node: fx.Node, value: object) -> None:
        if not isinstance(value, torch.Tensor):
            return
        kept.append(value.untyped_storage())  # else another storage may get its id
        owner[node] = id(kept[-1])
        sources = node.all_input_nodes[0].all_input_nodes if is_pick(node) else node.all_input_nodes
        for source in sources:
            if owner.get(source) == owner[node]:
                views[node.name] = str(source.target) if source.op == "get_attr" else source.name

    with fake_mode(traced.example_inputs) as mode, torch.inference_mode():
        inputs = [_fake(mode, tensor) for tensor in traced.example_inputs]
        Observer(_with_fake_weights(traced.program, mode), see).run(*inputs)
    specs, overwrites = traced.specs, dict[str, tuple[str, ...]]()
    for node in traced.program.graph.nodes:
        if is_op(node) and node.name in specs and torch.Tag.pointwise in getattr(node.target, "tags", ()):
            mine = (specs[node.name].shape, specs[node.name].stride, specs[node.name].dtype)
            sources = [source.name for source in node.all_input_nodes if source.name in specs]
            alike = [name for name in sources if (specs[name].shape, specs[name].stride, specs[name].dtype) == mine]
            storages = {source.name: owner[source] for source in node.all_input_nodes if source in owner}
            crossed = {storage for name, storage in storages.items() if name not in alike}
            alike = [name for name in alike if storages[name] not in crossed]
            if alike and node.name not in views:
                overwrites[node.name] = tuple(alike)
    num_bytes = {name: extent_bytes(spec) for name, spec in specs.items()}
    return Aliases(views, overwrites, num_bytes)


def _fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor, static_shapes=True)


def _with_fake_weights(program: fx.GraphModule, mode: FakeTensorMode) -> fx.GraphModule:
    """The program with fake weights, which take no memory."""
    weights = {name: weight(program, name).detach() for name in weight_names(program.graph)}
    fakes = {name: _fake(mode, tensor) for name, tensor in weights.items()}
    return fx.GraphModule(fakes, program.graph)
