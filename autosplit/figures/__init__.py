"""Figures of graphs, plans, schedules and runs. They read values and change none.

Every function returns a new matplotlib figure, made without pyplot: nothing is shown, no global state is touched, and the figure
shows itself as the result of a notebook cell.
"""

from autosplit.figures.graphs import plot_graph, plot_op_costs
from autosplit.figures.planfigures import plot_accuracy, plot_plans, plot_schedule, plot_stage_balance, plot_tradeoff
from autosplit.figures.runfigures import plot_baselines, plot_memory, plot_run

__all__ = [
    "plot_accuracy",
    "plot_baselines",
    "plot_graph",
    "plot_memory",
    "plot_op_costs",
    "plot_plans",
    "plot_run",
    "plot_schedule",
    "plot_stage_balance",
    "plot_tradeoff",
]
