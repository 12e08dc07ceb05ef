"""A large heap of objects that live, and steps that make many more: the collector goes over all of them."""

import gc

import torch
from torch import nn

heap = [[number] for number in range(3_000_000)]
gc.set_threshold(700, 2, 1)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, labels = torch.randn(32, 32), torch.randint(0, 4, (32,))
for _ in range(100_000):
    records = [[number] for number in range(3_000)]
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
