"""Serve networks: several pipelines on one machine, their callers, their configs, and how they fare.

::

    hostmanager     HostManager: networks are added, run and removed while others run
    devicemanager   DeviceManager: memory and health of one device; replicas on idle ones
    limit           Limit: most requests without an answer, and the policy beyond
    session         Session: a pipeline one step at a time
    chaining        Chain: networks one behind the other
    metrics         counters and gauges for Prometheus
    pipelineconfig  PipelineConfig: modules joined by name; pipelinefile: its folder, which can be moved
"""
