"""Causal attention in single operations, on long sequences."""

import math

import torch
from torch import nn

HEADS, WIDTH, LENGTH = 4, 128, 384


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH)) == 0)

    def forward(self, x):
        q, k, v = (
            one.view(x.shape[0], LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2) for one in self.qkv(x).chunk(3, -1)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
        weights = torch.softmax(scores.masked_fill(self.mask, -math.inf), dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(x.shape))


model = nn.Sequential(Attention(), Attention())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    optimizer.zero_grad()
    model(torch.randn(4, LENGTH, WIDTH)).square().mean().backward()
    optimizer.step()
