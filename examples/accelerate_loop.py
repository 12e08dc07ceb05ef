"""A loop with Accelerate: searched by its model, optimizer, DataLoader and loss, then trained with the plan.

    pip install accelerate
    python examples/accelerate_loop.py         # searches for 10 minutes, then trains

The loop's global batch is the DataLoader's batch times the Accelerator's accumulation: 16 x 2 = 32. With the plan, one
run.step is one optimizer step: accumulation, precision and clipping happen inside.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autoplan


class Classifier(nn.Module):
    """A transformer encoder over patches of a row of numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(patches)).mean(1))


def make_data(samples: int) -> TensorDataset:
    """Rows of 32 patches; the class is the patch with the largest sum, among the first ten."""
    patches = torch.randn(samples, 32, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(patches, patches.sum(2)[:, :10].argmax(1))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The mean over the samples of a batch."""
    patches, labels = batch
    return F.cross_entropy(model(patches), labels)


def train_plainly(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader
) -> None:  # type: ignore[type-arg]
    """The loop as it was: one epoch."""
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss(model, batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    """Searches the loop's parts, then trains with the plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--budget", default="10m")
    options = parser.parse_args()

    torch.manual_seed(0)
    data = make_data(1024)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = Classifier(options.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=16, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    train_plainly(accelerator, model, optimizer, loader)

    plan = autoplan.current_plan() or autoplan.search(
        model, optimizer, loader, loss, max_grad_norm=1.0, budget=options.budget, out="plan.json"
    )
    print(f"plan: {plan.config.describe()}, {plan.speedup.median:.2f} times the baseline")
    run, loader = plan.apply_to(model, optimizer, loader, loss, max_grad_norm=1.0)  # a loader with the step's batch
    with autoplan.watch(plan) as watch:
        for epoch in range(options.epochs):
            for batch in watch.batches(loader):
                result = run.step(batch)
                watch.step()
            print(f"epoch {epoch + 1}: loss {float(result.loss):.4f}", flush=True)


if __name__ == "__main__":
    main()
