"""Plans as a service of HTTP: other programs send requests by the Open Inference Protocol, version 2, or by OpenAI's interface.

The modules, in the order of their use::

    tensors       the protocol's tensors, as JSON or binary, to torch tensors and back
    limits        ServerLimits: bytes, seconds and connections
    repository    models by name: plan files loaded into one HostManager, replaced while requests run
    failures      errors as a status and a sentence
    bodies        bodies of requests, within limits for each and for all together
    connections   connections that say nothing are closed, and no more are taken than the limit
    completions   completions as OpenAI's interface writes them: requests and answers
    completing    its routes: a request becomes sequences of a generator, whose tokens are streamed
    application   the routes, as a Starlette application; livepage.html: the page at "/"
    server        WebServer: serves until SIGTERM or Ctrl-C, and ends within a limit
    load          load on any server of the protocol, for ``autosplit bench``

The extra ``autosplit[serve]`` installs starlette, uvicorn and prometheus-client.
"""
