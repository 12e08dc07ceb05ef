"""Targets that start ranks, each beside the script of `pytorch`.

- torchrun_script.py, slurm_script.py: the targets `torchrun` and `slurm`; launch_script.py: what they share;
- ray_script.py: the target `ray`, whose workers run that script.
"""
