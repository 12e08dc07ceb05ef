"""Trainer of transformers and its subclasses: Seq2SeqTrainer, TRL's SFTTrainer and DPOTrainer, one's own.

read.py        a Trainer as a Workload: its batches, optimizer, schedule; what is refused
loss.py        its loss and schedule by its own code, in trials: the parts of a Trainer that travel to them
apply.py       a plan to a Trainer: a new one with the plan's arguments
rebuild.py     makes a Trainer anew, has it divide its loss, sets what a process has of a plan
ranks.py       whether its step on several ranks is that of one process
watch.py       TransformersWatch, a callback
"""
