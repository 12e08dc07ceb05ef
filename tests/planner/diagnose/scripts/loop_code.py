"""Each batch is put together in Python, in the loop itself."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
numbers = list(range(100_000))


def make_batch(step):
    rows = []
    for row in range(200):
        rows.append([float((numbers[step + row + column] * 7) % 11) for column in range(32)])
    return torch.tensor(rows), torch.randint(0, 4, (200,))


for step in range(50_000):
    inputs, labels = make_batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
