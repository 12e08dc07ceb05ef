"""A large heap of objects that live, and a full collection after each step."""

import gc

import torch
from torch import nn

heap = [[number] for number in range(400_000)]
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, labels = torch.randn(32, 32), torch.randint(0, 4, (32,))
for _ in range(100_000):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    gc.collect()
