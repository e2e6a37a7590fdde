"""Planners: from a problem and demands on the plan to blocks of ops on devices, with a bound on every plan.

``portfolio.solve`` is the entry; ``pareto`` asks it for a front. Each kind of problem has a folder with a map of its own:

    noncontiguous/   any ops on any device: hypergraph partitioning, with bounds by column generation
    contiguous/      chains of blocks: dynamic programs along one order and over all orders
    cpsat/           integer programs for rules that the other planners cannot express: links by pair, pools, shared devices
    latency/         one sample as soon as possible: list scheduling, annealing, a bound from paths and branches

All folders share these modules:

    incumbent        the best plan and bound of one solve, to which every planner adds
    instance         the problem under its demands as compressed rows: groups of ops with one decision each, nets, classes
    loads            compressed rows, the load of a block while items are added to it, the latency of a row of blocks, compiled
    bounds           a lower bound for all plans, from compute alone
    device_usage     the devices that a prefix of a chain has taken, as a number
    clusters         the same problem with fewer ops; topological orders
    delays           the least time between two ops on different devices, and the critical path
    row_annealing    annealing by the true evaluator, for rules that the compiled searches do not know
    wired            plans for several hosts, whose values share network cards
    feasibility      necessary conditions of a plan, checked without a search and without a solver
    infeasible       small sets of constraints that cannot hold together, in words
    warming          compilation of the inner loops ahead of time (``autosplit.jit``)
"""
