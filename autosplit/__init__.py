"""autosplit: split a PyTorch model over the devices of a machine, prove the plan, run it, show measured beside predicted."""
