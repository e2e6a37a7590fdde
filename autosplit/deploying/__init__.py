"""A plan on the machine: its stages are prepared, opened as a pipeline, checked, and compared with the baselines.

Modules in the order of the steps::

    setup          Setup and Budget: how the calls measure and plan, and their limits of time
    networks       places the stages of a plan and opens them as a network; replanning: for the devices that are left
    footprints     measures the memory of stages
    service        Service: a plan as a running model, and the tensors of a call
    compiling      compiles a model in a process of its own, within a time limit
    checking       compares answers with the unsplit model; microbatching: whether requests may be cut
    bench          plans that are loaded side by side, and the measurements of one round of them
    mixing         several models in one mix of requests
    contest        which baselines are loaded beside a plan and how many rounds each runs; comparing: which plan to use
"""
