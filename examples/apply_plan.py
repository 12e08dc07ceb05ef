"""A plan loaded and applied to a training of one's own: a Dataset, a DataLoader, checkpoints.

    autoplan search --model examples/image_classifier.py:classifier --global-batch 64
    autoplan run plan.json examples/apply_plan.py       # or: python examples/apply_plan.py

The plan decides how a step runs. The model, the data, the optimizer and the schedule are this program's; plan.prepare
compares them with those of the search, and names what changed.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch
from image_classifier import Classifier, build_optimizer, classification_loss, draw_batch
from torch.utils.data import DataLoader, Dataset

import autoplan


class Discs(Dataset[dict[str, torch.Tensor]]):
    """Drawn images: the i-th is always the same."""

    def __init__(self, size: int, length: int) -> None:
        self.size, self.length = size, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: rows[0] for name, rows in draw_batch(self.size, 1, index).items()}


def evaluate(model: torch.nn.Module, data: Dataset[dict[str, torch.Tensor]], device: torch.device) -> float:
    """The share of images whose class is found."""
    model.eval()
    right = 0
    with torch.no_grad():
        for batch in DataLoader(data, batch_size=64):
            right += int((model(batch["image"].to(device)).argmax(1).cpu() == batch["label"]).sum())
    model.train()
    return right / len(data)  # type: ignore[arg-type]


def main() -> None:
    """Trains some epochs with the plan, from the checkpoint if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, default=Path("plan.json"), help="where autoplan run gave none")
    parser.add_argument("--checkpoint", type=Path, default=Path("classifier.pt"))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--size", type=int, default=64, help="pixels of a side; 16 for a plan of tiny_classifier")
    options = parser.parse_args()

    plan = autoplan.current_plan() or autoplan.load_plan(options.plan)
    channels, blocks = (64, 6) if options.size == 64 else (16, 2)
    run = plan.prepare(lambda: Classifier(channels, blocks), build_optimizer, classification_loss)
    if options.checkpoint.exists():
        run.load_state_dict(torch.load(options.checkpoint, weights_only=True))
        print(f"resumed at step {run.steps}")

    # The loader's batch is run.local_batch: the plan's global batch on this rank. Micro-batches are cut in run.step.
    data, test = Discs(options.size, options.samples), Discs(options.size, 256)
    loader = DataLoader(data, batch_size=run.local_batch, shuffle=True, drop_last=True)
    with autoplan.watch(plan) as watch:
        for epoch in range(options.epochs):
            for batch in watch.batches(loader):
                result = run.step(batch)
                watch.step()
            with watch.pause():
                right = evaluate(run.model, test, run.device)
                torch.save(run.state_dict(), options.checkpoint)
            print(f"epoch {epoch + 1}: loss {float(result.loss):.4f}, {right:.0%} right", flush=True)
    if watch.figures is not None:
        print(watch.figures.describe())


if __name__ == "__main__":
    warnings.filterwarnings("once")
    main()
