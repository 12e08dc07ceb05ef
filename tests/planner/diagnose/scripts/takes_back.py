"""Sets its optimizer's options anew in each step, so that a fused step never comes."""

import torch
from torch import nn

model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(40)])
optimizer = torch.optim.AdamW(model.parameters())
inputs = torch.randn(8, 16)
for _ in range(100_000):
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.param_groups[0]["fused"] = False
    optimizer.step()
