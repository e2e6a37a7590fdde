"""A graph, a profile and constraints become plans; ``planners`` only ever sees the ``Problem`` between them. No torch.

``alternatives`` are the baselines to run a model, as plans. ``plans`` asks the planner once for each choice of backends,
``recutting`` finds the next best cuts, ``explaining`` says why a plan is no faster.
"""
