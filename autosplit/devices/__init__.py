"""The devices of this machine: what there is, and a worker process pinned to each.

A module a step::

    limits        what this process may use of the machine
    accelerators  the seam for devices with memory and queues of their own; cuda: the calls of torch behind it
    processes     a pinned worker that dies with its host; forking: the process that workers are forked from
    discovering   the devices found, as a Machine
"""
