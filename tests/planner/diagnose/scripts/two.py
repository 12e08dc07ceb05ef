"""Two causes: checkpoints of 30 MB, and twice their time in samples that wait."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.randn(32), index % 4


model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
ballast = torch.zeros(30 << 18)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    for inputs, labels in DataLoader(Slow(), batch_size=16):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        torch.save(ballast, "two.pt")
