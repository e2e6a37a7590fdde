"""Put every op of a model on a device: by hand, by cost, or both. Copies between devices are ops of the placed graph.

sites         Site: device, backend and precision of an op; Choice: a site with its reason
patterns      a map of patterns becomes choices; every fault of the map at once
placed        Placed: the placed graph; text, table, why an op is where it is
moves         the copies that a placement needs, and the graph with them as ops
parts         the connected parts on each device: the stages of a pipeline
annotating    annotate(): patterns, explicit copies, default, fallback, planner
interpreting  run a placed graph in this process, with a thread for each device
arenas        the same with an arena for each device, which finds a missing copy; for tests
drawing       DOT, and a picture with a colour for each device
"""
