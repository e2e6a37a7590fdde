"""Generation: sequences of tokens, whose keys and values stay in the stages that made them.

::

    attention  the operator attend, and KVCache, the memory that it writes
    decoders   a model becomes a step: N tokens of any sequences in, their next tokens out
"""
