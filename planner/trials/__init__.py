"""Trials: one configuration is measured for real, in its own processes; every end is an outcome with a reason.

In the order of the data:

- runner.py: starts a trial and makes the Trial record of what came back (runs in the planner);
- request.py: what a trial is asked and what its ranks answer;
- worker.py: a trial as its ranks run it;
- compile_only.py: compiles a configuration ahead of its trial, and measures nothing;
- batches.py: the batches of a trial, and how many tokens it counts in them;
- first_loss.py: the loss before any update, which has to be the baseline's;
- step_timer.py: times the steps, whole or in parts; step_runner.py runs single ones for it;
- stretches.py: the samples by stretches of the window; disturbed ones are measured again;
- drop.py: when a look ends early, since a bound puts it behind the leader;
- load.py: what others do to the device meanwhile;
- rank_sync.py: the slowest rank's times for all ranks;
- device_monitor.py: memory peaks, throttling and compilations while a trial runs;
- measure.py: statistics of the times;
- failures.py: from exceptions to outcomes.
"""
