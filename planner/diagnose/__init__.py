"""Why is a training script slow: each suspected cause is removed while the script runs, and the gain is measured.

records.py        what crosses the processes: Request, Answer; what comes out: Finding, Diagnosis
clock.py          where the time of a step goes: the parts of a step, by the regions that hooks enter and leave
hooks.py          the hooks: optimizer, loader, forward, backward, saving, logging, evaluation, gc
memory.py         memory over the steps, and the names that keep tensors
sandbox.py        what the script would write goes into a folder that is removed
libraries.py      the same for libraries that open files in C; network loggers are off
landlock.py       the kernel refuses what gets past both
switches.py       how each cause is removed while the script runs, and put back
ranks.py          several ranks of a script: what they decide together, and what they exchange
roofline.py       kinds of operations of a traced step, against the rates that the probes measure
suspects.py       which causes are worth removing, by what the first steps showed
gains.py          what removing a cause gave, and whether that is decided
session.py        the course of a script: warm-up, steps as they are, then blocks with and without a cause
worker.py         the process of the script
findings.py       from what was measured to at most five findings
rank_findings.py  what ranks cost each other: a late one, uneven batches, the exchange
run.py            diagnose(): starts the processes, and reads what they found
"""
