"""The values that each op of a stage may get: ranges of integers, and whether a float may be NaN, infinite or huge.

A forward pass over the graph with intervals. Inputs that only index a table have the range of that table, because a request
with another index fails there. Ops on constants run as they are.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import fx

from autosplit.tracing.flattening import is_pick
from autosplit.tracing.indexlimits import Limits, base_name, index_limits
from autosplit.tracing.programs import weight

INT32 = torch.iinfo(torch.int32)

Assumed = Literal["any", "ids", "narrow"]
"""Assumptions on requests: none; floats are finite and ids in their tables; and also integers of 64 bits are at most
``INPUT_LIMIT``. Backends check those on integers, request by request."""

INPUT_LIMIT = 1 << 30
"""Largest size of an integer of 64 bits that a request brings to a backend which computes with 32 bits."""

HUGE = 1e30
"""A float of this size stands for infinity: masks are made of the least number of a type."""

MOST_CONSTANTS = 1 << 20
"""Largest number of elements of a constant that is computed."""

MOVING = (
    {"view", "reshape", "_unsafe_view", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze"}
    | {"slice", "select", "split", "split_with_sizes", "chunk", "unbind", "narrow", "unfold", "diagonal"}
    | {"clone", "contiguous", "alias", "detach", "flip", "roll", "repeat"}
)
"""Operators that only move values, through which a limit of an index holds for the value that it was made of."""

CASTING = ("_to_copy", "to", "type_as")

KEEPING = MOVING | {"index_select", "gather", "index", "take", "max", "min", "amax", "amin", "sort", "cummax", "cummin"}
"""Operators whose values are among those of their first argument."""


class Range(NamedTuple):
    """The least and the largest value of an integer, beyond its dtype if it wraps round, and how strange a float may be.

    ``strange`` is 0 for finite floats, 1 for a mask that leaves an element of each row, 2 for anything. ``fixed``
    values are the same for all requests.
    """

    low: float
    high: float
    strange: int = 0
    fixed: bool = False

    def within(self, limits: tuple[float, float]) -> bool:
        """Whether all values are within limits."""
        return limits[0] <= self.low and self.high <= limits[1]

    def joined(self, other: "Range") -> "Range":
        """The values of both."""
        return Range(min(self.low, other.low), max(self.high, other.high), max(self.strange, other.strange))


FLOAT = Range(-math.inf, math.inf)

_KNOWN = "autosplit_ranges"
"""Attribute of a graph that keeps its ranges: nodes refer to their graph, so elsewhere they would keep it for ever."""


def shape_of(node: fx.Node) -> Sequence[int]:
    """The shape of a node's value."""
    return tuple(node.meta["val"].shape)


def ranges(program: fx.GraphModule, assumed: Assumed) -> dict[fx.Node, Range]:
    """The values of each tensor of a graph whose nodes carry shapes and dtypes in ``meta["val"]``."""
    limits = {} if assumed == "any" else input_limits(program.graph)
    found: dict[fx.Node, Range] = {}
    constants: dict[fx.Node, Any] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            found[node] = _of_input(value.dtype, limits.get(node.name), assumed)
        elif node.op == "get_attr":
            constants[node] = weight(program, str(node.target)).detach()
        elif node.op == "call_function":
            made = _computed(node, constants) if all(source in constants for source in node.all_input_nodes) else None
            if made is not None:
                constants[node] = made
            else:
                first = value[0] if isinstance(value, list | tuple) else value
                found[node] = _of_op(node, first.dtype, found, constants)
        if node in constants:
            found[node] = _of_constant(constants[node])._replace(fixed=True)
    return found


def values_of(program: fx.GraphModule, assumed: Assumed) -> dict[fx.Node, Range]:
    """``ranges`` of a program, computed once; empty if its nodes do not carry shapes and dtypes."""
    held: dict[Assumed, dict[fx.Node, Range]] = vars(program.graph).setdefault(_KNOWN, {})
    if assumed not in held:
        told = all(node.meta.get("val") is not None for node in program.graph.nodes if node.op != "output")
        held[assumed] = ranges(program, assumed) if told else {}
    return held[assumed]


def assumed_limits(program: fx.GraphModule, values: Collection[str]) -> dict[str, dict[str, Limits]]:
    """For ``ids`` and ``narrow`` the integers that each of these values may hold, where that rests on the assumption."""
    nodes = [node for node in program.graph.nodes if node.name in values and node.op != "output"]
    free, found = values_of(program, "any"), dict[str, dict[str, Limits]]()
    nodes = [node for node in nodes if node in free]
    for assumed in ("ids", "narrow"):
        known = values_of(program, assumed)
        narrower = [node for node in nodes if known[node][:2] != free[node][:2]]
        found[assumed] = {node.name: (int(known[node].low), int(known[node].high)) for node in narrower}
    return found


def input_limits(graph: fx.Graph) -> dict[str, Limits]:
    """Input name to the values that it may hold, for each input that reaches an index unchanged."""
    found: dict[str, Limits] = {}
    for node in graph.nodes:
        for index, (low, high) in index_limits(node, shape_of).items() if node.op == "call_function" else ():
            source = index
            while base_name(source) in MOVING or is_pick(source) or _widens(source):
                source = source.all_input_nodes[0]
            if source.op == "placeholder":
                known = found.get(source.name, (low, high))
                found[source.name] = max(low, known[0]), min(high, known[1])
    return found


def _widens(node: fx.Node) -> bool:
    """Whether an op casts an integer to a wider one."""
    if base_name(node) not in CASTING:
        return False
    source, made = (one.meta["val"].dtype for one in (node.all_input_nodes[0], node))
    return not source.is_floating_point and not made.is_floating_point and made.itemsize >= source.itemsize > 0 != made.is_complex


def _of_input(dtype: torch.dtype, limits: Limits | None, assumed: Assumed) -> Range:
    if limits is not None:
        return Range(*limits)
    if dtype == torch.int64 and assumed == "narrow":
        return Range(-INPUT_LIMIT, INPUT_LIMIT)
    return full(dtype, strange=2 if assumed == "any" else 0)


def full(dtype: torch.dtype, strange: int = 2) -> Range:
    """All values of a dtype."""
    if dtype == torch.bool:
        return Range(0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        return FLOAT._replace(strange=strange)
    info = torch.iinfo(dtype)
    return Range(info.min, info.max)


def _computed(node: fx.Node, constants: Mapping[fx.Node, Any]) -> Any:
    """The value of an op on constants; None if it is large or fails."""
    parts = [*[constants[source] for source in node.all_input_nodes], node.meta.get("val")]
    if any(part.numel() > MOST_CONSTANTS for part in parts if isinstance(part, torch.Tensor)):
        return None
    try:
        with torch.no_grad():
            target: Callable[..., Any] = node.target  # type: ignore[assignment]
            return target(*fx.map_arg(node.args, constants.__getitem__), **fx.map_arg(node.kwargs, constants.__getitem__))
    except Exception:
        return None


def _of_constant(value: Any) -> Range:
    if not isinstance(value, torch.Tensor):
        return FLOAT
    if value.dtype.is_floating_point or value.dtype.is_complex:
        if value.numel() > MOST_CONSTANTS or value.itemsize == 1:  # a weight: it is finite, or the network computes nothing
            return FLOAT
        if value.numel() and not value.dtype.is_complex:  # one pass, which a NaN passes through
            low, high = value.aminmax()
            if bool(low > -HUGE) and bool(high < HUGE):
                return FLOAT
        usual = value.abs().double() < HUGE
        if bool(usual.all()):
            return FLOAT
        masked = value.dim() and bool(usual.any(-1).all()) and not bool(value.isnan().any()) and not bool((value > HUGE).any())
        return FLOAT._replace(strange=1 if masked else 2)
    if not value.numel():
        return Range(0, 0)
    low, high = value.long().aminmax()
    return Range(int(low), int(high))


def _of_op(node: fx.Node, dtype: torch.dtype, known: Mapping[fx.Node, Range], constants: Mapping[fx.Node, Any]) -> Range:
    """The values of an op, from those of its arguments."""
    if dtype == torch.bool:
        return Range(0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        return FLOAT._replace(strange=_strangeness(node, known, constants))
    found = _of_integers(node, known)
    return full(dtype) if found is None else found._replace(fixed=False)


def _strangeness(node: fx.Node, known: Mapping[fx.Node, Range], constants: Mapping[fx.Node, Any]) -> int:
    """Masks of minus infinity, or of the least number of a type, are followed to the softmax that reads them."""
    name, args = base_name(node), node.args
    sources = [known[source].strange for source in node.all_input_nodes if source in known]
    worst = max(sources, default=0)
    if (name in ("softmax", "_softmax", "_safe_softmax") and worst == 1) or name == "nan_to_num":
        return 0
    if name == "scaled_dot_product_attention":  # a row that is masked whole gives 0
        return max((known[source].strange for source in args[:3] if source in known), default=0)  # type: ignore[index]
    scalars = [item for item in _scalars((*args, *node.kwargs.values())) if isinstance(item, float)]
    if any(not abs(item) < HUGE for item in scalars):
        mask = constants.get(args[1]) if name == "masked_fill" else None  # type: ignore[arg-type]
        partly = isinstance(mask, torch.Tensor) and mask.dim() and not bool(mask.all(-1).any())
        finite = all(math.isfinite(item) for item in scalars)
        return max(worst, 1 if (partly or finite) and not worst else 2)
    return 2 if sources.count(1) > 1 and name in ("add", "sub", "mul") else worst


def _scalars(args: Any) -> Iterator[Any]:
    for item in args if isinstance(args, list | tuple) else [args]:
        if isinstance(item, list | tuple):
            yield from _scalars(item)
        else:
            yield item


def _of_integers(node: fx.Node, known: Mapping[fx.Node, Range]) -> Range | None:
    """The integers that an op makes, before they wrap round; None if no rule is known."""
    name, args = base_name(node), node.args

    def of(item: Any) -> Range:
        if isinstance(item, fx.Node):
            found, dtype = known.get(item, FLOAT), item.meta["val"].dtype
            return full(dtype) if dtype.is_floating_point or not found.within((full(dtype).low, full(dtype).high)) else found
        return Range(item, item) if isinstance(item, bool | int) else FLOAT

    if is_pick(node):
        maker: Any = args[0]
        if base_name(maker) in ("max", "min", "sort", "topk", "cummax", "cummin") and args[1] == 1:
            return Range(0, max([1, *shape_of(maker.all_input_nodes[0])]) - 1)
        return known.get(maker)
    if name in ("zeros_like", "new_zeros", "ones_like", "new_ones"):
        return Range(1, 1) if "ones" in name else Range(0, 0)
    if name in KEEPING or name in ("topk", *CASTING):
        found = of(args[0])
        return found if math.isfinite(found.low) else None
    if name in ("argmax", "argmin", "argsort"):
        return Range(0, max(1, math.prod(shape_of(args[0]))) - 1)  # type: ignore[arg-type]
    if name in ("cat", "stack", "where", "maximum", "minimum", "masked_fill", "constant_pad_nd", "tril", "triu"):
        parts = args[0] if isinstance(args[0], list | tuple) else args[1:3] if name == "where" else [args[0]]
        joined = [of(part) for part in parts]
        joined += [of(args[1])] if name in ("maximum", "minimum") else [of(args[2])] if name == "masked_fill" else []
        joined += [of(args[2]) if len(args) > 2 else Range(0, 0)] if name == "constant_pad_nd" else []
        joined += [Range(0, 0)] if name in ("tril", "triu") else []
        return _finite(joined[0], *joined[1:])
    return _of_arithmetic(name, node, of)


def _finite(first: Range, *others: Range) -> Range | None:
    for other in others:
        first = first.joined(other)
    return first if math.isfinite(first.low) and math.isfinite(first.high) else None


def _of_arithmetic(name: str, node: fx.Node, of: Callable[[Any], Range]) -> Range | None:
    args: Any = node.args
    one = of(args[0]) if args else FLOAT
    if name == "clamp":
        given: list[Any] = [*args[1:3], None, None]
        given = [node.kwargs.get("min", given[0]), node.kwargs.get("max", given[1])]
        low, high = (bound if value is None else value for value, bound in zip(given, (-math.inf, math.inf), strict=True))
        if isinstance(low, fx.Node) or isinstance(high, fx.Node):
            return None
        return _finite(Range(min(max(one.low, low), high), min(max(one.high, low), high)))
    if name in ("sum", "cumsum", "abs", "neg", "bitwise_not") and math.isfinite(one.low):
        num = max(1, math.prod(shape_of(args[0]))) if name in ("sum", "cumsum") else 1
        most = max(abs(one.low), abs(one.high)) * num + (name == "bitwise_not")
        return Range(0 if name == "abs" or (num > 1 and one.low >= 0) else -most, most)
    if len(args) < 2 or not all(map(math.isfinite, (*one[:2], *of(args[1])[:2]))):
        return None
    return _of_two(name, one, of(args[1]), node.kwargs.get("alpha", 1))


def _of_two(name: str, a: Range, b: Range, alpha: Any) -> Range | None:
    """The integers that an op makes of two."""
    match name:
        case "add" | "sub" | "rsub" if isinstance(alpha, int):
            a, b = (b, a) if name == "rsub" else (a, b)
            scaled = sorted((b.low * alpha, b.high * alpha))
            low, high = scaled if name == "add" else (-scaled[1], -scaled[0])
            return Range(a.low + low, a.high + high)
        case "mul":
            corners = [x * y for x in a[:2] for y in b[:2]]
            return Range(min(corners), max(corners))
        case "remainder" | "fmod":
            most = max(abs(b.low), abs(b.high)) - 1
            return Range(-most if (b.low if name == "remainder" else a.low) < 0 else 0, most)
        case "floor_divide" | "div":
            most = max(abs(a.low), abs(a.high))
            return Range(-most - 1 if min(a.low, b.low) < 0 else 0, most)
        case "bitwise_and" | "bitwise_or" | "bitwise_xor" if min(a.low, b.low) >= 0:
            return Range(0, (1 << int(max(a.high, b.high)).bit_length()) - 1)
    return None
