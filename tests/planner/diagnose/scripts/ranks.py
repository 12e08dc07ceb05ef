"""Asks for the rank that torchrun gives, trains with DDP, and prints too much."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    optimizer.zero_grad()
    model(torch.randn(8, 32)).square().mean().backward()
    optimizer.step()
    for row in range(2_000):
        print("rank", rank, "row", row, flush=True)
