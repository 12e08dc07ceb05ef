"""64 threads, however few cores there are."""

import torch
from torch import nn

torch.set_num_threads(64)
model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.ReLU())])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(512, 256)
for _ in range(1_000_000):
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
