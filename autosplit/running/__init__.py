"""Run stages in worker processes that shared-memory rings join.

The way from a placement to an answer, a module a step::

    modules      what a worker can run: StageFolder, PythonFunction, LocalFunction
    wiring       StagePlacement; wire(): placements to channels
    ring, words  shared memory: tensors, deadlines, states
    worker       the loop of one stage replica; threads: the same loop without a process, on null devices
    provisioner  puts the stages on their devices
    executor     takes requests in, feeds, drains, answers; recovery: replaces dead workers and replays
    pipeline     Pipeline: all of it for one network

In code::

    stages = [
        StagePlacement("stage0", StageFolder(folder, "eager"), program.inputs, program.outputs, devices=(device,), threads=1),
        ...
    ]
    with Pipeline(stages, inputs=graph.inputs, outputs=graph.outputs) as pipeline:
        answers = pipeline.run_many(requests)        # a request is a sequence of tensors; answers in order
        future = pipeline.submit(request, priority=0, deadline_s=None, timeout_s=None)
        stats = pipeline.stats(clear=True)           # results.RunStats: latency, busy / wait / transfer of each worker

``devices`` holds one device for each replica. A worker that dies is started anew and its requests run again; one that
cannot be kept alive makes every request fail with WorkerError, and an op that raises makes its own request fail with
StageError. Leaving the ``with`` block, by Ctrl-C too, leaves no process and no descriptor.
"""
