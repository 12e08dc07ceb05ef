"""Steps by hand, as pytorch/examples' word_language_model: no optimizer of torch; and its own code takes long."""

import time

import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8))
while True:
    model.zero_grad()
    model(torch.randn(64, 64)).square().mean().backward()
    time.sleep(0.02)
    with torch.no_grad():
        for one in model.parameters():
            one.add_(one.grad, alpha=-0.01)
