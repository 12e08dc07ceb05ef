"""An evaluation over 20 batches after every second step."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(1280, 256), torch.randint(0, 4, (1280,)))
train, held_out = DataLoader(data, batch_size=64), DataLoader(data, batch_size=64)


def evaluate():
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for inputs, labels in held_out:
            total += nn.functional.cross_entropy(model(inputs), labels, reduction="sum").item()
            count += len(labels)
    model.train()
    return total / count


step = 0
while True:
    for inputs, labels in train:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        step += 1
        if step % 2 == 0:
            evaluate()
