"""How a training does beside its plan, while it runs.

    meter.py        Meter: steps and pauses in; every window, figures and causes out
    causes.py       why a window fell short: compiling, loading, larger batches, what else ran, what differs
    sinks.py        where the figures go: W&B's run, a SummaryWriter
    loop.py         watch(plan): for loops of one's own
    transformers.py TransformersWatch: for Trainer and TRL
    lightning.py    LightningWatch: for Lightning's Trainer

The meter reads a clock at each step and everything else once a window, so it costs nothing that can be measured
(docs/running.md has the figure).
"""
