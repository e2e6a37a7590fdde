"""The cost of a plan: problems as arrays, and the one evaluator of their solutions. No torch.

problem       ops, devices, transfers and rules as arrays; blocks
wires         network cards and uplinks that values between hosts share
graphproblem  the problem of putting a graph on a machine
hostways      the way of values over hosts
streaming     the waits of a block for weights that are streamed
cost          evaluates blocks: loads and memory
pieces        the latency of one sample
faults        the rules that blocks break
judge         the one judge: loads, latency and faults of blocks in one value; solutions with their bounds
simulation    discrete-event simulation of stages, rings and devices
schedule      simulates stages and sums the result up
planschedule  simulates the stages of a plan, or the blocks of a solution
workloads     reads the problems of other planners
"""
