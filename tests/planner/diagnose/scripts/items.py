"""Thousands of numbers of a tensor are read one by one in each step."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, labels = torch.randn(2_000, 32), torch.randint(0, 4, (2_000,))
hits = 0.0
for _ in range(1_000_000):
    output = model(inputs)
    optimizer.zero_grad()
    nn.functional.cross_entropy(output, labels).backward()
    optimizer.step()
    for value in output.detach().flatten():
        hits += value.item()
