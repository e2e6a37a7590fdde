"""Turn a model into a graph, and the stages of a plan into programs.

A model passes these modules in order::

    loading      make a module with example inputs from a spec (modelspec: its options; architectures: random weights of
                 transformers; checkpoints: trained ones; importing: functions of files and modules)
    flattening   turn an exported program into one flat, functional fx graph (uncuttable: reasons why it cannot be cut)
    verifying    compare the graph with the module
    capturing    trace(): do all of the above, and make the torch-free Graph
    family       trace_family(): do it at several sizes with the same ops (resizing: other numbers in one graph)
    splitting    split(): make a StageProgram for each stage, save it to a folder and load it (weightsfile: its weights)
    freesizes    freed(): a StageProgram that takes every size

``tensorspec`` describes the memory layout of a tensor, ``differing`` computes errors, ``programs`` writes fx graphs as JSON,
``operators`` lists the operators that a stranger's graph may call.
``devicecopies`` finds explicit copies to devices, ``aliasing`` the values that share memory. ``callbinding`` binds a call to the
parameters of the module.
"""
