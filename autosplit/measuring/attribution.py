"""Turn the times of a runtime's own nodes into times of the graph's ops.

A runtime fuses, renames and reorders ops. A node is matched to ops by the names that it kept (of nodes or values), else by its
place in the order of execution and its kind. An op whose name no node kept was fused into one downstream; they share the
node's time in proportion to their times in eager. A node that matches no op is shared out over the whole graph in this way.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from autosplit.backends.profiling import RuntimeNode
from autosplit.measuring.stage_timer import PREEMPTED_S, Timed
from autosplit.values.graph import Graph
from autosplit.values.samples import Measured, Samples

MATCHED_LEAST = 0.5
"""If a smaller share of the time is matched by name, the runtime's nodes are ignored and the whole is shared out."""

WAITED_LIMIT = 0.03
"""A worker that waited longer than this share of its time for its core was not alone there."""

_HOW = re.compile(r"^(skip|fused|bias|fast|quick|simplified|embed(?=layer)|reduce|global|safe)+(?=.)|[123]d(withindices)?$")
"""Parts of a kind's name that say how the work is done, not which work."""
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
"""Kind of node to operators of another name that do the same work; all names as ``_work`` returns them."""


def measured_of(graph: Graph, backend: str, timed: Timed, names: Mapping[str, str], eager_s: Mapping[str, float]) -> Measured:
    """The measurement of one setting from its timed passes.

    Args:
        graph: the ops that were timed.
        names: a name that the runtime may have kept (of a node or a value in the file it loaded) to an op's name.
        eager_s: op name to the seconds that eager took, by which fused ops share their time.
    """
    whole = rounded(timed.whole_s)
    if backend == "eager":
        pooled: dict[str, list[float]] = {}
        by_op = {node.name: node.samples_s for node in timed.nodes}
        for op in graph.ops:
            pooled.setdefault(op.signature, []).extend(by_op[op.name])
        return Measured({key: rounded(values) for key, values in pooled.items()}, "signature", "in-graph", whole)
    if timed.nodes:
        nodes = without_preempted(timed.nodes, PREEMPTED_S) if timed.waited > WAITED_LIMIT else timed.nodes
        ops, source = attribute(graph, nodes, names, eager_s)
    else:
        ops, source = proportional(graph, timed.whole_s, eager_s), "proportional"
    return Measured({op: rounded(samples.samples_s) for op, samples in ops.items()}, "op", source, whole)


def attribute(
    graph: Graph, nodes: Sequence[RuntimeNode], names: Mapping[str, str], eager_s: Mapping[str, float]
) -> tuple[dict[str, Samples], str]:
    """Samples of every op, one for each pass, and their source: ``profiler``, or ``proportional`` if too little was matched.

    ``nodes`` are in the order of execution; the other arguments are those of ``measured_of``.
    """
    passes = min((len(node.samples_s) for node in nodes), default=0)
    found = [node.ops(names) for node in nodes]
    usual_s = [median(node.samples_s) if passes else 0.0 for node in nodes]  # one stretched sample must not outweigh the rest
    matched = sum(seconds for seconds, ops in zip(usual_s, found, strict=True) if ops)
    if not passes or matched < MATCHED_LEAST * sum(usual_s):
        whole_s = [sum(node.samples_s[i] for node in nodes) for i in range(passes)] or [0.0]
        return proportional(graph, whole_s, eager_s), "proportional"
    groups = _groups(graph, _placed(graph, nodes, found))
    seconds: dict[str, list[float]] = {op.name: [0.0] * passes for op in graph.ops}
    for node, group in zip(nodes, groups, strict=True):
        for op, share in _shares(group or [op.name for op in graph.ops], eager_s):
            seconds[op] = [old + share * new for old, new in zip(seconds[op], node.samples_s, strict=False)]
    return {op: Samples(tuple(values)) for op, values in seconds.items()}, "profiler"


def without_preempted(nodes: Sequence[RuntimeNode], slice_s: float) -> list[RuntimeNode]:
    """The nodes without samples that are over ``slice_s`` longer than the node's shortest: another process had the core.

    Every node keeps the same number of samples.
    """
    kept = [[value for value in node.samples_s if value <= min(node.samples_s) + slice_s] for node in nodes]
    count = min((len(values) for values in kept), default=0)
    return [replace(node, samples_s=tuple(values[:count])) for node, values in zip(nodes, kept, strict=True)]


def proportional(graph: Graph, whole_s: Iterable[float], eager_s: Mapping[str, float]) -> dict[str, Samples]:
    """Samples of the whole model shared out over its ops in proportion to their times in eager."""
    passes = list(whole_s)
    return {op: Samples(tuple(share * whole for whole in passes)) for op, share in _shares([*graph.index], eager_s)}


def value_names(graph: Graph) -> dict[str, str]:
    """The names of each op in a file exported from the graph: its own and those of its values, each to the op's name."""
    return {**graph.producer, **{op.name: op.name for op in graph.ops}}


def rounded(seconds: Iterable[float]) -> Samples:
    """Samples to five significant digits: a clock gives no more, and people read the files."""
    return Samples(tuple(float(f"{value:.5g}") for value in seconds))


def _placed(graph: Graph, nodes: Sequence[RuntimeNode], found: Sequence[list[str]]) -> list[list[str]]:
    """The ops of each node. One without a name takes an op of its kind between its neighbours, else the op before it."""
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
    """Each node's ops and those fused into them: the unclaimed ops on the way towards the inputs."""
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


def _shares(ops: Sequence[str], eager_s: Mapping[str, float]) -> list[tuple[str, float]]:
    total = sum(eager_s.get(op, 0.0) for op in ops)
    return [(op, eager_s.get(op, 0.0) / total if total > 0 else 1 / len(ops)) for op in ops]


def _alike(kind: str, operator: str) -> bool:
    """Whether a runtime's kind of node does the work of an operator, such as SkipLayerNormalization and aten.layer_norm."""
    parts = operator.split(".")
    done, wanted = _work(kind), _work(parts[1] if len(parts) > 1 else operator)
    return done == wanted or wanted in _ALIKE.get(done, ())


def _work(name: str) -> str:
    """The work that a kind of node or an operator does, by whole words: MatMul is not mul.

    >>> _work("SkipLayerNormalization"), _work("layer_norm"), _work("FusedConv"), _work("conv2d"), _work("ReduceMean")
    ('layernorm', 'layernorm', 'conv', 'conv', 'mean')
    """
    name = re.sub(r"[^a-z0-9]", "", name.lower())
    for long, short in _SHORT.items():
        name = name.replace(long, short)
    return _HOW.sub("", name)
