"""Generation: models that continue sequences of tokens, whose keys and values stay in the stages that made them.

::

    sampling   settings of a sequence, and the operator that chooses its next token
    rows       attention of single tokens, in machine code
    attention  the operator attend, and KVCache, the memory that it writes
    decoders   a model becomes a step: N tokens of any sequences in, their next tokens out
    sources    prompts of an encoder: ids of a text, or features of a sound
    encoders   an encoder-decoder becomes a step: prompts run through the encoder beside tokens of answers
    rewriting  steps in which no encoder runs, and rows of tokens that the host looks up where the head has the table
    steps      a step traced at several sizes, and how often each comes
    sequences  a sequence from its prompt to its last token, and the steps that compute it
    scheduler  which tokens of which sequences run in the next step
    tallies    times of the sequences of a generator
    texts      text to token ids and back, by the tokenizer in the folder of a checkpoint
    turns      sequences become steps of pipelines, one thread at a time
    generators Generator: takes sequences from any thread, as futures, lists, streams or texts
    hostcost   the host's time for a step, measured with a stage that only reads memory
    phases     the ops of a step, measured in both phases: decoding and prompts
    forecast   the rates and times of a plan: the scheduler in simulated time
    bounds     the bottleneck of each phase: computing, reading weights or caches, sending, the host
    choosing   the plan with the best forecast within the limits of the sequences
    opening    open_generator: a plan as a running generator
    firsttokens first tokens judged by their scores
    trials     a plan beside the usual ways, in rounds of the same sequences
"""
