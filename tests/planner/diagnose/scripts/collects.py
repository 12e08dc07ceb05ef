"""Asks for a collection in each step, with many objects that it goes over."""

import gc

import torch
from torch import nn

objects = [[n] for n in range(300_000)]
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, labels = torch.randn(32, 64), torch.randint(0, 4, (32,))
for _ in range(100_000):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    gc.collect()
