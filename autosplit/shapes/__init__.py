"""Requests of any size within a range, on the variants of one plan.

::

    buckets    which sizes get a variant, from measured times and the traffic
    rowcheck   whether the rows of a request are independent
    batching   which waiting requests to join, at which variant; padding them, and cutting answers apart
    joining    JoiningTransport: batches of requests on an engine of variants
    service    ShapedService: an engine over it, called as the model is
    pipelines  open_pipeline: a plan as a service, for requests of one size or of any size
    timing     few sizes are timed, by variants and by one program for every size, and the faster way is chosen
    profiles   ops get mean seconds under the traffic for the planner
    contest    a plan beside its baselines under the traffic
"""
