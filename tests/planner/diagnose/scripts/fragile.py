"""Saves in each step, reads what it has saved, and ends after 60 steps: without saving it fails, or is killed."""

import os
import signal
import sys

import torch
from torch import nn

model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
ballast = torch.zeros(10 << 18)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, labels = torch.randn(32, 32), torch.randint(0, 4, (32,))
for step in range(60):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    torch.save([step, ballast], "fragile.pt")
    if torch.load("fragile.pt")[0] != step:
        if sys.argv[1:] == ["dies"]:
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("the checkpoint is old")
