"""Planners: one algorithm a file, all from problem and request to blocks; ``portfolio.solve`` chooses and proves."""
