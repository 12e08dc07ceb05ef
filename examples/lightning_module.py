"""A LightningModule with its DataLoader: searched as it stands, trained by Lightning's Trainer as the plan says.

    pip install lightning
    python examples/lightning_module.py         # searches for 10 minutes, then trains

The global batch is the DataLoader's batch times accumulate_grad_batches: 16 x 2 = 32. No plan changes it.
"""

from __future__ import annotations

import argparse

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autoplan


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


class Classifier(lightning.LightningModule):
    """Which of the first ten numbers of a row is the largest?"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(4)))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        """The mean over the samples of a batch."""
        rows, labels = batch
        loss = F.cross_entropy(self.head(self.blocks(self.stem(rows))), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        """AdamW, with a warm-up over 10 optimizer steps."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_data(samples: int) -> TensorDataset:
    """Rows of 64 numbers with their labels."""
    rows = torch.randn(samples, 64, generator=torch.Generator().manual_seed(0))
    return TensorDataset(rows, rows[:, :10].argmax(1))


def main() -> None:
    """Searches the module, then trains it with a Trainer of the plan's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--budget", default="10m")
    options = parser.parse_args()

    lightning.seed_everything(0)
    data, module = make_data(2048), Classifier(options.width)
    loader = DataLoader(data, batch_size=16, shuffle=True, drop_last=True)
    given = {"max_epochs": options.epochs, "logger": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(accumulate_grad_batches=2, gradient_clip_val=1.0, **given)
    plan = autoplan.current_plan() or autoplan.search(
        module, loader, trainer=trainer, budget=options.budget, out="plan.json"
    )
    print(f"plan: {plan.config.describe()}, {plan.speedup.median:.2f} times the baseline")

    settings = plan.apply_to(module, loader, trainer=trainer)  # the module is changed where the plan says so
    loader = DataLoader(data, batch_size=settings.batch_size, shuffle=True, drop_last=True)
    watch = autoplan.LightningWatch(plan)
    trainer = lightning.Trainer(**given | settings.trainer_arguments, callbacks=[watch])
    trainer.fit(module, loader)
    print(f"trained: {trainer.global_step} steps, loss {float(trainer.callback_metrics['loss']):.4f}")
    if watch.figures is not None:
        print(watch.figures.describe())


if __name__ == "__main__":
    main()
