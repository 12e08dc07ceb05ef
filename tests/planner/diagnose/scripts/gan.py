"""Two optimizers in turn: each net is trained, and neither is called in vain."""

import torch
from torch import nn

generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64))
critic = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, fused=True)
of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, fused=True)
loss = nn.BCEWithLogitsLoss()
real, yes, no = torch.randn(64, 64), torch.ones(64, 1), torch.zeros(64, 1)
while True:
    made = generator(torch.randn(64, 16))
    of_generator.zero_grad()
    loss(critic(made), yes).backward()
    of_generator.step()
    of_critic.zero_grad()
    (loss(critic(real), yes) + loss(critic(made.detach()), no)).backward()
    of_critic.step()
