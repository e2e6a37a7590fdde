"""The cost of a plan: problems as arrays, and the one evaluator of their solutions. No torch.

problem      ops, devices, transfers and rules as arrays; blocks and solutions
wires        what values between hosts share
cost         evaluates blocks: loads, latency, memory
faults       the rules that blocks break, and the check of an answer
simulation   discrete-event simulation of stages, rings and devices
schedule     simulates plans and solutions, and sums the result up
workloads    reads the problems of other planners
"""
