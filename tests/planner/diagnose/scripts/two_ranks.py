"""Ranks of torchrun with DDP: one that is late in its data or its model, batches that differ, a large exchange."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

PLANTED = sys.argv[1]

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
if ranks < 2:
    sys.exit("this needs two ranks")


class Numbers(Dataset):
    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        if PLANTED == "data" and rank == 1:
            time.sleep(0.01)
        return torch.full((64,), float(index % 7))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        width = 2_000 if PLANTED == "exchange" else 64
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 1))

    def forward(self, x):
        if PLANTED == "model" and rank == 1:
            time.sleep(0.04)
        if PLANTED in ("larger", "lengths", "alike"):
            time.sleep(0.0002 * len(x))  # work that grows with the batch
        return self.layers(x)


model = DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
size = 200 if PLANTED == "larger" and rank == 1 else 4 if PLANTED in ("data", "exchange") else 100
generator = torch.Generator().manual_seed(rank)
loader = DataLoader(Numbers(), batch_size=size)
for step, batch in enumerate(loader):
    if PLANTED == "ends" and rank == 1 and step == 60:
        sys.exit(0)
    if PLANTED == "lengths":
        batch = batch[: int(torch.randint(10, 100, (), generator=generator))]
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
