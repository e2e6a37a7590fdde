"""Plan, measure the plan's stages as they run, correct the profile, plan again; then try what only running can tell.

``loop`` is that loop. ``correcting`` puts the seconds that workers took into the profile. ``candidates`` are what a search is
about and the plans that it tried, ``tuning`` gives Optuna the choices.
"""
