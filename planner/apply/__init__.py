"""Applies a plan: to parts of a training, to a loop, to a step. To trainings of frameworks: autoplan/frameworks/.

- prepare.py: what `plan.prepare` does, and what every verb asks before a plan meets code;
- parts.py: the workload that a plan is applied to;
- loops.py: what `plan.apply_to` does for a loop and a step; loader.py: what `plan.loader` does;
- trainer_arguments.py, lightning_arguments.py: a configuration as another trainer's arguments, for the exports too;
- key_tables.py, keys/: the names of another tool's settings, per version.
"""
