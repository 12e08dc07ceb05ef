"""A GPT in fp32, eager, for-loop AdamW: what a beginner writes."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

dev = "cuda" if torch.cuda.is_available() else "cpu"
big = dev == "cuda"
cfg = GPT2Config(
    n_layer=12 if big else 2, n_embd=768 if big else 64, n_head=12 if big else 4, attn_implementation="eager"
)
net = GPT2LMHeadModel(cfg).to(dev)
opt = torch.optim.AdamW(net.parameters(), foreach=False)
for step in range(100_000):
    ids = torch.randint(0, 50257, (4, 512 if big else 64)).to(dev)
    opt.zero_grad()
    loss = net(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    if step % 10 == 0:
        print(step, loss.item(), flush=True)
