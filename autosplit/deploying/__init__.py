"""A plan on the machine: its stages prepared, opened as a pipeline, checked, and compared with the baselines.

A module a step::

    workspace      saves and prepares stages, places them, opens pipelines
    compiling      a model compiled apart, within a limit
    checking       what answers must be like; microbatching: whether requests may be cut
    bench          plans loaded side by side; comparing: their interleaved rounds, and which one to use
    baselines      what runs beside a plan, and why some does not
"""
