"""Generation: models that go on with sequences of tokens, whose keys and values stay in the stages that made them.

::

    sampling   settings of a sequence, and the operator that chooses its next token
    rows       attention of single tokens, in machine code
    attention  the operator attend, and KVCache, the memory that it writes
    decoders   a model becomes a step: N tokens of any sequences in, their next tokens out
    sources    what the encoder of a model reads: ids of a text, or features of a sound
    encoders   an encoder-decoder becomes a step: prompts run through the encoder beside tokens of answers
    rewriting  steps in which no encoder runs, and rows of tokens that the host looks up where the head has the table
    steps      a step traced at several sizes, and how often each comes
    sequences  a sequence from its prompt to its last token, and the steps that compute it
    scheduler  which tokens of which sequences run in the next step
    tallies    what the sequences of a generator took
    texts      text to token ids and back, by the tokenizer in the folder of a checkpoint
    generators Generator: takes sequences from any thread, as futures, lists or streams
    hostcost   what a step costs beside its stages, measured with one that only reads memory
    phases     the ops of a step, measured in both phases: decoding and prompts
    forecast   the rates and times of a plan: the scheduler on a clock of its own
    bounds     what bounds each phase: computing, reading weights or caches, sending, the host
    choosing   the plan with the best forecast within the limits of the sequences
    sidebyside SideBySide: the replicas of a plan as one generator
    opening    open_generator: a plan as a running generator
    trials     a plan beside the usual ways, in rounds of the same sequences
"""
