"""A transformers Trainer as it stands: searched, made anew with the plan, trained, watched.

    python examples/transformers_trainer.py         # searches for 10 minutes, then trains
    autoplan search --trainer examples/transformers_trainer.py:make_trainer    # the same search; writes plan.json

Nothing is downloaded: the model has random weights, the text is Python's standard library, a byte a token.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import autoplan

LENGTH = 128


class Text(Dataset[dict[str, list[int]]]):
    """Stretches of a text, a byte a token."""

    def __init__(self, samples: int) -> None:
        files = sorted(Path(argparse.__file__).parent.glob("a*.py"))
        data = b"\n".join(file.read_bytes() for file in files)
        starts = torch.randint(len(data) - LENGTH, (samples,), generator=torch.Generator().manual_seed(0)).tolist()
        self.rows = [list(data[start : start + LENGTH]) for start in starts]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def make_trainer(width: int = 128, steps: int = 100, output: str = "trainer") -> Trainer:
    """A Trainer with a global batch of 8 x 4 = 32, which no plan changes."""
    torch.manual_seed(0)
    sizes = {"n_embd": width, "n_layer": 4, "n_head": 4, "n_positions": LENGTH, "vocab_size": 256}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))
    arguments = TrainingArguments(
        output_dir=output,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        learning_rate=1e-3,
        warmup_steps=10,
        weight_decay=0.1,
        max_grad_norm=1.0,
        max_steps=steps,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
    )
    return Trainer(model=model, args=arguments, train_dataset=Text(2048))


def main() -> None:
    """The whole way: from a Trainer to a trained model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--budget", default="10m")
    options = parser.parse_args()

    trainer = make_trainer(options.width, options.steps)
    plan = autoplan.current_plan() or autoplan.search(trainer, budget=options.budget, out="plan.json")
    print(f"plan: {plan.config.describe()}, {plan.speedup.median:.2f} times the baseline")

    trainer = plan.apply_to(trainer)
    watch = autoplan.TransformersWatch(plan).add_to(trainer)
    result = trainer.train()
    print(f"trained: {result.global_step} steps, loss {result.training_loss:.4f}")
    if watch.figures is not None:
        print(watch.figures.describe())


if __name__ == "__main__":
    main()
