"""Batches at hand, a model that works for some milliseconds, a line now and then, a fused optimizer."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())], nn.Linear(512, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
batches = [(torch.randn(64, 512), torch.randint(0, 4, (64,))) for _ in range(8)]
for step in range(1_000_000):
    inputs, labels = batches[step % 8]
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
