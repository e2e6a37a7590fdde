"""Run stages in worker processes that are joined by rings in shared memory.

The modules, in the order of their use::

    modules         what a worker can run: StageFolder, PythonFunction, LocalFunction
    stage           StagePlacement: a stage, the same value from the plan to the worker
    wiring          wire(): stages to channels
    ring            shared memory: tensors, from one sender to one receiver; copying: into and out of it
    statusblock     shared memory: deadlines and priorities of requests, and the state of each worker
    messages        what the host and a worker say to each other
    inbox           the requests that lie ready for a worker, where they may overtake each other
    stageworker     the loop of one stage replica: messages, requests; nullworker: the same loop in a thread
    stagerings      a worker's ends of its rings; lookahead: requests begun early; versions: a stage's weights
    provisioner     puts the stages on their devices, all or none
    executor        one thread that takes results and sees to workers; it owns what follows
    admission       which requests are fed, wait in the queue or are refused
    inflight        the requests between the first stage and their answer; lanes: their numbers
    hostrings       the host's ends of the rings: InputRings, ResultRings
    answers         gives answers to callers; request: one request; flow: where requests are
    recovery        kills hanging workers, replaces dead ones and replays; restarts: when; keptfiles: the files they need
    pipeline        Pipeline: all of it for one network; swapping: its weights while it runs
    buffer          Buffer: the inputs of a request, filled in the ring
    engine          Engine: what a Pipeline and an InProcess share; intake: tensors become a request; feed: what runs it
    inprocess       InProcess: one stage in the caller's process, without rings
    awaiting        awaits requests in event loops
    localexecutor   runs the requests of an InProcess; stagecopy: the stage, loaded there
    monitor         latency, times and health of a running pipeline
    recording       record(): what a pipeline did, as a timeline

Several networks, batches, chains and configs of pipelines are in ``serving``, which imports this package.

In code::

    stages = [
        StagePlacement("stage0", StageFolder(folder, "eager"), program.inputs, program.outputs, devices=(device,), threads=1),
        ...
    ]
    with Pipeline(stages, inputs=graph.inputs, outputs=graph.outputs) as pipeline:
        answers = pipeline.run_many(requests)        # a request is a sequence of tensors; answers in order
        for answer in pipeline.stream(requests):     # for any number of requests: few are in memory at a time
            ...
        future = pipeline.submit(request, priority=0, deadline_s=None, timeout_s=None)
        with pipeline.buffer() as buffer:            # inputs to fill in place: in the ring, without a copy
            future = buffer.submit()
        stats = pipeline.stats(clear=True)           # results.RunStats: latency, busy / wait / transfer of each worker
        live = pipeline.health()                     # state and sums of each worker, read without asking it
        trace = chrome_trace(predicted, record(pipeline))

``devices`` holds one device for each replica. A worker that dies is replaced and its requests run again; if it dies again and
again, every request fails with WorkerError. If an op raises, its request fails with StageError. When the ``with`` block ends,
by Ctrl-C too, no process and no descriptor is left.

By default a pipeline has ``sum(replicas * (1 + queue_depth // 2))`` requests in flight, and the same number may wait in the
admission queue; then ``submit`` blocks, or refuses after ``timeout_s``. A stage that runs one request for 300 s has hung.
"""
