"""One sample through the devices as soon as possible, branches side by side.

scheduling          the entry: starts, a bound, annealing (by ``row_annealing`` where rules are more than an order and caps)
list_scheduling     HEFT (Topcuoglu et al., 2002), and blocks from a timetable
order_annealing     annealing over orders of the ops and their devices, compiled (Kirkpatrick et al., 1983)
evaluation          its inner loop: the latency of a row of blocks
segments            a bound from the parts between forks and joins, each by its work or by ``timetable``
cut_vertices        a bound from the bytes of all ops between two ops that every path passes
timetable           job-shop scheduling by CP-SAT, whose optimum is a bound on the latency of a part
"""
