"""A Trainer of transformers that saves after each step."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=64, vocab_size=20_000, n_positions=32))
data = [{"input_ids": (ids := torch.randint(0, 100, (16,))), "labels": ids} for _ in range(64)]
arguments = TrainingArguments(
    sys.argv[1], per_device_train_batch_size=4, max_steps=5_000, save_steps=1, save_total_limit=1, report_to=[],
    use_cpu=True, disable_tqdm=True, logging_steps=50,
)  # fmt: skip
Trainer(model, arguments, train_dataset=data).train()
