"""The places of ops on the sheet: to the right of what they read, and never one on another."""

from hypothesis import given
from hypothesis import strategies as st

from autosplit.figures.layout import depths, lay_out
from autosplit.values.graph import Graph, Op, Value


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Random graphs of up to 40 ops; some ops read nothing."""
    names: list[str] = ["x"]
    ops = []
    for number in range(draw(st.integers(1, 40))):
        inputs = tuple(draw(st.lists(st.sampled_from(names), max_size=3, unique=True)))
        ops.append(Op(f"op{number}", "f", "", inputs, (f"op{number}",), (), "s"))
        names.append(f"op{number}")
    return Graph("random", ("x",), (names[-1],), tuple(ops), {n: Value(n, (1,), "float32", 4) for n in names}, {}).verify()


@given(graphs(), st.integers(1, 12))
def test_readers_stand_after_what_they_read_and_no_two_ops_at_one_place(graph: Graph, columns: int) -> None:
    layout = lay_out(graph, columns)
    assert len(set(layout.positions.values())) == len(graph.ops) == len(layout.positions)
    depth = depths(graph)
    for reader in graph.ops:
        for value in reader.inputs:
            if value in graph.producer:
                maker = graph.producer[value]
                assert depth[maker] < depth[reader.name]
                (x0, y0), (x1, y1) = layout.positions[maker], layout.positions[reader.name]
                assert x0 < x1 or y0 < y1
                curves = layout.edges[maker, reader.name]
                assert curves[0][0] == (x0, y0)
                assert curves[-1][-1] == (x1, y1)
    assert all(0 <= x < layout.width <= max(columns, 1) and 0 <= y < layout.height for x, y in layout.positions.values())


def test_an_op_that_reads_nothing_stands_just_before_its_reader() -> None:
    ops = [Op(f"op{n}", "f", "", (f"op{n - 1}",) if n else ("x",), (f"op{n}",), (), "s") for n in range(5)]
    ops += [Op("mask", "f", "", (), ("mask",), (), "s"), Op("last", "f", "", ("op4", "mask"), ("last",), (), "s")]
    values = {n: Value(n, (1,), "float32", 4) for n in ("x", *(op.name for op in ops))}
    depth = depths(Graph("g", ("x",), ("last",), tuple(ops), values, {}).verify())
    assert depth["mask"] == depth["op4"] == depth["last"] - 1
