"""Measurements of plans that ran, as values, and the status of running hosts. No torch.

``results`` are the figures of one run, ``outcomes`` how a plan ran and how it compares, ``judging`` which plan to use,
``runreport`` all of it for a model, ``accuracy`` predicted beside measured over all runs. ``status`` is a file for each
running host, ``health`` the changes between two readings of it.
"""
