"""Run stages in worker processes that are joined by rings in shared memory.

The modules, in the order of their use::

    modules         the kinds of stages that a worker can run: StageFolder, PythonFunction, LocalFunction
    stage           StagePlacement: a stage, the same value from the plan to the worker; Variant: the stage at other sizes
    wiring          wire(): stages to channels
    ring            shared memory: tensors, from one sender to one receiver; copying: into and out of it
    statusblock     shared memory: deadlines and numbers of requests, and the state of each worker
    messages        the messages between the host and a worker
    stageworker     the loop of one stage replica: messages, requests; nullworker: the same loop in a thread
    stagerings      a worker's ends of its rings; lookahead: requests that a stage of several at once begins early
    provisioner     puts the stages on their devices, all or none; keptfiles: the files that a restart needs
    request         one request, its future, and its answer
    intake          requests are made of tensors that fit; copies of their inputs while they wait
    waitingroom     the queue of requests, and callers that wait for a place there
    admission       which requests are sent, wait in the queue or are refused; Transport: the protocol that carries them
    inflight        the requests between the first stage and their answer, their numbers, and how many there may be
    hostrings       the host's ends of the rings: InputRings, ResultRings
    flow            places of requests; monitor: their times, times and health of workers
    recovery        kills hanging workers, replaces dead ones, at once or after a pause, and replays
    ringtransport   workers and rings, with one thread that takes results and sees to workers
    localstage      a stage that is loaded in the caller's process; turns: callers compute their requests themselves
    callertransport one stage in the caller's process: several requests at once, in threads of the runtime or one for each copy
    swapping        stages with other weights
    engine          Engine: a network that takes requests, over any transport
    pipeline        Pipeline: an engine over workers; InProcess: an engine over the caller's process
    awaiting        awaits requests in event loops
    recording       record(): the work of a pipeline as a timeline

Several networks, batches, chains and configs of pipelines are in ``serving``, which imports this package.

In code::

    stage = StagePlacement("all", StageFolder(folder, "eager"), program.inputs, program.outputs, devices=(device,))
    with Pipeline([stage], inputs=graph.inputs, outputs=graph.outputs) as pipeline:
        answers = pipeline.run_many(requests)  # a request is a sequence of tensors

``devices`` holds one device for each replica. A worker that dies is replaced and its requests run again; if it dies again and
again, every request fails with WorkerError. If an op raises, its request fails with StageError. When the ``with`` block ends,
by Ctrl-C too, no process and no descriptor is left.

By default a pipeline has ``sum(replicas * (1 + queue_depth // 2))`` requests in flight, and the same number may wait in the
admission queue; then ``submit`` blocks, or refuses after ``timeout_s``. A stage that runs one request for 300 s has hung.
"""
