"""A variational autoencoder; the anomaly detection that once found a NaN is still on."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(196, 100), nn.Linear(100, 20), nn.Linear(100, 20)
        self.fc3, self.fc4 = nn.Linear(20, 100), nn.Linear(100, 196)

    def forward(self, x):
        h = F.relu(self.fc1(x))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def loss_function(recon, x, mu, logvar):
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return F.binary_cross_entropy(recon, x, reduction="sum") + kld


model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
data = torch.rand(2048, 196)
for _ in range(100_000):
    for i in range(0, len(data), 32):
        batch = data[i : i + 32]
        optimizer.zero_grad()
        with torch.autograd.detect_anomaly():
            loss = loss_function(model(batch)[0], batch, *model(batch)[1:])
            loss.backward()
        optimizer.step()
