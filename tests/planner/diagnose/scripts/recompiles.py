"""A compiled function that is asked for a new shape in each step, and may not take shapes as variables."""

import torch
import torch._dynamo
from torch import nn

torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 100_000
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def loss_of(x):
    return model(x).square().mean()


compiled = torch.compile(loss_of, backend="eager", dynamic=False)
step = 0
while True:
    step += 1
    optimizer.zero_grad()
    compiled(torch.randn(8 + step, 16)).backward()
    optimizer.step()
