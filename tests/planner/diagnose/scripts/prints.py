"""A flood of lines in each step."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, labels = torch.randn(32, 32), torch.randint(0, 4, (32,))
for step in range(1_000_000):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    for row in range(2_000):
        print("step", step, "row", row, flush=True)
