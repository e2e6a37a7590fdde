"""Requests of any size within a range, on the variants of one plan.

::

    buckets    which sizes get a variant, from measured times and the traffic
    mixing     profiles at several sizes as one, for the planner
    batching   which waiting requests to join, at which variant; padding them, and cutting answers apart
    service    ShapedService: takes requests of any size
    contest    plans run beside each other under the traffic
"""
