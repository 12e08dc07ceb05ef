"""Exports: a plan is written as a configuration or a script for another trainer, and checked before it is saved.

In the order of the data:

- run.py: the entry; renders a target, checks it, writes its files;
- base.py: what all targets share;
- document.py: the plan as a short document, for the next two;
- json_file.py, yaml_file.py: the targets `json` and `yaml`;
- transformers_arguments.py: the target `transformers` (its keys are in transformers_keys.json);
- transformers_companion.py: the Python module of that target;
- pytorch_script.py: the target `pytorch`;
- model_summary.py, source_text.py: what the script takes from the model, and from autoplan's own source files;
- pytorch_workload.py, pytorch_training.py: the sections of the script.
"""
