"""Targets for the Trainers of Transformers and TRL.

- transformers_arguments.py, trl_arguments.py: the targets `transformers` and `trl`;
- transformers_companion.py: the Python module of both;
- transformers_training.py: what a Trainer's arguments say of the training.
"""
