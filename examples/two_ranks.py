"""Two ranks: a search among sharded configurations (FSDP2), then a training in two processes.

    python examples/two_ranks.py --search         # searches (10 minutes) over two ranks, writes plan.json
    autoplan run plan.json examples/two_ranks.py  # starts the plan's ranks
    torchrun --nproc-per-node 2 examples/two_ranks.py  # the same by hand

On a machine without GPUs the ranks are two processes on its cores (gloo); with one GPU, `--search --device cpu` asks
for that. Each rank loads its own share of the global batch, and the sharded model is saved with
torch.distributed.checkpoint.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.nn.functional as F
from torch import nn

import autoplan

GLOBAL_BATCH = 32


def build_model() -> nn.Module:
    """A stack of layers: the shards of FSDP are its blocks."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(128, 8))


def make_batch(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    """Points whose class is the largest of eight coordinates. The same index gives the same batch."""
    points = torch.randn(num_samples, 128, generator=torch.Generator().manual_seed(index))
    return {"points": points, "label": points[:, :8].argmax(1)}


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    """Cross-entropy as a sum and a count."""
    total = F.cross_entropy(model(batch["points"]), batch["label"], reduction="sum")
    return autoplan.LossSum(total, len(batch["label"]))


def build_optimizer(parameters: object) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(parameters, lr=1e-3)  # type: ignore[arg-type]


def search(budget: str, device: Literal["cuda", "cpu"] | None) -> None:
    """Among ways to share the shards between two ranks: `fix` asks for two. None: the machine's own kind of device."""
    plan = autoplan.search(
        model=build_model, make_batch=make_batch, loss=loss, optimizer=build_optimizer, global_batch=GLOBAL_BATCH,
        budget=budget, device=device, nproc=2, fix={"dp_shard": 2, "compile": "off"}, out="plan.json",
    )  # fmt: skip
    print(f"plan: {plan.config.describe()}, {plan.config.world_size} ranks")


def train(steps: int, folder: Path) -> None:
    """Some steps in this rank of several, from the checkpoint if there is one."""
    plan = autoplan.current_plan() or autoplan.load_plan("plan.json")
    run = plan.prepare(build_model, build_optimizer, loss)
    state = run.state_dict()
    if folder.exists():
        checkpoint.load(state, checkpoint_id=folder)
        run.load_state_dict(state)
    with autoplan.watch(plan) as watch:
        while run.steps < steps:
            batch = run.local_share(make_batch(GLOBAL_BATCH, run.steps))
            result = run.step(batch)
            watch.step(batch)
            if run.steps % 10 == 0 and dist.get_rank() == 0:
                print(f"step {run.steps}: loss {float(result.loss):.4f}", flush=True)
    checkpoint.save(run.state_dict(), checkpoint_id=folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", action="store_true", help="search, and do not train")
    parser.add_argument("--budget", default="10m")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="of the search; each rank needs a GPU of its own")
    parser.add_argument("--steps", type=int, default=100, help="in all, those of the checkpoint included")
    parser.add_argument("--checkpoint", type=Path, default=Path("two_ranks"))
    options = parser.parse_args()
    if options.search:
        search(options.budget, options.device)
    elif "RANK" in os.environ:
        train(options.steps, options.checkpoint)
    else:
        parser.error("start the ranks: autoplan run plan.json examples/two_ranks.py")
