"""Any ops on any device: a partition of a hypergraph whose largest load is small, and a proof that none is smaller.

``partitioning`` is the entry. It runs the search and the proof side by side; they share plans and bounds.

    hypergraph          the problem without order: items, nets and the cost of a net for a device whose border it crosses

Search (``row_annealing`` goes on where a hypergraph does not say all):

    local_search        iterated local search (Lourenço, Martin and Stützle, 2003) over coarse and fine graphs
    resplitting         its neighbourhood: the items of two devices divided anew by a dynamic program

Proof:

    column_generation   bounds from prices on items (Gilmore and Gomory, 1961; Wentges, 1997)
    pricing             its subproblem: the set of most value that one device holds

Both are dynamic programs over ``sweeps`` along the items, on which few nets are open.
"""
