from autosplit.constraints import Constraints
from autosplit.machine import Machine, parse_device
from autosplit.plan import Plan, Prediction, Source, Stage
from autosplit.searching import Job, Trial, _Hunt

SOURCE = Source("m", 1)


def plan(*stages: Stage) -> Plan:
    return Plan(SOURCE, "graph", "profile", stages, Prediction(1.0, 1.0, 1.0, 0.0, 1.0))


def test_a_pipeline_and_replicas_of_the_best_backend_are_tried_first() -> None:
    job = Job(Machine.of([parse_device("cpu:0"), parse_device("cpu:1")]), SOURCE, Constraints(), ("eager", "onnxruntime"))
    hunt = _Hunt(job, None, None, 1.0, lambda share, text: None)
    hunt.trials.append(Trial({}, plan(Stage("s", ("op",), ("cpu:0", "cpu:1"), "onnxruntime")), 1.0, 1.0))
    tried = [(t["num_stages"], t["replicate"], t["backend"]) for t in hunt._first_trials()]
    assert tried == [(1, True, "onnxruntime"), (2, False, "onnxruntime"), (1, True, "onnxruntime")]
