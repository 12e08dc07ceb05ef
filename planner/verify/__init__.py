"""Does a plan still hold here, and how does a training do beside its plan, while it runs?

    measure.py   parity and a trial of a plan, on this machine; verdict.py: holds, faster, slower, and why
    meter.py     Meter: steps and pauses in; every window, figures and causes out; watch(plan): for loops of one's own
    steps.py     some steps of a plan's own workload, on this machine or on several nodes
    stairs.py    what each technique of a plan gives, from trials; climb.py: the trials for it, and the file

The meter reads a clock at each step and everything else once a window, so it costs nothing that can be measured
(docs/running.md has the figure).
"""
