"""What a plan costs: a graph, a profile and constraints as arrays, and the one evaluator of an answer. No torch.

``problem`` holds the arrays, ``cost`` evaluates and verifies, ``simulation`` plays the requests event by event, ``schedule`` does
so for plans and for solutions, and ``workloads`` reads the problems of other planners.
"""
