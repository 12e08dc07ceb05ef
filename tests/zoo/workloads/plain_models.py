"""Models in plain torch: nn.Transformer, sequentials, graphs, tables, recommendation, several tasks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from zoo_data import VOCABULARY, images, padded, table, tokens

import autoplan

LENGTH = 32


class Translator(nn.Module):
    """nn.Transformer with masks for padding and for the future; source and target share their embedding."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.positions = nn.Embedding(LENGTH, width)
        self.transformer = nn.Transformer(width, 4, 3, 3, 128, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        place = torch.arange(LENGTH, device=source.device)
        future = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        out = self.transformer(
            self.embedding(source) + self.positions(place[: source.shape[1]]),
            self.embedding(target) + self.positions(place[: target.shape[1]]),
            tgt_mask=future,
            src_key_padding_mask=(source == 0).float().masked_fill(source == 0, float("-inf")),
            tgt_is_causal=True,
        )
        return self.head(out)


def _pairs(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    source, _ = padded(num_samples, LENGTH, index)
    target, _ = padded(num_samples, LENGTH, index + 30)
    return {"source": source, "target": target}


def _translation_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    logits = model(batch["source"], batch["target"][:, :-1])
    wanted = batch["target"][:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=0, reduction="sum")
    return autoplan.LossSum(total, (wanted != 0).sum())


def nn_transformer() -> autoplan.Workload:
    """torch's own nn.Transformer, padded."""
    return autoplan.Workload(
        name="nn-transformer",
        build_model=Translator,
        make_batch=_pairs,
        loss=_translation_loss,
        build_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3, betas=(0.9, 0.98), eps=1e-9),
        global_batch=8,
        sequence_length=LENGTH,
    )


class TextEncoder(nn.Module):
    """nn.TransformerEncoder under a classifier."""

    def __init__(self, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 4, 128, dropout=0.1, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, 2)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(self.embedding(ids), src_key_padding_mask=mask == 0)
        return self.head((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def _sentences(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    ids, mask = padded(num_samples, LENGTH, index)
    return {"ids": ids, "mask": mask, "labels": (ids[:, 0] > 20).long()}


def _sentence_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    logits = model(batch["ids"], batch["mask"])
    return autoplan.LossSum(F.cross_entropy(logits, batch["labels"], reduction="sum"), len(logits))


def nn_encoder() -> autoplan.Workload:
    """torch's nn.TransformerEncoder with a mask of padding."""
    return autoplan.Workload(
        name="nn-encoder",
        build_model=TextEncoder,
        make_batch=_sentences,
        loss=_sentence_loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        global_batch=8,
    )


class NanoGPT(nn.Module):
    """A decoder as tutorials write it; its forward gives logits and loss, the head is tied."""

    def __init__(self, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, width),
                "wpe": nn.Embedding(LENGTH, width),
                "h": nn.ModuleList([NanoBlock(width) for _ in range(layers)]),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.transformer["wte"](ids) + self.transformer["wpe"](torch.arange(ids.shape[1], device=ids.device))
        for block in self.transformer["h"]:
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)


class NanoBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


def _next_tokens(num_samples: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = tokens(num_samples, LENGTH + 1, index)
    return ids[:, :-1], ids[:, 1:]


def _nano_loss(model: nn.Module, batch: Any) -> autoplan.LossSum:
    ids, targets = batch
    _, mean = model(ids, targets)
    return autoplan.LossSum(mean * targets.numel(), targets.numel())


def nanogpt() -> autoplan.Workload:
    """A mean from the model's forward, times the count; the batch is a tuple."""
    return autoplan.Workload(
        name="nanogpt",
        build_model=NanoGPT,
        make_batch=_next_tokens,
        loss=_nano_loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95)),
        global_batch=8,
        sequence_length=LENGTH,
        max_grad_norm=1.0,
    )


class Tower(nn.Module):
    """A ModuleList of Sequentials, with a residual around each."""

    def __init__(self, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
                for _ in range(depth)
            ]
        )
        self.enter, self.leave = nn.Linear(8, width), nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.leave(x)


def _rows(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    rows, values = table(num_samples, 8, index)
    return {"rows": rows, "values": values}


def _squared_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    return autoplan.LossSum(F.mse_loss(model(batch["rows"]), batch["values"], reduction="sum"), len(batch["rows"]))


def sequentials() -> autoplan.Workload:
    """Blocks that are Sequentials in a ModuleList."""
    return autoplan.Workload(
        name="sequentials",
        build_model=Tower,
        make_batch=_rows,
        loss=_squared_loss,
        build_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        global_batch=32,
    )


def mlp() -> autoplan.Workload:
    """Regression with a Sequential; L-BFGS aside, the smallest training there is."""
    return autoplan.Workload(
        name="mlp",
        build_model=lambda: nn.Sequential(
            nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        ),
        make_batch=_rows,
        loss=_squared_loss,
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        global_batch=64,
    )


class GraphLayer(nn.Module):
    """Each node takes the mean of its neighbours."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.own, self.others, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        degree = edges.sum(-1, keepdim=True).clamp(min=1)
        return x + F.relu(self.norm(self.own(x) + self.others(edges @ x / degree)))


class GraphNet(nn.Module):
    def __init__(self, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(6, width)
        self.layers = nn.ModuleList([GraphLayer(width) for _ in range(layers)])
        self.leave = nn.Linear(width, 3)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        x = self.enter(nodes)
        for layer in self.layers:
            x = layer(x, edges)
        return self.leave(x)


def _graphs(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    nodes = torch.randn(num_samples, 20, 6, generator=generator)
    edges = (torch.rand(num_samples, 20, 20, generator=generator) < 0.2).float()
    known = torch.rand(num_samples, 20, generator=generator) < 0.5
    known[:, 0] = True
    return {"nodes": nodes, "edges": edges, "known": known, "labels": nodes[..., :3].argmax(-1)}


def _node_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    logits = model(batch["nodes"], batch["edges"])
    known = batch["known"]
    total = F.cross_entropy(logits[known], batch["labels"][known], reduction="sum")
    return autoplan.LossSum(total, known.sum())


def graph() -> autoplan.Workload:
    """Message passing; the loss picks the nodes whose class is known, by a mask of booleans."""
    return autoplan.Workload(
        name="graph",
        build_model=GraphNet,
        make_batch=_graphs,
        loss=_node_loss,
        build_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
        global_batch=8,
    )


class Recommender(nn.Module):
    """Embedding bags for what a user liked, an MLP over all."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(100, width), nn.Embedding(200, width)
        self.liked = nn.EmbeddingBag(200, width, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(3 * width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user: torch.Tensor, item: torch.Tensor, liked: torch.Tensor) -> torch.Tensor:
        return self.mlp(torch.cat([self.users(user), self.items(item), self.liked(liked)], -1))[:, 0]


def _clicks(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    user = torch.randint(0, 100, (num_samples,), generator=generator)
    item = torch.randint(0, 200, (num_samples,), generator=generator)
    liked = torch.randint(0, 200, (num_samples, 5), generator=generator)
    return {"user": user, "item": item, "liked": liked, "clicked": ((user + item) % 3 == 0).float()}


def _click_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    logits = model(batch["user"], batch["item"], batch["liked"])
    return autoplan.LossSum(F.binary_cross_entropy_with_logits(logits, batch["clicked"], reduction="sum"), len(logits))


def recommender() -> autoplan.Workload:
    """Embedding tables; Adagrad."""
    return autoplan.Workload(
        name="recommender",
        build_model=Recommender,
        make_batch=_clicks,
        loss=_click_loss,
        build_optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
        global_batch=32,
    )


class TwoTasks(nn.Module):
    """One convolutional trunk, a class and a mask; how much each loss weighs is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()
        )
        self.classify, self.segment = nn.Linear(16, 4), nn.Conv2d(16, 1, 1)
        self.log_weights = nn.Parameter(torch.zeros(2))

    def forward(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        features = self.trunk(pixels)
        return {"classes": self.classify(features.mean((2, 3))), "masks": self.segment(features)[:, 0]}


def _scenes(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    pixels, labels = images(num_samples, 16, index)
    return {"pixels": pixels, "labels": labels, "masks": (pixels.mean(1) > 0.6).float()}


def _two_losses(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    out = model(batch["pixels"])
    classes = F.cross_entropy(out["classes"], batch["labels"], reduction="sum")
    masks = F.binary_cross_entropy_with_logits(out["masks"], batch["masks"], reduction="none").mean((1, 2)).sum()
    weights = (-model.log_weights).exp()
    count = len(batch["pixels"])
    return autoplan.LossSum(weights[0] * classes + weights[1] * masks + count * model.log_weights.sum(), count)


def two_tasks() -> autoplan.Workload:
    """Two losses with learnt weights, which are a parameter of the model outside any layer."""
    return autoplan.Workload(
        name="two-tasks",
        build_model=TwoTasks,
        make_batch=_scenes,
        loss=_two_losses,
        build_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3),
        global_batch=16,
    )
