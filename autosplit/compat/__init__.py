"""Private interfaces of other packages. No other module uses one; ``tests/compat`` holds that and tries each of them.

The makers of a package may change these in any release. ``tried`` has the versions on which the tests passed; ``needs`` makes
an error with a way out of a part that is gone.

::

    tried        versions, and the error for a part that is gone
    numbacache   numba: the stamp and the index of a cache of machine code
    futures      concurrent.futures: the fields of a Future, so that Ctrl-C and os.fork leave no lock held
    torchparts   torch: operators, fake tensors, containers, weights of an exported program, writes to tensors
    exporter     torch.export: a part that is loaded ahead of the first export
    runtimes     ONNX Runtime, OpenVINO, TorchInductor and torch.onnx: calls below their public classes
    models       transformers: the packages that a class lacks, and how a model computes attention
    raysettings  Ray: settings from the environment, read again
"""
