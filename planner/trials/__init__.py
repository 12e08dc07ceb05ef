"""Trials: one configuration is measured for real, in its own processes; every end is an outcome with a reason.

In the order of the data:

- runner.py: starts a trial and makes the Trial record of what came back (runs in the planner);
- request.py: what a trial is asked and what its ranks answer;
- worker.py: a trial as its ranks run it;
- ranks.py: a rank's device and process group; the slowest rank's times for all ranks;
- batches.py: the batches of a trial, and how many tokens it counts in them;
- step_timer.py: times the steps, whole or in parts;
- load.py: what others do to the device meanwhile; disturbed stretches of the window are measured again;
- device_monitor.py: memory peaks, throttling and compilations while a trial runs;
- measure.py: statistics of the times; when a look ends early, since a bound puts it behind the leader.

Beside them, loading.py: a loader beside the step.
"""
