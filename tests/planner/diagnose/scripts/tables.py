"""An optimizer goes over all rows of a large table in each step."""

import torch
from torch import nn

model = nn.Sequential(nn.Embedding(200_000, 32), nn.Flatten(), nn.Linear(4 * 32, 1))
optimizer = torch.optim.Adam(model.parameters(), fused=True)
while True:
    optimizer.zero_grad()
    model(torch.randint(0, 200_000, (64, 4))).square().mean().backward()
    optimizer.step()
