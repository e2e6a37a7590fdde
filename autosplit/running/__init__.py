"""Run stages in worker processes that shared-memory rings join.

The way from a placement to an answer, a module a step::

    modules      what a worker can run: StageFolder, PythonFunction, LocalFunction
    wiring       StagePlacement; wire(): placements to channels
    ring, words  shared memory: tensors; deadlines and the state of each worker
    messages     what the host and a worker say to each other
    inbox        what lies ready for a worker, the most urgent first, where requests may overtake each other
    worker       the loop of one stage replica; threads: the same loop without a process, on null devices
    provisioner  puts the stages on their devices, all or none
    executor     takes requests in, feeds, drains, answers; request: one of them; flow: where they are, and who holds them up
    recovery     kills hanging workers, replaces dead ones and replays
    pipeline     Pipeline: all of it for one network; swapping: its weights, under way
    config       PipelineConfig: modules joined by name; configfile: as a folder that can be moved
    devices      DeviceManager: memory and health of a device
    recording    record(): what a pipeline did, as a timeline
    host         HostManager: several networks on one machine; chaining: one behind the other; metrics: as Prometheus text
    session      Session: a pipeline one step at a time; batching: Batcher, requests of any number of rows (counting: how full)

In code::

    stages = [
        StagePlacement("stage0", StageFolder(folder, "eager"), program.inputs, program.outputs, devices=(device,), threads=1),
        ...
    ]
    with Pipeline(stages, inputs=graph.inputs, outputs=graph.outputs) as pipeline:
        answers = pipeline.run_many(requests)        # a request is a sequence of tensors; answers in order
        for answer in pipeline.stream(requests):     # the same for any number: few requests and answers in memory at a time
            ...
        future = pipeline.submit(request, priority=0, deadline_s=None, timeout_s=None)
        stats = pipeline.stats(clear=True)           # results.RunStats: latency, busy / wait / transfer of each worker
        live = pipeline.health()                     # state and sums of each worker, read without asking it
        trace = chrome_trace(predicted, record(pipeline))

``devices`` holds one device for each replica. A worker that dies is started anew and its requests run again; one that
cannot be kept alive makes every request fail with WorkerError, and an op that raises makes its own request fail with
StageError. Leaving the ``with`` block, by Ctrl-C too, leaves no process and no descriptor.

By default a pipeline has ``sum(replicas * (1 + queue_depth // 2))`` requests in flight and as many may wait at the door;
then ``submit`` blocks, or refuses after ``timeout_s``. A stage that runs one request for 300 s has hung.
"""
