"""Two losses of one forward, each with its own backward."""

import torch
from torch import nn

body = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(6)))
optimizer = torch.optim.SGD(body.parameters(), lr=0.01)
while True:
    optimizer.zero_grad()
    out = body(torch.randn(256, 512))
    first, second = out.square().mean(), out.abs().mean()
    first.backward(retain_graph=True)
    second.backward()
    optimizer.step()
