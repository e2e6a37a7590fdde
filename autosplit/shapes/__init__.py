"""Requests of any size within a range, on the variants of one plan.

::

    batching   which waiting requests to join, at which variant; padding them, and cutting answers apart
    service    ShapedService: takes requests of any size
"""
