"""Chains of blocks: each value is read in the block that makes it or in a later one.

    linear                  the best chain along one order of the items: a dynamic program over its prefixes
    downsets                the best chain over all orders, with proof (Tarnawski et al., 2020)
    proving                 calls ``downsets`` between the bound and the best plan until they meet
    chains                  the entry: a first chain in milliseconds, then all of these in turn; chains cut for shared devices

Parts of ``downsets``, all compiled:

    downset_enumeration     walks from a down-set to all larger ones that one block reaches
    downset_table           the down-sets reached, in a hash table, with the best values at each
    pruning                 drops a down-set whose rest does not fit, and a block that has room for an item that is ready
"""
