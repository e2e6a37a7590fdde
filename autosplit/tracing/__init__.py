"""A model becomes a graph, and its stages programs of their own.

The way of a model, a module a step::

    loading      a spec becomes a module with inputs; modelspec: its options; architectures: the classes of transformers
    flattening   an exported program becomes one flat, functional fx graph
    capturing    trace(): Traced, that graph with the torch-free Graph of it
    splitting    split(): a StageProgram a stage, in memory and in a folder; weightsfile: its weights, to be mapped

``tensorspec`` says what a tensor looks like in memory, ``differing`` how far one is from another, ``programs`` writes fx graphs
as JSON.
"""
