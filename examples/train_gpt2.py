"""Searches for a plan, then trains GPT-2 on real text with it: the bytes of Python's own standard library.

    python examples/train_gpt2.py                       # searches (10 minutes), trains 20 steps, saves a checkpoint
    python examples/train_gpt2.py                       # loads the plan and the checkpoint, trains 20 steps more
    python examples/train_gpt2.py --layers 2 --hidden 64 --heads 4 --seq-len 64 --global-batch 8 --budget 60s

Nothing is downloaded: the text is what `sysconfig` says is the standard library, read with a memory map, a byte a
token. The plan decides how a step runs; what is trained (model, text, batch, loss, schedule, clipping) is written here.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import math
import os
import sysconfig
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import autoplan
from autoplan.strategies.workloads.language_model import CausalHead, causal_loss, count_labels

VOCABULARY = 256  # a byte a token


def write_text(folder: Path) -> Path:
    """All sources of the standard library in one file; written once."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    name = hashlib.sha256("".join(map(str, files)).encode()).hexdigest()[:12]
    path = folder / f"stdlib-{name}.txt"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(b"\n".join(file.read_bytes() for file in files))
        temporary.replace(path)
    return path


def read_batch(text: Path, length: int, num_samples: int, index: int) -> dict[str, torch.Tensor]:
    """Sequences from places that the index decides: the same index gives the same batch, in every process."""
    tokens = np.memmap(text, dtype=np.uint8, mode="r")
    places = np.random.default_rng(index).integers(0, len(tokens) - length, num_samples)
    rows = np.stack([tokens[place : place + length] for place in places]).astype(np.int64)
    batch = torch.from_numpy(rows)
    return {"input_ids": batch, "labels": batch}


def build_model(layers: int, hidden: int, heads: int, length: int) -> torch.nn.Module:
    """GPT-2 over bytes, random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=length, n_embd=hidden, n_layer=layers, n_head=heads,
        bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def build_optimizer(parameters: Iterable[Any], learning_rate: float) -> torch.optim.Optimizer:
    """AdamW, with weight decay on matrices only."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def warm_up_then_cosine(step: int, total: int) -> float:
    """A share of the learning rate."""
    warm_up = max(1, total // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - warm_up) / max(1, total - warm_up))))


def build_schedule(optimizer: torch.optim.Optimizer, total: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Warm-up, then a cosine down to a tenth."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(warm_up_then_cosine, total=total))


def make_workload(options: argparse.Namespace) -> autoplan.Workload:
    """The training. No plan changes any of it."""
    text = write_text(options.data)
    return autoplan.Workload(
        name="gpt2-bytes",
        build_model=functools.partial(build_model, options.layers, options.hidden, options.heads, options.seq_len),
        make_batch=functools.partial(read_batch, text, options.seq_len),
        loss=causal_loss,
        count=functools.partial(count_labels, shifted=True),
        head=CausalHead(),
        build_optimizer=functools.partial(build_optimizer, learning_rate=options.learning_rate),
        build_schedule=functools.partial(build_schedule, total=options.total_steps),
        global_batch=options.global_batch,
        sequence_length=options.seq_len,
        max_grad_norm=1.0,
    )


def find_plan(options: argparse.Namespace, workload: autoplan.Workload) -> autoplan.Plan:
    """The plan in the file, or a search that writes it there."""
    if options.plan.exists():
        print(f"plan: {options.plan}, made before")
        return autoplan.load_plan(options.plan)
    fixed = dict(text.split("=", 1) for text in options.fix)
    return autoplan.search(
        workload,
        budget=options.budget,
        max_trials=options.max_trials,
        fix=fixed,
        device=options.device,
        store=options.store,
        out=options.plan,
    )


def train(options: argparse.Namespace) -> None:
    """Some steps with the plan, from the checkpoint if there is one; saves a checkpoint at the end."""
    workload = make_workload(options)
    plan = find_plan(options, workload)
    print(f"plan: {plan.config.describe()}, {plan.speedup.median:.2f} times the plain run")
    torch.manual_seed(0)  # dropout draws from torch's generator, which the checkpoint keeps
    run = plan.prepare(
        workload.build_model,
        workload.build_optimizer,
        workload.loss,
        schedule=workload.build_schedule,
        max_grad_norm=workload.max_grad_norm,
        head=workload.head,
        count=workload.count,
    )
    if options.checkpoint.exists():
        run.load_state_dict(torch.load(options.checkpoint, weights_only=True))
        print(f"resumed at step {run.steps} from {options.checkpoint}")
    for _ in range(options.steps):
        batch = workload.make_batch(run.local_batch, run.steps)  # its index is the step: resuming goes on in the text
        started = time.perf_counter()
        result = run.step(batch)
        loss = float(result.loss)
        rate = options.global_batch * options.seq_len / (time.perf_counter() - started)
        print(f"step {run.steps}: loss {loss:.4f}, {rate:,.0f} tokens/s", flush=True)
    temporary = options.checkpoint.with_name(options.checkpoint.name + ".tmp")
    torch.save(run.state_dict(), temporary)
    temporary.replace(options.checkpoint)
    print(f"saved {options.checkpoint}")


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, default=Path("plan-gpt2-bytes.json"), help="read if there, else written")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint-gpt2-bytes.pt"))
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir(), "autoplan-text"))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of this call")
    parser.add_argument("--total-steps", type=int, default=1000, help="of the schedule, over all calls")
    parser.add_argument("--budget", default="10m", help="of the search")
    parser.add_argument("--max-trials", type=int)
    parser.add_argument("--fix", action="append", default=[], metavar="KNOB=VALUE")
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--store", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_options())
