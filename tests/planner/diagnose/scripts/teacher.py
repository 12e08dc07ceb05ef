"""A teacher that nobody trains, larger than the student, called with gradients."""

import torch
from torch import nn


def net(width):
    return nn.Sequential(nn.Linear(128, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 16))


student, teacher = net(64), net(1024)
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
inputs = torch.randn(256, 128)
for _ in range(1_000_000):
    loss = nn.functional.mse_loss(student(inputs), teacher(inputs))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
