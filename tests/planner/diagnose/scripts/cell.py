"""A recurrent cell of the user's own that goes through a sequence token by token, in a model of equal layers."""

import torch
from torch import nn


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.gates = nn.Linear(48, 64)

    def forward(self, x, h):
        z, n = self.gates(torch.cat([x, h], 1)).chunk(2, 1)
        z = torch.sigmoid(z)
        return (1 - z) * torch.tanh(n) + z * h


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return x + torch.relu(self.linear(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = Cell()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        h = torch.zeros(len(x), 32)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        for layer in self.layers:
            h = layer(h)
        return h


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(100_000):
    model(torch.randn(16, 120, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
