"""Plan, measure the plan's stages as they run, correct the profile, plan again; then try settings that only a run can judge.

``loop`` does this. ``correcting`` puts the seconds that workers took into the profile. ``candidates`` holds the question of a
search and the plans that it tried. ``tuning`` gives Optuna the choices, and ``journal``
keeps its study in a file. ``precisions`` says what another precision would bring on accelerators.
"""
