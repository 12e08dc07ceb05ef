"""Exports: a plan is written as a configuration or a script for another trainer, and checked before it is saved.

In the order of the data:

- run.py: the entry; renders a target, checks it, writes its files;
- base.py: what all targets share; user_code.py: what of them runs the user's code, behind its limits;
- variables.py: the environment variables of a plan's ranks;
- nearest.py: which targets carry what another one refuses;
- document.py: the plan as a short document, for the next two;
- json_file.py, yaml_file.py: the targets `json` and `yaml`;
- model_summary.py, source_text.py: what a script takes from the model, and from autoplan's own source files;
- model_preparation.py, optimizer_source.py: what the modules for other trainers share: `prepare_model` and
  `make_optimizers`;
- pytorch/: the target `pytorch`; launch/: `torchrun`, `slurm` and `ray`, which start its script;
- trainers/: the targets `transformers` and `trl`;
- loops/: the targets `accelerate` and `deepspeed`;
- lightning/: the targets `lightning` and `fabric`;
- pretraining/: the targets `torchtitan` and `megatron`.
"""
