"""What goes in and what comes out, as frozen values that can be written and read, with one ``verify()`` each. No torch.

In the order in which they are made::

    graph        Graph: ops in topological order, values on the edges, weights
    machine      Device, Link, Machine; machinefile: as a file that a person writes
    samples      Setting, Samples, Measured, Provenance: what one measurement is
    profile      Profile: samples of ops, stages and links, medians when read; fitting: ops that agree with measured stages
    constraints  Constraints: pins, forbids, colocations, counts, latency limit; what an op pattern means
    plan         Stage, Plan, Prediction; explanation: why it is no faster; planfile: plan.yaml
    timeline     what happens when, predicted or measured, with views and a Chrome trace
"""
