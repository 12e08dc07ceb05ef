"""How a training does beside its plan, while it runs.

    meter.py        Meter: steps and pauses in; every window, figures and causes out; the loggers that take them
    causes.py       why a window fell short: compiling, loading, larger batches, what else ran, what differs
    loop.py         watch(plan): for loops of one's own

The watchers of Lightning and of Trainer and TRL are in autoplan/frameworks/. The meter reads a clock at each step and
everything else once a window, so it costs nothing that can be measured (docs/running.md has the figure).
"""
