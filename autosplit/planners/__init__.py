"""Planners: one algorithm a file, all from problem and demands to blocks; ``portfolio.solve`` chooses and proves."""
