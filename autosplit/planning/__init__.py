"""Make plans from a graph, a profile and constraints. ``planners`` only see the ``Problem`` made from them. No torch.

predicting   graph and profile as a problem, with the cost of transfers; the prediction of a plan
question     the question to the planner: model, times, machine, backends and demands
backends     choices and mixtures of backends, as problems and as stages
plans        ask the planner, turn its answers into plans with a bound over all mixtures
estimating   seconds on devices that are not here
caps         plans and fronts whose whole memory is within caps
baselines    the usual ways to run a model without a search, as plans
peers        the rules by which other tools split a model, as plans
recutting    the next best cuts of a plan
sharing      a plan for each of several models on one host
explaining   the bottleneck of a plan, and the gain of each change
"""
