"""Pipeline parallelism: schedules as data, their cost before they run, and running them.

    schedule.py    what an action and a schedule are; torch's text form reads and prints
    builders.py    gpipe, 1f1b, interleaved, zero_bubble, zbv, dualpipev, and one's own
    checking.py    complete, in order, sends matched, free of deadlock; or an error that says where
    timeline.py    when each action runs: bubble, makespan, live activations; where sends stand
    drawing.py     a timeline as text, on matplotlib Axes, and as a table in a notebook
    partition.py   a list of layers cut into contiguous, optimally balanced stages

    run.py         pipeline: stage functions and a schedule as one function
    work.py        what each F, I, W and B of a schedule does
    split.py       forward, input gradient and weight gradient from one trace of a stage's vjp
    splicing.py    those programs in a trace: their nodes copied for each micro-batch
    parameters.py  the stages' leaves, each once: gathered, and gradients reduced, as schemes say
    staging.py     on processes: each rank holds its own stages' parameters; ties between ranks
    stage_buckets.py  compressed gradients: a bucket for each stage, and for each leaf they share
    exchange.py    on processes: one rank walks its list, with messages beside the computing
    outlines.py    what passes between stages, from a run on fake tensors
    messages.py    messages as operations that a trace keeps

Nothing is re-exported here, because `timeline` and `partition` would each be a module and a
function under one name. Schedules import nothing but the standard library; matplotlib and rich
load when something is drawn.
"""
