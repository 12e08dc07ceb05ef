"""Workloads: what is trained, and where it comes from.

workload.py        Workload, LossSum, TrainingModule: the model with its loss
spec.py            WorkloadSpec: a workload by reference, as data
sources.py         specs from what the user gave, workloads from specs
registry.py        configurations of models: built in, by name, and in folders
language_model.py  workloads of transformers' language models
function_file.py   `file.py:function` workloads
objects.py         workloads from Python objects
batch.py           batches: nests of tensors; size, slices, micro-batches on the device that trains
optimizers.py      a user's optimizer, made again over other parameters
frameworks.py      the classes of frameworks' trainings, and the packages in autoplan/frameworks/ that know them
loops/             training loops as people have them; loading/: the dataset of a training
devices.py         where a model is: meta, host memory, the CPU
counting.py        what throughput counts: tokens without padding, or samples
padding.py         whether padding changes what is trained
training_mode.py   how a model is set while it trains: modes, key-value cache, checkpointing of its own
randomness.py      the random generators that a training may draw from
user_errors.py     errors of the user's own functions
digests.py         digests of what is trained; fingerprint.py: by name, so that what changed can be named
data_files.py      the files that a workload reads
model_configs/     the built-in configurations, as JSON
"""
