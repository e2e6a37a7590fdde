"""Generation: models that go on with sequences of tokens, on the stages of one plan.

::

    sampling   settings of a sequence, and the operator that chooses its next token
"""
