"""Pipeline parallelism: schedules as data, their cost before they run, and balanced stages.

    schedule.py    what an action and a schedule are; torch's text form reads and prints
    builders.py    gpipe, 1f1b, interleaved, zero_bubble, zbv, dualpipev, and one's own
    checking.py    complete, in order, sends matched, free of deadlock; or an error that says where
    timeline.py    when each action runs: bubble, makespan, live activations; where sends stand
    drawing.py     a timeline as text, on matplotlib Axes, and as a table in a notebook
    partition.py   a list of layers cut into contiguous, optimally balanced stages

Nothing is re-exported here, because `timeline` and `partition` would each be a module and a
function under one name. The rooms import nothing but the standard library; matplotlib and rich
load when something is drawn.
"""
