"""Charge the time of a runtime's own nodes to the ops of the graph.

A runtime fuses ops, renames and reorders them. Its node is matched to ops by the names it kept (of nodes or of values), else
by its place in the order of execution and its kind. Ops that no node bears the name of were fused into one downstream: they
share its time with it, as eager took theirs. What cannot be placed at all is shared out over the whole graph that way.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from autosplit.backends.profiling import RuntimeNode
from autosplit.values.graph import Graph
from autosplit.values.samples import Samples

MATCHED_LEAST = 0.5
"""Below this share of the time matched by name, the runtime's nodes say too little, and the whole is shared out."""

_GENERATED_SUFFIX = re.compile(r"(_nchwc|_quantized)$")
_HOW = re.compile(r"^(skip|fused|bias|fast|quick|simplified|embed(?=layer)|reduce|global|safe)+(?=.)|[123]d(withindices)?$")
"""What a name says of the way in which the work is done; the rest of it is the work."""
_SHORT = {"normalization": "norm", "average": "avg", "deconvolution": "convtranspose", "convolution": "conv"}
_ALIKE = {
    "transpose": ("permute", "numpyt", "t"),
    "reshape": ("view", "unsafeview", "flatten", "unsqueeze", "squeeze", "expand"),
    "gemm": ("linear", "addmm", "matmul", "mm"),
    "matmul": ("linear", "bmm", "baddbmm", "addmm", "mm", "scaleddotproductattention"),
    "attention": ("scaleddotproductattention",),
    "mvn": ("layernorm",),
    "fullyconnected": ("linear", "addmm", "matmul", "mm"),
    "mean": ("adaptiveavgpool",),
    "avgpool": ("adaptiveavgpool",),
    "pooling": ("maxpool", "avgpool", "adaptiveavgpool"),
    "concat": ("cat",),
    "concatenation": ("cat",),
    "split": ("splitwithsizes", "chunk"),
    "pad": ("constantpadnd", "reflectionpad", "replicationpad"),
    "upsample": ("upsamplenearest", "upsamplebilinear", "upsamplebicubic"),
    "resize": ("upsamplenearest", "upsamplebilinear", "upsamplebicubic"),
    "gather": ("embedding", "index", "indexselect", "select"),
    "gatherelements": ("gather",),
}
"""A kind of node to the operators of another name whose work it does, both as ``_work`` calls them."""


def attribute(
    graph: Graph, nodes: Sequence[RuntimeNode], aliases: Mapping[str, str], weights: Mapping[str, float]
) -> tuple[dict[str, Samples], str]:
    """Seconds of every op from the times of a runtime's nodes.

    Args:
        graph: the model.
        nodes: what ran, in the order of execution.
        aliases: a name that the runtime may have kept (of a node or a value in the file it loaded) to an op's name.
        weights: op name to the seconds that eager took, by which fused ops share.
    Returns:
        Op name to samples, one a pass, and the source: ``profiler``, or ``proportional`` if too little could be matched.
    """
    passes = min((len(node.samples_s) for node in nodes), default=0)
    found = [_named(node, aliases) for node in nodes]
    usual_s = [median(node.samples_s) if passes else 0.0 for node in nodes]  # one stretched sample must not outweigh the rest
    total = sum(usual_s)
    matched = sum(seconds for seconds, ops in zip(usual_s, found, strict=True) if ops)
    if not passes or matched < MATCHED_LEAST * total:
        return proportional(
            graph, [sum(node.samples_s[i] for node in nodes) for i in range(passes)] or [0.0], weights
        ), "proportional"
    anchors = _placed(graph, nodes, found)
    groups = _groups(graph, anchors)
    seconds: dict[str, list[float]] = {op.name: [0.0] * passes for op in graph.ops}
    for node, group in zip(nodes, groups, strict=True):
        for op, share in _shares(group or [op.name for op in graph.ops], weights):
            seconds[op] = [old + share * new for old, new in zip(seconds[op], node.samples_s, strict=False)]
    return {op: Samples(tuple(values)) for op, values in seconds.items()}, "profiler"


def without_stretched(nodes: Sequence[RuntimeNode], slice_s: float) -> list[RuntimeNode]:
    """The nodes without the samples that another process's time slice stretched, as many for each node.

    Args:
        nodes: what ran on a core that was not free.
        slice_s: a sample that is longer than the node's shortest by more than this was stretched.
    """
    kept = [[value for value in node.samples_s if value <= min(node.samples_s) + slice_s] for node in nodes]
    count = min((len(values) for values in kept), default=0)
    return [replace(node, samples_s=tuple(values[:count])) for node, values in zip(nodes, kept, strict=True)]


def proportional(graph: Graph, whole_s: Iterable[float], weights: Mapping[str, float]) -> dict[str, Samples]:
    """The samples of the whole model shared out over its ops as eager took them."""
    passes = list(whole_s)
    shares = _shares([op.name for op in graph.ops], weights)
    return {op: Samples(tuple(share * whole for whole in passes)) for op, share in shares}


def value_aliases(graph: Graph) -> dict[str, str]:
    """The names that every op goes by in a file exported from the graph: its own, and those of its values."""
    return {**graph.producer, **{op.name: op.name for op in graph.ops}}


def _named(node: RuntimeNode, aliases: Mapping[str, str]) -> list[str]:
    """The ops whose names the node kept."""
    found = []
    for name in node.origins or (node.name,):
        for piece in (name, *re.split(r"[/ ]", name)):
            op = aliases.get(piece) or aliases.get(_GENERATED_SUFFIX.sub("", piece))
            if op:
                found.append(op)
                break
    return list(dict.fromkeys(found))


def _placed(graph: Graph, nodes: Sequence[RuntimeNode], found: Sequence[list[str]]) -> list[list[str]]:
    """The ops of each node; one without a name takes an op of its kind between its neighbours, else the op before it."""
    covered = {op for ops in found for op in ops}
    placed = []
    last = -1
    for position, (node, ops) in enumerate(zip(nodes, found, strict=True)):
        if not ops:
            following = (max(graph.index[op] for op in later) for later in found[position + 1 :] if later)
            until = next((index for index in following if index > last), len(graph.ops))
            candidates = [
                op.name for op in graph.ops[last + 1 : until] if op.name not in covered and _alike(node.kind, op.operator)
            ]
            ops = candidates[:1] or ([graph.ops[last].name] if last >= 0 else [])
            covered.update(ops)
        last = max([last, *(graph.index[op] for op in ops)])
        placed.append(ops)
    return placed


def _groups(graph: Graph, anchors: Sequence[list[str]]) -> list[list[str]]:
    """Each node's ops with those fused into them: the unclaimed ops found by walking towards the inputs."""
    claimed = {op for ops in anchors for op in ops}
    order = sorted(range(len(anchors)), key=lambda i: max((graph.index[op] for op in anchors[i]), default=-1))
    groups: list[list[str]] = [list(ops) for ops in anchors]
    for i in order:
        waiting = list(groups[i])
        while waiting:
            op = graph.ops[graph.index[waiting.pop()]]
            for value in op.inputs:
                source = graph.producer.get(value)
                if source is not None and source not in claimed:
                    claimed.add(source)
                    groups[i].append(source)
                    waiting.append(source)
    return groups


def _shares(ops: Sequence[str], weights: Mapping[str, float]) -> list[tuple[str, float]]:
    total = sum(weights.get(op, 0.0) for op in ops)
    return [(op, weights.get(op, 0.0) / total if total > 0 else 1 / len(ops)) for op in ops]


def _alike(kind: str, operator: str) -> bool:
    """Whether a runtime's kind of node does the work of an operator, such as SkipLayerNormalization and aten.layer_norm."""
    parts = operator.split(".")
    done, wanted = _work(kind), _work(parts[1] if len(parts) > 1 else operator)
    return done == wanted or wanted in _ALIKE.get(done, ())


def _work(name: str) -> str:
    """What a kind of node or an operator does. Parts of a word do not count: MatMul has nothing to do with mul.

    >>> _work("SkipLayerNormalization"), _work("layer_norm"), _work("FusedConv"), _work("conv2d"), _work("ReduceMean")
    ('layernorm', 'layernorm', 'conv', 'conv', 'mean')
    """
    name = re.sub(r"[^a-z0-9]", "", name.lower())
    for long, short in _SHORT.items():
        name = name.replace(long, short)
    return _HOW.sub("", name)
