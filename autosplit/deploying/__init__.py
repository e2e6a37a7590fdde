"""A plan on the machine: its stages are prepared, opened as a pipeline, checked, and compared with the baselines.

Modules in the order of the steps::

    workspace      saves and prepares stages, places them, loads them as a network
    footprints     measures the memory of stages
    setup          Setup and Budget: how the calls measure and plan, and what they may spend
    service        Service: a plan as a running model; calling: the tensors of a call
    compiling      compiles a model in a process of its own, within a time limit
    checking       compares answers with the unsplit model; microbatching: whether requests may be cut
    sidebyside     runs plans side by side
    screening      which baselines are loaded beside a plan; halving: their rounds; comparing: all of it, and which plan to use
"""
