"""A module of a package: sets threads before torch is imported, forks a process that trains, and starts commands."""

import os

os.environ["OMP_NUM_THREADS"] = "2"

import multiprocessing
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from .size import SIZE  # noqa: TID252

assert sys.argv[1:] == ["--name", "./x"] and __package__ == "package"


def train(steps: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.ReLU(), torch.nn.Linear(SIZE, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    done = 0
    while done < steps:
        for (x,) in DataLoader(TensorDataset(torch.randn(2048, SIZE)), batch_size=64):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1


if __name__ == "__main__":
    os.system("mkdir made_by_mkdir")
    child = multiprocessing.get_context("fork").Process(target=train, args=(300,))
    child.start()
    child.join()
    assert child.exitcode == 0
    child = multiprocessing.get_context("spawn").Process(target=train, args=(3,))
    child.start()
    child.join()
    assert child.exitcode == 0
    train(100_000)
