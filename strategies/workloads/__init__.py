"""What is trained: workloads, and where they come from.

workload.py        Workload, LossSum, TrainingModule: the model with its loss
spec.py            WorkloadSpec: a workload by reference, as data
sources.py         specs from what the user gave, workloads from specs
registry.py        the built-in model configurations, by name
language_model.py  workloads of transformers' language models
function_file.py   `file.py:function` workloads
objects.py         workloads from Python objects
batch.py           batches: nests of tensors; size, slices, micro-batches
datasets.py        batches from a user's dataset
optimizers.py      a user's optimizer, made again over other parameters
model_configs/     the built-in configurations, as JSON
"""
