"""Put every op of a model on a device: by hand, by cost, or both. Copies between devices are ops of the placed graph.

sites         Site: device, backend and precision of an op; Choice: a site with its reason
patterns      a map of patterns, and explicit copies in the model, become choices; every fault at once
moves         the copies that a placement needs, and the graph with them as ops
parts         the connected parts on each device: the stages of a pipeline
costs         seconds of an op on its device and on others
storages      the memory plan of each device
drawing       DOT, and a picture with a colour for each device
interpreting  run a placed graph in this process, with a thread for each device
placed        Placed: the placed graph; text, table, why an op is where it is, as a plan
precisions    the error of parts in a lower precision against f32
refusals      ops that their device cannot run fall back
rules         rules of accelerators: number and size of subgraphs
"""
