"""A loop like nanoGPT's: a GPT in plain PyTorch, random windows of one long text, AdamW with decay on matrices.

    python examples/nanogpt.py                    # searches (10 minutes) and writes plan.json, trains 100 steps
    autoplan run plan.json examples/nanogpt.py    # later: trains with that plan

Nothing is downloaded: the text is the source of this Python's standard library, a byte a token.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import autoplan

LENGTH, VOCABULARY, BATCH = 128, 256, 32


class Block(nn.Module):
    """Attention and an MLP, each on the normalised residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2, self.project = nn.LayerNorm(width), nn.LayerNorm(width), nn.Linear(width, width)
        self.attend = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attend(self.norm_1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Token and position embeddings, blocks, a head."""

    def __init__(self, width: int, layers: int, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def get_batch(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    """Windows from random places. The same index gives the same batch."""
    text = b"\n".join(file.read_bytes() for file in sorted(Path(argparse.__file__).parent.glob("a*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    starts = torch.randint(len(data) - LENGTH - 1, (num_samples, 1), generator=torch.Generator().manual_seed(index))
    windows = data[starts + torch.arange(LENGTH + 1)]
    return {"input_ids": windows[:, :-1], "targets": windows[:, 1:]}


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    """The summed cross-entropy of each next byte, and how many there are."""
    logits = model(batch["input_ids"]).float()
    total = F.cross_entropy(logits.transpose(1, 2), batch["targets"], reduction="sum")
    return autoplan.LossSum(total, batch["targets"].numel())


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """10 steps of warm-up, then a cosine over 1,000."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 10, math.cos(min(1.5, n / 700))))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--budget", default="10m")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = GPT(options.width, layers=4)
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    plan = autoplan.current_plan() or autoplan.search(
        model=model, make_batch=get_batch, loss=loss, optimizer=optimizer, schedule=schedule, max_grad_norm=1.0,
        global_batch=BATCH, sequence_length=LENGTH, budget=options.budget, out="plan.json",
    )  # fmt: skip
    run = plan.prepare(model, optimizer, loss, schedule=schedule)
    with autoplan.watch(plan) as watch:
        for step in range(options.steps):
            batch = get_batch(run.local_batch, step)
            loss_now = run.step(batch).loss
            watch.step(batch)
            if step % 10 == 9:
                print(f"step {step + 1}: loss {float(loss_now):.4f}", flush=True)
