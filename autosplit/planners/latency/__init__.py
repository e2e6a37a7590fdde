"""One sample through the devices as soon as possible, branches side by side.

scheduling          the entry: list schedules and other starts, a bound, annealing (``row_annealing`` if rules are more than
                    an order and caps)
order_annealing     annealing over orders of the ops and their devices, compiled (Kirkpatrick et al., 1983)
segments            a bound from the parts between forks and joins: their work, and branches that run in turn
cut_vertices        a bound from the bytes of all ops between two ops that every path passes
"""
