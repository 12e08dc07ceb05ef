"""A vision model whose Dataset decodes in Python, no workers, copies that are not pinned, .item() each step."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

dev = "cuda" if torch.cuda.is_available() else "cpu"


class Rows(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, i):
        total = 0
        for k in range(20_000):
            total += k * i
        return torch.randn(3, 64, 64), total % 10


net = nn.Sequential(
    nn.Conv2d(3, 64, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(64, 64, 3, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(64, 10),
).to(dev)
opt = torch.optim.AdamW(net.parameters())
running = 0.0
for x, y in DataLoader(Rows(), batch_size=32):
    x, y = x.to(dev), y.to(dev)
    opt.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    opt.step()
    running += loss.item()
