"""The data of the program as frozen values: graph, machine, profile, constraints, plan. No torch.

Each can be written and read, and has one ``verify()``. In the order in which they are made::

    graph        Graph: ops in topological order, values on the edges, weights
    links        Link: a hop between two devices; Wire: a network card, uplink or bus
    machine      Device, Machine; machinefile: as a file that a person writes
    samples      Setting, Samples, Measured, Provenance: one measurement
    fitting      factors with which the seconds of ops agree with those of measured stages
    sequences    Sequences: the traffic of a generator, for its plan and its measurements
    profile      Profile: samples of ops, stages, links and wires of one model, and the seconds that planners take of them
    constraints  Constraints: pins, forbids, colocations, counts, latency limit; the ops that a pattern matches
    placement    the faults of a placement of ops on stages
    residency    which weights of a stage stay on an accelerator, and which are streamed
    plan         Stage, Plan, Prediction; explanation: why a plan is not faster; planfile: plan.yaml
    timeline     actions of stages over time, predicted or measured, with views and a Chrome trace
    dot          graphs and plans in the DOT language of Graphviz
"""
