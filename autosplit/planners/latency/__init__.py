"""One sample through the devices as soon as possible, branches side by side.

scheduling          the entry: starts, annealing, a bound, and annealing again from the bound's timetable
list_scheduling     HEFT (Topcuoglu et al., 2002), and blocks from a timetable
order_annealing     annealing over orders of the ops and their devices, compiled (Kirkpatrick et al., 1983)
row_annealing       annealing over rows of blocks by the true evaluator, where rules are more than an order and caps
evaluation          the latency of a row of blocks, compiled
timetable           job-shop scheduling by CP-SAT; its optimum is a bound on every latency
segments            bounds from the parts between forks and joins
"""
