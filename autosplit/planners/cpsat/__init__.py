"""Integer programs for CP-SAT: everything that the other planners cannot say, for problems of moderate size, with a bound.

integer_program     the entry: chooses items and the number of blocks, solves, and says which bound the answer proves
stage_model         loads and transfers of each block; every plan found is evaluated, and excluded if the model says less
                    (logic-based Benders decomposition, Hooker and Ottosson, 2003)
slots               which item is in which block, and on which devices each block runs
stage_times         how long a block takes and when it may begin
sharing             one way for each of several tenants of the same resources
solver              the solver's settings
"""
