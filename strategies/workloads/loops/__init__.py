"""Training loops as people have them, read into workloads; what is common to any loop serves autoplan/frameworks/ too.

loop.py        a loop's parts, plain or as Accelerate prepared them: read_loop
step.py        a function of one step, of which no part is known: read_step
loader.py      the batches of a DataLoader, the largest samples among them; the same DataLoader with another batch size
mean_loss.py   what a mean loss is over: it is measured
schedules.py   an optimizer at its start, and its schedule, made anew
"""
