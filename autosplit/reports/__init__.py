"""What was measured while plans ran, as values, and what running hosts say of themselves. No torch.

``results`` are the figures of one run, ``runreport`` a plan beside the baselines and which to use, ``accuracy`` predicted
beside measured over all runs; ``status`` is a locked file for each running host, ``health`` what happened between two looks.
"""
