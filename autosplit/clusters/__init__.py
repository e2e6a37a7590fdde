"""Several hosts as one machine: agents on Ray, tensors over TCP, and one pipeline over all of them.

::

    sockets         whole buffers and texts from a socket, within a time limit
    handshake       how two hosts connect: each proves that it knows the secret of the run
    listener        accepts connections, and keeps strangers from holding it up
    frames          a connection between two hosts: frames of tensors, credits
    hostlinks       latency and bandwidth of such a connection
    segments        the stages of a plan, cut into one segment for each visit to a host
    runningsegment  the pipeline of a segment between two connections
    agent           one process a host, which runs its segments and measures it
    localnodes      Ray nodes on this machine, for trying a cluster out
    raynodes        the nodes of a Ray cluster, and the agents on them
    hostprofile     the profiles of all hosts as one
    fleet           Fleet: the hosts, their agents, and the machine that they are together
    hostsdeployment HostsDeployment: the stages on their hosts, and the events that come back
    hoststransport  HostsTransport: requests that are under way over hosts; HostsPipeline: an Engine over them
    cluster         Cluster: a Fleet that profiles models and runs plans

Ray finds the hosts, starts and ends the agents, and carries stage files. No request passes it: a stage on a host hands its
outputs to the agent there, which sends them to the next host over one plain TCP connection.
"""
