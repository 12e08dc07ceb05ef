"""Trials: one configuration is measured for real, in its own processes; every end is an outcome with a reason.

In the order of the data:

- runner.py: starts a trial and makes the Trial record of what came back (runs in the planner);
- request.py: what a trial is asked and what its ranks answer;
- worker.py: a trial as its ranks run it;
- step_timer.py: times the steps, whole or in parts;
- rank_sync.py: the slowest rank's times for all ranks;
- device_monitor.py: memory peaks, throttling and compilations while a trial runs;
- measure.py: statistics of the times;
- failures.py: from exceptions to outcomes.
"""
