"""Export targets, one runtime a file: each writes the stages of a plan for a runtime that runs them without autosplit.

::

    base             Target and Job; the folder that appears whole or not at all; the cost of a target's rules
    *_script, *_app  files that are copied into an export as they are, and import nothing of autosplit
    onnx_stages      reads the ONNX stages of another tool back, as a split to be judged
    all others       a target each; base.TARGETS lists them
"""
