"""Exports: a plan is written as a configuration or a script for another trainer, and checked before it is saved.

- run.py: the entry; renders a target, checks it, writes its files;
- base.py: what all targets share, and which of them carry what another one refuses;
- kit/: the code that exports copy, as real modules; bundle.py: copies it, with all that it uses of autoplan's source;
  companion.py: the constants that it asks, of a plan and of the workload's training, and a whole module of these;
- user_code.py: what exports run of other people's code, behind limits;
- documents.py: the targets `json` and `yaml`; pytorch.py: `pytorch`; launch.py: `torchrun` and `slurm`; ray.py: `ray`;
- accelerate.py, deepspeed.py, lightning.py (`lightning` and `fabric`), transformers.py (`transformers` and `trl`):
  modules for loops and trainers, with what the tool reads;
- torchtitan.py, megatron.py: recipes of trainers with models of their own; pretraining.py: what both share.
"""
