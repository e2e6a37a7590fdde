"""The devices of this machine, and a worker process pinned to each.

::

    limits        the cores and the memory that this process may use
    accelerators  the interface of devices with memory and queues of their own; cuda: the calls of torch behind it
    processes     a pinned worker that dies with its host; forking: the process that workers are forked from
    calls         typed calls in a worker: the one way to ask it for something
    discovering   the devices found, as a Machine
"""
