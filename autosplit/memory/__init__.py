"""Plan the memory of values: which live at once, and at which offset of an arena each is. No torch.

lives      Step, Life: when each storage is live; views own none, an op may write over an input that dies
arena      Storage, MemoryPlan: offsets in an arena with the bound on all plans, and one verify()
offsets    greedy plans: first fit, the largest storage first
slots      how many slots rings have, and how many requests are in flight
stages     the memory of each stage of a plan; account: the stages of one model, measured where they can be run
packing    an exact plan by CP-SAT (AddNoOverlap2D), within a time limit
"""
