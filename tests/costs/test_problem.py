import numpy as np
import pytest
from problems import chain

from autosplit.costs.graphproblem import problem_from
from autosplit.costs.judge import Solution, judge
from autosplit.costs.problem import HOST, Block, Net, Pool, SharedWeight, Transfers
from autosplit.errors import UsageError
from autosplit.values.constraints import Demands, Placement
from autosplit.values.graph import Graph, Op, Value
from autosplit.values.links import Link
from autosplit.values.machine import Device, Machine


def graph() -> Graph:
    """x -> a -> b -> y, where a and b read one weight, and b reads x again."""
    values = {name: Value(name, (4,), "float32", 16) for name in ("x", "h", "y", "unused")}
    ops = (
        Op("a", "mul", "", ("x",), ("h", "unused"), ("tied", "own"), "s"),
        Op("b", "add", "", ("h", "x"), ("y",), ("tied",), "s"),
    )
    weights = {"tied": Value("tied", (2,), "float32", 8), "own": Value("own", (1,), "float32", 4)}
    return Graph("two", ("x",), ("y",), ops, values, weights).verify()


def machine() -> Machine:
    devices = (Device("cpu:0", "cpu", (0,), memory_bytes=100), Device("cpu:1", "cpu", (1,)))
    return Machine.of(devices, [Link("cpu:0", "host", 5.0, 1.0, 2.0, 3.0, 4.0)])


def test_a_graph_on_a_machine():
    problem = problem_from(graph(), machine(), Placement(), machine().devices)
    assert problem.nets == (Net(HOST, (0, 1), 16.0), Net(0, (1,), 16.0), Net(1, (HOST,), 16.0))
    assert problem.order == ((0, 1),)
    assert problem.op_bytes.tolist() == [4.0, 0.0]
    assert [(w.num_bytes, w.users) for w in problem.weights] == [(8, (0, 1))]
    assert problem.memory_bytes.tolist() == [100.0, np.inf]
    assert problem.transfers.send_s_per_byte[0, HOST] == 2.0
    assert problem.transfers.latency_s[0, HOST] == 5.0
    assert problem.device_classes == ((0,), (1,))


def test_barred_pairs_close_devices_and_keep_the_reason():
    barred = {("a", "cpu:0"): "'a' is pinned to 'cpu:1'"}
    problem = problem_from(graph(), machine(), Placement(barred, (("b", "a"),)), machine().devices)
    assert np.isinf(problem.compute_s).tolist() == [[True, False], [False, False]]
    assert problem.reasons == {(0, 0): "op 'a': 'a' is pinned to 'cpu:1'"}
    assert problem.groups == ((0, 1),)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compute_s": np.full((3, 2), np.nan)}, "NaN or a negative"),
        ({"compute_s": np.full((3, 2), -1.0)}, "NaN or a negative"),
        ({"compute_s": np.zeros((2, 2))}, "has shape"),
        ({"nets": (Net(2, (0,), 1.0),)}, "read before it is made"),
        ({"nets": (Net(0, (7,), 1.0),)}, "does not exist"),
        ({"nets": (Net(0, (1,), float("nan")),)}, "0 or more"),
        ({"groups": ((0, 9),)}, "names op number 9"),
        ({"order": ((0, 9),)}, "order names"),
        ({"ops": ("a", "a", "b")}, "one name"),
        ({"nets": (Net(0, (1,), float("inf")),)}, "finite"),
        ({"transfers": Transfers(*(np.full((3, 3), s) for s in (0, 0, 0, 0, np.inf)))}, "holds infinity"),
        ({"weights": (SharedWeight(float("nan"), (0, 1)),)}, "a weight has nan bytes"),
        ({"pools": (Pool((0, 2), 1.0),)}, "device number 2, and there are 2"),
        ({"pools": (Pool((0, 1), float("nan")),)}, "a pool has nan bytes"),
        ({"processors": (2, 2)}, "numbers from 0 to 1 are needed"),
    ],
)
def test_faults_of_a_problem(changes, message):
    with pytest.raises(UsageError, match=message):
        chain([1, 2, 3], **changes)


def test_no_ops_and_no_devices():
    with pytest.raises(UsageError, match="no ops"):
        chain([])
    with pytest.raises(UsageError, match="no devices"):
        chain([1.0], num_devices=0)


def test_devices_are_interchangeable_only_when_everything_is_equal():
    assert chain([1, 2], 3).device_classes == ((0, 1, 2),)
    assert chain([1, 2], 3, memory_bytes=np.array([1.0, 1.0, 2.0])).device_classes == ((0, 1), (2,))
    slow = chain([1, 2], 3)
    slow.transfers.receive_s[0, 2] = 1.0
    assert chain([1, 2], 3, transfers=slow.transfers).device_classes == ((0,), (1,), (2,))


def test_gap_of_a_solution():
    judged = judge(chain([2.0]), Demands(), [Block((0,), (0,))])
    assert Solution(judged, 1.5, "feasible", "x", 0.0).gap == 0.25
    assert Solution(judged, 2.0, "optimal", "x", 0.0).gap == 0.0
