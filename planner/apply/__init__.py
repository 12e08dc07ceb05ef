"""Applies a plan: to parts of a training, to a Trainer, a loop, a LightningModule, a step.

- prepare.py: what `plan.prepare` does, and what every verb asks before a plan meets code;
- parts.py: the workload that a plan is applied to;
- trainer.py: what `plan.apply_to(trainer)` does; trainer_build.py makes the Trainer anew, trainer_speed.py times it;
- loops.py: what `plan.apply_to` does for a loop, a LightningModule and a step;
- trainer_arguments.py, lightning_arguments.py: a configuration as another trainer's arguments, for the exports too;
- key_tables.py, keys/: the names of another tool's settings, per version.
"""
