"""Model and data are in fp64."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 8)).double()
optimizer = torch.optim.Adam(model.parameters(), fused=True)
inputs, targets = torch.randn(512, 256, dtype=torch.float64), torch.randn(512, 8, dtype=torch.float64)
while True:
    optimizer.zero_grad()
    (model(inputs) - targets).square().mean().backward()
    optimizer.step()
