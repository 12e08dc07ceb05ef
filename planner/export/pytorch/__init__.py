"""The target `pytorch`: a plain script, for one rank or several.

- pytorch_script.py: the target;
- pytorch_workload.py, pytorch_training.py, pytorch_step.py: the sections of the script;
- pytorch_ranks.py: its sections for several ranks.
"""
