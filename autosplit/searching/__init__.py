"""Plan, measure the plan's stages as they run, correct the profile, plan again; then try settings that only a run can judge.

``loop`` is the search from the question to the answer, and ``hunt`` runs its candidates. ``correcting`` puts the seconds that
workers took into the profile. ``candidates`` holds the question of a search and the plans that it tried. ``tuning`` gives Optuna
the choices, and keeps its study in a file. ``precisions`` estimates the gain of other precisions on accelerators.
"""
