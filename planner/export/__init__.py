"""Exports: a plan is written as a configuration or a script for another trainer, and checked before it is saved.

- run.py: the entry; renders a target, checks it, writes its files;
- base.py: what all targets share; nearest.py: which targets carry what another one refuses;
- kit/: the code that exports copy, as real modules; bundle.py: copies it, with all that it uses of autoplan's source;
  plan_settings.py: the constants that it asks, of a plan; training.py: those of the workload's training;
  companion.py: a whole module of these;
- user_code.py: what exports run of other people's code, behind limits; model_summary.py: what it says of the model;
- document.py, json_file.py, yaml_file.py: the targets `json` and `yaml`;
- pytorch.py: the target `pytorch`; launch/: `torchrun`, `slurm` and `ray`, which start its script; variables.py: the
  environment of their ranks;
- accelerate.py, deepspeed.py, lightning/ (`lightning` and `fabric`), trainers/ (`transformers` and `trl`): modules for
  loops and trainers, with what the tool reads;
- pretraining/: the targets `torchtitan` and `megatron`.
"""
