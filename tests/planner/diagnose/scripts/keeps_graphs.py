"""The losses of all steps are kept for a mean, with their graphs, and the graphs with their activations."""

import torch
from torch import nn


def train(model, batches, epochs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    history = {"loss": [], "step": []}
    for _ in range(epochs):
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward(retain_graph=True)
            optimizer.step()
            history["step"].append(step)
            history["loss"].append(loss)
            mean = sum(history["loss"][-10:]) / 10
    return mean


net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
train(net, [(torch.randn(512, 64), torch.randint(0, 10, (512,))) for _ in range(8)], 10_000)
