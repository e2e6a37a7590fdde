"""Graph: the ops of a model in topological order, the values between them and the weights they read. No torch.

An op produces one or more values and reads values and weights. A value is a tensor that may cross a cut: it has one
producer (or is an input of the graph), a shape, a dtype and a size. Tuple-returning operators own the values picked from their
tuple, so a cut never carries a tuple.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from autosplit import tables
from autosplit.arguments import checked
from autosplit.errors import GraphError, PlanError, raise_faults
from autosplit.files import content_hash, from_plain
from autosplit.parsing import MALFORMED

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor on an edge, or a weight: a parameter, buffer or constant. Two ops that name a weight share one copy on a device.

    ``shape`` counts elements; ``num_bytes`` is the size of the dense tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Op:
    """One call of an operator.

    ``inputs`` and ``outputs`` name values, ``weights`` name weights, ``module`` is the path of the module it came from
    ('' for the root). Two ops with one ``signature`` do the same work: operator, shapes, dtypes, strides and attributes.
    """

    name: str
    operator: str
    module: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...]
    signature: str


@checked
@dataclass(frozen=True)
class Graph(tables.Tabular):
    """A model as planners see it: frozen, torch-free, in topological order."""

    INDEX = "op"
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    ops: tuple[Op, ...]
    values: Mapping[str, Value]
    weights: Mapping[str, Value]

    @cached_property
    def producer(self) -> dict[str, str]:
        """Value name to the name of the op that makes it; graph inputs are absent."""
        return {value: op.name for op in self.ops for value in op.outputs}

    @cached_property
    def consumers(self) -> dict[str, tuple[str, ...]]:
        """Value name to the names of the ops that read it, each once, in graph order."""
        readers: dict[str, list[str]] = {value: [] for value in self.values}
        for op in self.ops:
            for value in dict.fromkeys(op.inputs):
                readers[value].append(op.name)
        return {value: tuple(ops) for value, ops in readers.items()}

    @cached_property
    def index(self) -> dict[str, int]:
        """Op name to its position in topological order."""
        return {op.name: position for position, op in enumerate(self.ops)}

    @cached_property
    def hash(self) -> str:
        """Identity of structure, shapes and dtypes; the weights' contents and the name are not part of it."""
        data = self.to_dict()
        return content_hash({key: data[key] for key in ("inputs", "outputs", "ops", "values", "weights")})

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, each once."""
        return sum(weight.num_bytes for weight in self.weights.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of all weights and values of a pass, each once. Of an embedding only the rows that are looked up count."""
        others = {name for op in self.ops if "embedding" not in op.operator for name in op.weights}
        tables = {name for op in self.ops if "embedding" in op.operator for name in op.weights} - others
        weights = (weight.num_bytes for name, weight in self.weights.items() if name not in tables)
        return sum(weights) + sum(value.num_bytes for value in self.values.values())

    def stage_bytes(self, ops: tuple[str, ...]) -> int:
        """Bytes of the weights that the named ops read, each once."""
        return sum(self.weights[name].num_bytes for name in {name for op in ops for name in self.ops[self.index[op]].weights})

    def own_bytes(self, ops: Iterable[str]) -> tuple[list[int], int]:
        """For each named op the bytes of weights that no other op reads, and the bytes of their other weights together."""
        readers = Counter(name for op in self.ops for name in dict.fromkeys(op.weights))
        read = [dict.fromkeys(self.ops[self.index[op]].weights) for op in ops]
        own = [sum(self.weights[name].num_bytes for name in names if readers[name] == 1) for names in read]
        shared = {name for names in read for name in names if readers[name] > 1}
        return own, sum(self.weights[name].num_bytes for name in shared)

    def runs(self, ops: Iterable[str], label: Mapping[str, object]) -> list[tuple[str, ...]]:
        """The named ops in few sets with one label each; a set reads only from itself and from the sets before it.

        Each set takes as many ops as it can. The search begins with each label in turn and returns the fewest sets.
        """
        wanted = [self.ops[position] for position in sorted(self.index[name] for name in ops)]
        maker = {value: number for number, op in enumerate(wanted) for value in op.outputs}
        readers: list[list[int]] = [[] for _ in wanted]
        for number, op in enumerate(wanted):
            for value in op.inputs:
                if value in maker:
                    readers[maker[value]].append(number)
        return [tuple(wanted[op].name for op in run) for run in few_runs([label[op.name] for op in wanted], readers)]

    def verify(self) -> "Graph":
        """Return the graph, or raise GraphError with every fault: names used twice, values read before they are made."""
        faults = []
        made = set(self.inputs)
        seen: set[str] = set()
        for op in self.ops:
            if op.name in seen:
                faults.append(f"op '{op.name}' stands twice")
            seen.add(op.name)
            faults += [f"op '{op.name}' reads '{value}' before any op makes it" for value in op.inputs if value not in made]
            faults += [f"op '{op.name}' reads unknown weight '{name}'" for name in op.weights if name not in self.weights]
            for value in op.outputs:
                if value in made:
                    faults.append(f"value '{value}' is made twice, the second time by op '{op.name}'")
                if value not in self.values:
                    faults.append(f"op '{op.name}' makes '{value}', whose shape is not known")
                made.add(value)
        faults += [f"output '{value}' is made by no op" for value in self.outputs if value not in made]
        faults += [f"input '{value}' has no known shape" for value in self.inputs if value not in self.values]
        if not self.ops:
            faults.append("it has no ops")
        raise_faults(GraphError, f"graph '{self.name}' does not verify", faults)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "schema": SCHEMA,
            "name": self.name,
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
            "ops": [asdict(op) for op in self.ops],
            "values": [asdict(value) for value in self.values.values()],
            "weights": [asdict(weight) for weight in self.weights.values()],
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "Graph":
        """The inverse of to_dict. Raises: GraphError: a field is missing or of another type, or the graph does not verify."""
        try:
            named = {
                "values": {value["name"]: value for value in data["values"]},
                "weights": {weight["name"]: weight for weight in data["weights"]},
            }
            return from_plain(Graph, {**data, **named}).verify()
        except MALFORMED as failure:
            raise GraphError(f"graph data is incomplete: {failure}") from None

    def rows(self) -> list[dict[str, Any]]:
        """One row an op: name, operator, module, weight bytes, output bytes."""
        return [
            {
                "op": op.name,
                "operator": op.operator,
                "module": op.module,
                "weight_bytes": sum(self.weights[name].num_bytes for name in op.weights),
                "output_bytes": sum(self.values[name].num_bytes for name in op.outputs),
            }
            for op in self.ops
        ]

    def _repr_html_(self) -> str:
        size = tables.bytes_text(self.weight_bytes)
        return tables.html(self.rows(), f"{self.name}: {len(self.ops)} ops, {size} of weights")

    def __repr__(self) -> str:
        return f"Graph({self.name!r}, {len(self.ops)} ops, {tables.bytes_text(self.weight_bytes)} of weights, {self.hash})"


def few_runs(labels: Sequence[object], readers: Sequence[Sequence[int]]) -> list[list[int]]:
    """The ops in few sets, as ``Graph.runs``, by their numbers.

    Args:
        labels: the label of each op; an op stands behind those that it reads.
    """
    return min((_runs_from(first, labels, readers) for first in dict.fromkeys(labels)), key=len, default=[])


def _runs_from(current: object, labels: Sequence[object], readers: Sequence[Sequence[int]]) -> list[list[int]]:
    found, waiting = list[list[int]](), list(range(len(labels)))
    while waiting:
        taken, left, late = list[int](), list[int](), set[int]()
        for op in waiting:
            if labels[op] == current and op not in late:
                taken.append(op)
            else:
                left.append(op)
                late.update(readers[op])
        if taken:
            found.append(taken)
        waiting, current = left, labels[left[0]] if left else None
    return found


def check_graph(graph_hash: str, graph: Graph) -> None:
    """Raise PlanError unless a plan made for ``graph_hash`` is for this graph."""
    if graph_hash != graph.hash:
        raise PlanError(
            f"the plan was made for graph {graph_hash}, and '{graph.name}' is {graph.hash}: another model, another batch size or "
            "sequence length, or other versions. Search again."
        )
