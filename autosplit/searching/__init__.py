"""Plan, measure the plan's stages as they run, correct the profile, plan again; then try what only running can tell.

``loop`` is that loop. ``correcting`` puts what workers took into the profile, ``candidates`` is what the planner is asked for
and what was looked at, ``tuning`` the same choice in Optuna's terms.
"""
