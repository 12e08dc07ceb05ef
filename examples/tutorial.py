"""The program of docs/tutorial.md: a small GPT-2 that learns to write Python, one byte at a time.

    autoplan search --model tutorial.py:workload --budget 60s    # writes plan.json
    python tutorial.py                                           # trains 100 steps with the plan, saves a checkpoint
    python tutorial.py                                           # resumes, trains 100 steps more

Nothing is downloaded: the text is the source files of Python's standard library.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import autoplan

LENGTH = 128  # bytes in a sequence


def build_model() -> torch.nn.Module:
    """A GPT-2 of 4 blocks with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 128, "n_layer": 4, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))


@functools.cache
def read_text() -> torch.Tensor:
    """The standard library's top-level files, as one row of bytes."""
    files = sorted(Path(argparse.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def make_batch(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    """Sequences from random places in the text. The same index gives the same batch."""
    text = read_text()
    starts = torch.randint(len(text) - LENGTH, (num_samples, 1), generator=torch.Generator().manual_seed(index))
    return {"tokens": text[starts + torch.arange(LENGTH)].long()}


def next_byte_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    """Cross-entropy of each next byte: the sum over all bytes, and how many bytes that is."""
    tokens = batch["tokens"]
    logits = model(input_ids=tokens).logits[:, :-1].float()
    targets = tokens[:, 1:]
    return autoplan.LossSum(F.cross_entropy(logits.transpose(1, 2), targets, reduction="sum"), targets.numel())


def build_optimizer(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def workload(global_batch: int = 32) -> autoplan.Workload:
    """The training. No plan changes any of it."""
    return autoplan.Workload(
        name="tutorial",
        build_model=build_model,
        make_batch=make_batch,
        loss=next_byte_loss,
        build_optimizer=build_optimizer,
        global_batch=global_batch,
        sequence_length=LENGTH,
        max_grad_norm=1.0,
    )


def train(steps: int, plan_path: Path, checkpoint: Path) -> None:
    """Some optimizer steps with the plan, from the checkpoint if there is one; then saves the checkpoint."""
    torch.manual_seed(0)
    plan = autoplan.load_plan(plan_path)
    run = plan.prepare(build_model, build_optimizer, next_byte_loss, max_grad_norm=1.0)
    if checkpoint.exists():
        run.load_state_dict(torch.load(checkpoint, weights_only=True))
        print(f"resumed at step {run.steps}")
    started, first = time.perf_counter(), run.steps
    while run.steps < first + steps:
        result = run.step(make_batch(run.local_batch, run.steps))
        if run.steps % 20 == 0:
            rate = (run.steps - first) * run.local_batch * LENGTH / (time.perf_counter() - started)
            print(f"step {run.steps}: loss {float(result.loss):.4f}, {rate:,.0f} tokens/s", flush=True)
    torch.save(run.state_dict(), checkpoint)
    print(f"saved {checkpoint}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of this call")
    parser.add_argument("--plan", type=Path, default=Path("plan.json"))
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    options = parser.parse_args()
    train(options.steps, options.plan, options.checkpoint)
