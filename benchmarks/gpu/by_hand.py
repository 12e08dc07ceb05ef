"""The setting that a plan is held against: a careful person writes it by hand to train a GPT-2 of 124M on one GPU.

    python -m benchmarks.gpu.by_hand --find               # the largest micro-batch that fits, as JSON
    python -m benchmarks.gpu.by_hand --micro-batch 64     # seconds of whole optimizer steps, as JSON

bf16 autocast over fp32 parameters, causal `scaled_dot_product_attention`, `torch.compile` of the whole model, fused
AdamW, TF32 for what is left in fp32, the loss inside the compiled graph, pinned batches, the largest power-of-two
micro-batch, accumulation to the global batch, clipping at 1.0. The model is GPT-2 as published (learned positions,
pre-norm, GELU with tanh, tied head) with the vocabulary padded to 50,304 and no dropout. Plain PyTorch; no line of
autoplan.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

WARM_STEPS = 3


@dataclass
class Sizes:
    layers: int = 12
    heads: int = 12
    width: int = 768
    vocabulary: int = 50304
    length: int = 1024
    global_batch: int = 512


SMALL = Sizes(layers=2, heads=4, width=64, vocabulary=512, length=64, global_batch=16)


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.norm1, self.norm2 = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.qkv, self.out = nn.Linear(sizes.width, 3 * sizes.width), nn.Linear(sizes.width, sizes.width)
        self.up, self.down = nn.Linear(sizes.width, 4 * sizes.width), nn.Linear(4 * sizes.width, sizes.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        shape = (samples, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(width, dim=2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(samples, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.length, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The summed loss of the next tokens; rows of (samples, length + 1)."""
        ids, targets = rows[:, :-1], rows[:, 1:]
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


class Training:
    """The training run at one micro-batch."""

    def __init__(self, sizes: Sizes, micro_batch: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.sizes, self.micro_batch, self.device = sizes, micro_batch, device
        self.model = GPT(sizes).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-5, weight_decay=0.0, fused=True)
        self.model.compile(dynamic=False)
        self.items = sizes.global_batch * sizes.length

    def batch(self) -> torch.Tensor:
        rows = torch.randint(0, self.sizes.vocabulary, (self.sizes.global_batch, self.sizes.length + 1))
        return rows.pin_memory() if self.device.type == "cuda" else rows

    def step(self, batch: torch.Tensor, micro_steps: int | None = None) -> torch.Tensor:
        """One optimizer step; its loss stays on the device. `micro_steps`: fewer, to see whether it fits."""
        total = torch.zeros((), device=self.device)
        for rows in batch.to(self.device, non_blocking=True).split(self.micro_batch)[:micro_steps]:
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                loss = self.model(rows) / self.items
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def find_micro_batch(sizes: Sizes, device: torch.device, largest: int) -> int:
    """The largest power of two up to `largest` with which two optimizer steps run."""
    micro_batch = min(largest, sizes.global_batch)
    while micro_batch >= 1:
        training = None
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            training = Training(sizes, micro_batch, device)
            for _ in range(2):
                training.step(training.batch(), micro_steps=2)
            wait(device)
            return micro_batch
        del training
        torch._dynamo.reset()
        gc.collect()  # a compiled model is in a cycle of references
        torch.cuda.empty_cache()
        micro_batch //= 2
    raise SystemExit("not even one sample fits")


def time_steps(sizes: Sizes, device: torch.device, micro_batch: int, seconds: float) -> dict[str, object]:
    """Seconds of whole optimizer steps, for about so many seconds; at least three of them."""
    began = time.perf_counter()
    training = Training(sizes, micro_batch, device)
    batches = [training.batch() for _ in range(2)]
    for number in range(WARM_STEPS):
        loss = training.step(batches[number % 2])
    wait(device)
    prepared_s, samples = time.perf_counter() - began, []
    while len(samples) < 3 or sum(samples) < seconds:
        started = time.perf_counter()
        loss = training.step(batches[len(samples) % 2])
        wait(device)
        samples.append(time.perf_counter() - started)
    middle = sorted(samples)[len(samples) // 2]
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {
        "what": "by hand",
        "micro_batch": micro_batch,
        "step_s": samples,
        "tokens_per_s": sizes.global_batch * sizes.length / middle,
        "prepared_s": prepared_s,
        "peak_allocated_bytes": peak,
        "loss": float(loss),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--find", action="store_true", help="find the largest micro-batch")
    parser.add_argument("--micro-batch", type=int, default=None, help="for --find: where to begin")
    parser.add_argument("--seconds", type=float, default=10.0, help="of timed steps")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try this script")
    given = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    device, sizes = torch.device(given.device), SMALL if given.small else Sizes()
    if given.find:
        memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
        largest = given.micro_batch or (16 if device.type == "cpu" else 128 if memory > 100e9 else 64)
        print(json.dumps({"micro_batch": find_micro_batch(sizes, device, largest)}))
    else:
        print(json.dumps(time_steps(sizes, device, given.micro_batch or 8, given.seconds)))


if __name__ == "__main__":
    main()
