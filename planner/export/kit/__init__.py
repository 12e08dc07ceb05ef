"""The modules that the exports copy: they are type-checked and tested as code, and an export takes them as they are.

- settings.py: the constants that they ask, at the plain run's values; an export has those of its plan instead;
- model.py: what a plan changes inside of a model, for every export; sharding;
- script.py: the target `pytorch`: a whole training;
- loop.py: the targets `accelerate`, `fabric` and `deepspeed`: an optimizer step of a loop of one's own; the Trainer's
  callback of `lightning`.

An `if` that asks settings alone is decided when the export is written: planner/export/bundle.py leaves one branch.
"""
