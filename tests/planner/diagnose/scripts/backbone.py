"""Transfer learning: the optimizer has the head alone, and the backbone inside the model gets gradients too."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        layers, width = [], 3
        for wider in (16, 32, 32):
            layers += [nn.Conv2d(width, wider, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            width = wider
        self.backbone = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(32 * 16, 32), nn.ReLU(), nn.Linear(32, 5))

    def forward(self, x):
        return self.head(self.backbone(x))


model = Classifier()
dataset = TensorDataset(torch.randn(256, 3, 32, 32), torch.randint(0, 5, (256,)))
loader = DataLoader(dataset, batch_size=16, shuffle=True)
optimizer = torch.optim.Adam(model.head.parameters(), lr=1e-3, fused=True)
for _ in range(10_000):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
