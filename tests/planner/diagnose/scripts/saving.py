"""A checkpoint of 30 MB after each step, beside the script and in a folder of its own."""

import os
import sys
from pathlib import Path

import torch
from torch import nn

out = Path(sys.argv[1])
if (out / "old").exists():
    (out / "old").unlink()
os.makedirs(out / "checkpoints", exist_ok=True)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
ballast = torch.zeros(30 << 18)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, labels = torch.randn(32, 64), torch.randint(0, 4, (32,))
for step in range(100_000):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "ballast": ballast}, out / "checkpoints" / f"{step % 3}.pt")
    (out / "log.txt").write_text(f"step {step}")
    assert (out / "log.txt").read_text() == f"step {step}"
    if step == 0:
        assert torch.load(out / "checkpoints" / "0.pt")["ballast"].numel() == 30 << 18
