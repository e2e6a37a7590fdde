"""A plan as a bundle: ready-made parts and one copy of the weights, which run without the model, tracing or a compiler.

Modules in the order of their use::

    bundlecheck  checks a manifest without torch; a copy lies in every bundle, and one of the next module
    driver       fits requests to the variants of a network, and runs a bundle without torch
    manifest     Manifest: the table of parts, and the hash of every file
    weightpool   weights by content; packing: a bundle as one file
    drafting     the files of one part for its backend; nativedriver: C++ sources; bundler: write_bundle()
    bundlepart   a part as a worker loads it
    partchain    all parts as one stage, for the caller's process or one worker; openbundle: load_bundle()
    dumps        every tensor on a cut, and where two runs differ
    crosscheck   answers of a bundle beside the model's; showing: a manifest for people
"""
