"""Samples of 32 tokens, padded to 512."""

import torch
from torch import nn
from torch.utils.data import DataLoader


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.head = nn.Linear(64, 4)

    def forward(self, input_ids, attention_mask):
        hidden = self.layer(self.embedding(input_ids)) * attention_mask[..., None]
        return self.head(hidden.mean(1))


def collate(samples):
    ids = torch.zeros(len(samples), 512, dtype=torch.long)
    for row, sample in enumerate(samples):
        ids[row, : len(sample)] = sample
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


model = Encoder()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
samples = [torch.randint(1, 100, (32,)) for _ in range(64)]
while True:
    for batch in DataLoader(samples, batch_size=8, collate_fn=collate):
        optimizer.zero_grad()
        model(**batch).square().mean().backward()
        optimizer.step()
