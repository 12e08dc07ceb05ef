"""The walk from a plain GPT-2 training to a fast one: one technique at a time, each measured beside the step before it.

    python examples/gpt2_walk.py                          # 124M parameters: some 15 minutes on two cores
    python examples/gpt2_walk.py --size tiny --rounds 5   # 3 minutes; on a GPU the same commands

Nothing here uses autoplan: each technique is the few lines of PyTorch in `train`. All steps train the same: the global
batch stays, and what rounds differently (bf16) is said. Each round runs both sides in fresh processes, in a drawn
order. A technique is kept if it runs and is faster in the median; what it gave alone is not what it gives beside
others, so `autoplan search` tries combinations, and `autoplan explain --staircase` measures the same of its plan.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

SIZES = {"124m": (12, 768, 12, 256), "tiny": (4, 128, 4, 64)}
"""Layers, width, heads, tokens of a sequence. The global batch is 8 sequences."""

GLOBAL_BATCH, VOCABULARY = 8, 50257
PLAIN = {"micro_batch": 1, "attention": "eager", "optimizer": "for_loop"}

WALK = {
    "loader": {"workers": 1},  # the next batch is made while this one is computed
    "copies": {"pinned": True},  # from pinned memory, a GPU copies while it computes
    "fused kernels": {"attention": "sdpa", "optimizer": "fused"},
    "larger batch": {"micro_batch": 4},  # fewer and larger operations; accumulation 8 -> 2
    "no accumulation": {"micro_batch": 8},
    "bf16": {"precision": "bf16"},  # the weights stay in fp32
    "checkpointing": {"checkpointing": True},  # less memory for one more forward: it pays if it makes room for a batch
    "compile": {"compile": True},
    "data parallel": {"ranks": 2},  # each rank computes half of the global batch
}
"""What each technique changes. Each is tried on top of all that were kept before it."""

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


class Bytes(Dataset[torch.Tensor]):
    """Sequences of drawn tokens, made one by one in Python, as a tokenizer would."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        draw = random.Random(index)
        return torch.tensor([draw.randrange(VOCABULARY) for _ in range(self.length)])


def train(size: str, steps: int, techniques: dict[str, object]) -> dict[str, float]:
    """Trains for some steps; the median seconds of a step after two warm-up steps, and the peak memory in bytes."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if not CUDA:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    if ranks > 1:
        dist.init_process_group("nccl" if CUDA else "gloo")
        torch.cuda.set_device(dist.get_rank()) if CUDA else None
    layers, width, heads, length = SIZES[size]
    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, n_embd=width, n_head=heads, n_positions=length)
    config._attn_implementation = techniques["attention"]
    raw = GPT2LMHeadModel(config).to(DEVICE)
    if techniques.get("checkpointing"):
        raw.gradient_checkpointing_enable({"use_reentrant": False})
    fused = {"fused": True} if techniques["optimizer"] == "fused" else {"foreach": False}
    optimizer = torch.optim.AdamW(raw.parameters(), lr=3e-4, **fused)
    model = torch.compile(raw) if techniques.get("compile") else raw
    model = DistributedDataParallel(model) if ranks > 1 else model
    micro_batch = min(int(techniques["micro_batch"]), GLOBAL_BATCH // ranks)
    accumulation = GLOBAL_BATCH // ranks // micro_batch
    loader = DataLoader(
        Bytes(length),
        micro_batch,
        num_workers=int(techniques.get("workers", 0)),
        pin_memory=bool(techniques.get("pinned")),
    )
    autocast = functools.partial(torch.autocast, DEVICE.type, torch.bfloat16, enabled="precision" in techniques)
    batches, times = iter(loader), []
    for _ in range(steps + 2):
        began = time.perf_counter()
        for part in range(accumulation):
            tokens = next(batches).to(DEVICE, non_blocking=bool(techniques.get("pinned")))
            if ranks > 1:
                model.require_backward_grad_sync = part == accumulation - 1
            with autocast():
                loss = model(input_ids=tokens, labels=tokens).loss / accumulation
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize() if CUDA else None
        times.append(time.perf_counter() - began)
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"step_s": statistics.median(times[2:]), "peak": torch.cuda.max_memory_allocated() if CUDA else host}


def run(size: str, steps: int, techniques: dict[str, object]) -> dict[str, float]:
    """`train` in fresh processes, one per rank; what rank 0 measured."""
    ranks = int(techniques.get("ranks", 1))
    with tempfile.NamedTemporaryFile() as file:
        own = [__file__, "--size", size, "--steps", str(steps), "--run", json.dumps(techniques), "--out", file.name]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        done = subprocess.run([sys.executable, *launcher, *own], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        return json.loads(file.read())


def why_not(technique: str) -> str:
    """Why a technique can't be tried here; empty if it can."""
    if technique == "copies" and not CUDA:
        return "there is no GPU to copy to"
    if technique == "data parallel" and (torch.cuda.device_count() if CUDA else len(os.sched_getaffinity(0))) < 2:
        return "there is one device"
    return ""


def walk(size: str, steps: int, rounds: int, techniques: list[str]) -> None:
    """Tries each technique on top of what was kept, and prints a line for each."""
    kept, total = dict(PLAIN), 1.0
    print(
        f"GPT-2 {size}, {GLOBAL_BATCH} sequences a step, on {DEVICE.type}: medians of {rounds} rounds (and the range)"
    )
    for technique in techniques:
        if reason := why_not(technique):
            print(f"  {technique:<16} not tried: {reason}", flush=True)
            continue
        sides, seen = {"before": kept, "with": kept | WALK[technique]}, []
        try:
            for _ in range(rounds):
                order = random.sample(sorted(sides), 2)
                seen.append({side: run(size, steps, sides[side]) for side in order})
        except RuntimeError as error:
            print(f"  {technique:<16} does not run: {last_error(str(error))}", flush=True)
            continue
        gains = sorted(one["before"]["step_s"] / one["with"]["step_s"] for one in seen)
        gain = statistics.median(gains)
        memory = [statistics.median(one[side]["peak"] for one in seen) / 2**20 for side in sides]
        if gain > 1:
            kept, total = sides["with"], total * gain
        print(
            f"  {technique:<16} {between(gains)} times as fast, "
            f"{memory[0]:,.0f} -> {memory[1]:,.0f} MiB{'' if gain > 1 else '; not kept'}",
            flush=True,
        )
    both = [(run(size, steps, PLAIN)["step_s"], run(size, steps, kept)["step_s"]) for _ in range(rounds)]
    gains = sorted(plain / fast for plain, fast in both)
    print(f"the whole walk: {between(gains)} times as fast; the product of its steps is {total:.2f}")


def last_error(text: str) -> str:
    """The line that names the error, in what a failed process wrote; a launcher of ranks writes more after it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ([line for line in lines if "Error: " in line] or lines or ["it wrote nothing"])[-1]


def between(gains: list[float]) -> str:
    """The median, and the lowest and highest of sorted gains."""
    return f"{statistics.median(gains):.2f} ({gains[0]:.2f} to {gains[-1]:.2f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="124m")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--techniques", nargs="+", choices=list(WALK), default=list(WALK))
    parser.add_argument("--run", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run is None:
        walk(options.size, options.steps, options.rounds, options.techniques)
    else:
        measured = train(options.size, options.steps, options.run)
        if int(os.environ.get("RANK", "0")) == 0:
            with open(options.out, "w") as out:
                json.dump(measured, out)
