"""More models in plain torch: two losses, double backward, complex and sparse numbers, buffers that a forward moves."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from zoo_data import VOCABULARY, images, padded, table, tokens

import autoplan


def adam(name: str, build: Any, make_batch: Any, loss: Any, **more: Any) -> autoplan.Workload:
    """Adam, 8 samples."""
    options: dict[str, Any] = {
        "build_optimizer": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        "global_batch": 8,
    }
    return autoplan.Workload(name=name, build_model=build, make_batch=make_batch, loss=loss, **(options | more))


class Adversaries(nn.Module):
    """A generator and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 64), nn.LeakyReLU(), nn.Linear(64, 16))
        self.critic = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(), nn.Linear(64, 1))


def _gan_batch(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    real, _ = table(num_samples, 16, index)
    return {"real": real.cumsum(-1) * 0.3, "noise": table(num_samples, 8, index + 100)[0]}


def _gan_loss(model: Any, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
    fake = model.generator(batch["noise"])
    real_score, fake_score = model.critic(batch["real"]), model.critic(fake.detach())
    critic = F.softplus(-real_score).sum() + F.softplus(fake_score).sum()
    frozen = {name: value.detach() for name, value in model.critic.named_parameters()}
    generator = F.softplus(-torch.func.functional_call(model.critic, frozen, (fake,))).sum()
    return autoplan.LossSum(critic + generator, len(fake))


def gan() -> autoplan.Workload:
    """Two losses in one step; the critic's weights are detached for the generator's."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        given = list(parameters)
        return torch.optim.Adam([{"params": given[:4]}, {"params": given[4:], "lr": 4e-4}], lr=1e-4, betas=(0.5, 0.999))

    return adam("gan", Adversaries, _gan_batch, _gan_loss, build_optimizer=optimizer)


class UNet(nn.Module):
    """Skips between the way down and the way up."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()

        def double(inside: int, outside: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.SiLU(), nn.Dropout2d(0.1),
                nn.Conv2d(outside, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.SiLU(),
            )  # fmt: skip

        self.down1, self.down2, self.middle = double(3, width), double(width, 2 * width), double(2 * width, 4 * width)
        self.up2, self.up1 = double(6 * width, 2 * width), double(3 * width, width)
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        deep = F.interpolate(self.middle(F.max_pool2d(two, 2)), scale_factor=2)
        deep = self.up2(torch.cat([deep, two], 1))
        return self.out(self.up1(torch.cat([F.interpolate(deep, scale_factor=2), one], 1)))


def _segments(num_samples: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    pixels, _ = images(num_samples, 32, index)
    return pixels, (pixels.mean(1) > 0.6).long()


def _dice_loss(model: nn.Module, batch: Any) -> autoplan.LossSum:
    logits = model(batch[0])
    found, wanted = logits.softmax(1)[:, 1].flatten(1), batch[1].float().flatten(1)
    dice = 1 - (2 * (found * wanted).sum(1) + 1) / (found.sum(1) + wanted.sum(1) + 1)
    cross = F.cross_entropy(logits, batch[1], reduction="none").flatten(1).mean(1)
    return autoplan.LossSum((dice + cross).sum(), len(logits))


def plain_unet() -> autoplan.Workload:
    """Segmentation with the dice loss of each image."""
    return adam("plain-unet", UNet, _segments, _dice_loss)


class Siamese(nn.Module):
    """One encoder for three images."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 16, 4, stride=4), nn.PReLU(), nn.Conv2d(16, 32, 4, stride=4), nn.Flatten(), nn.Linear(128, 16)
        )

    def forward(self, *pictures: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(F.normalize(self.encoder(one), dim=-1) for one in pictures)


def _triplets(num_samples: int, index: int) -> list[torch.Tensor]:
    return [images(num_samples, 32, 3 * index + part)[0] for part in range(3)]


def siamese() -> autoplan.Workload:
    """The batch is a list of three; the margin makes some gradients zero."""

    def loss(model: nn.Module, batch: Any) -> autoplan.LossSum:
        return autoplan.LossSum(F.triplet_margin_loss(*model(*batch), margin=0.3, reduction="sum"), len(batch[0]))

    return adam("siamese", Siamese, _triplets, loss)


class Translator(nn.Module):
    """Recurrent encoder and decoder with attention, teacher forcing by chance."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, width, padding_idx=0), nn.Embedding(VOCABULARY, width)
        self.encoder = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        self.cell = nn.GRUCell(2 * width, width)
        self.attend = nn.Bilinear(width, width, 1)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory, last = self.encoder(self.source(source))
        state = last.transpose(0, 1).flatten(1)
        token, logits = target[:, 0], []
        for place in range(1, target.shape[1]):
            scores = self.attend(state[:, None].expand_as(memory).contiguous(), memory)
            context = (scores.softmax(1) * memory).sum(1)
            state = self.cell(torch.cat([self.target(token), context], -1), state)
            logits.append(self.head(state))
            token = target[:, place] if random.random() < 0.5 else logits[-1].argmax(-1)
        return torch.stack(logits, 1)


def _pairs(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    return {"source": padded(num_samples, 16, index)[0], "target": tokens(num_samples, 10, index + 9)}


def seq2seq() -> autoplan.Workload:
    """Python's random decides each step between the truth and the guess."""

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
        logits = model(**batch)
        wanted = batch["target"][:, 1:]
        return autoplan.LossSum(
            F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum"), wanted.numel()
        )

    return adam("seq2seq", Translator, _pairs, loss, max_grad_norm=1.0)


class Standardising(nn.Module):
    """Counts its calls and keeps a running mean of its input, which nothing reads in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(16))
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.layers(x)


def _squares(model: nn.Module, batch: Any) -> autoplan.LossSum:
    return autoplan.LossSum(F.mse_loss(model(batch[0]), batch[1], reduction="sum"), len(batch[0]))


def counters() -> autoplan.Workload:
    """Buffers that the forward changes and only evaluation reads; the user says the micro-batch."""
    return adam("counters", Standardising, lambda n, i: table(n, 16, i), _squares, fixed_micro_batch=4)


class Codebook(nn.Module):
    """VQ-VAE with the codes moved by a moving mean inside the forward."""

    def __init__(self, codes: int = 16, width: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, width))
        self.decoder = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 16))
        self.register_buffer("codes", torch.randn(codes, width))
        self.register_buffer("sizes", torch.ones(codes))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.encoder(x)
        chosen = F.one_hot(torch.cdist(z, self.codes).argmin(-1), len(self.codes)).float()
        found = chosen @ self.codes
        if self.training:
            with torch.no_grad():
                sums = chosen.T @ z
                self.sizes.lerp_(chosen.sum(0), 0.05)
                self.codes.copy_(
                    torch.where(
                        chosen.sum(0)[:, None] > 0,
                        self.codes.lerp(sums / chosen.sum(0).clamp(min=1)[:, None], 0.05),
                        self.codes,
                    )
                )
        return self.decoder(z + (found - z).detach()), (z - found.detach()).square().sum(-1)


def vq_vae() -> autoplan.Workload:
    """The codes are buffers that change with each micro-batch; the user says its size."""

    def loss(model: nn.Module, batch: Any) -> autoplan.LossSum:
        out, commitment = model(batch[0])
        return autoplan.LossSum((out - batch[0]).square().sum() + 0.25 * commitment.sum(), len(batch[0]))

    return adam("vq-vae", Codebook, lambda n, i: table(n, 16, i), loss, fixed_micro_batch=8, global_batch=16)


def pinn() -> autoplan.Workload:
    """The loss differentiates the model by its input, and is then differentiated itself."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def loss(model: nn.Module, batch: Any) -> autoplan.LossSum:
        places = batch["places"].clone().requires_grad_(True)
        value = model(places)
        (slope,) = torch.autograd.grad(value.sum(), places, create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, 0].sum(), places, create_graph=True)
        residual = (slope[:, 1] - bend[:, 0]).square() + (value[:, 0] - places[:, 0].sin()).square()
        return autoplan.LossSum(residual.sum(), len(places))

    return adam("pinn", build, lambda n, i: {"places": table(n, 2, i)[0]}, loss, global_batch=32)


class Spectral(nn.Module):
    """Fourier layers: complex weights, and spectral norm on the head."""

    def __init__(self, width: int = 16, modes: int = 6) -> None:
        super().__init__()
        self.lift = nn.Linear(1, width)
        self.mix = nn.ParameterList(
            [nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width) for _ in range(3)]
        )
        self.skip = nn.ModuleList([nn.Conv1d(width, width, 1) for _ in range(3)])
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(width, 1))
        self.modes = modes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.lift(x[..., None]).transpose(1, 2)
        for mix, skip in zip(self.mix, self.skip, strict=True):
            spectrum = torch.fft.rfft(h)
            low = torch.einsum("bim,iom->bom", spectrum[..., : self.modes], mix)
            h = F.gelu(torch.fft.irfft(F.pad(low, (0, spectrum.shape[-1] - self.modes)), n=x.shape[-1]) + skip(h))
        return self.head(h.transpose(1, 2))[..., 0]


def fourier() -> autoplan.Workload:
    """Complex parameters and FFTs, weight norm."""

    def batch(num_samples: int, index: int) -> dict[str, torch.Tensor]:
        x = table(num_samples, 32, index)[0].cumsum(-1)
        return {"x": x, "y": x.roll(1, -1)}

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
        return autoplan.LossSum((model(batch["x"]) - batch["y"]).square().sum(), batch["y"].numel())

    return adam("fourier", Spectral, batch, loss)


class SparseWords(nn.Module):
    """Skip-gram with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.center, self.context = (nn.Embedding(VOCABULARY, 32, sparse=True) for _ in range(2))

    def forward(self, center: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bd,bnd->bn", self.center(center), self.context(context))


def sparse() -> autoplan.Workload:
    """Sparse gradients with SparseAdam."""

    def batch(num_samples: int, index: int) -> dict[str, torch.Tensor]:
        ids = tokens(num_samples, 6, index)
        return {"center": ids[:, 0], "context": ids[:, 1:]}

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
        scores = model(**batch)
        wanted = torch.zeros_like(scores)
        wanted[:, 0] = 1.0
        return autoplan.LossSum(F.binary_cross_entropy_with_logits(scores, wanted, reduction="sum"), scores.numel())

    return adam(
        "sparse", SparseWords, batch, loss, global_batch=32,
        build_optimizer=lambda parameters: torch.optim.SparseAdam(list(parameters), lr=1e-2),
    )  # fmt: skip


class Policy(nn.Module):
    """Actor and critic on one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.actor, self.critic = nn.Linear(64, 4), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.distributions.Categorical, torch.Tensor]:
        h = self.body(x)
        return torch.distributions.Categorical(logits=self.actor(h)), self.critic(h)[:, 0]


def ppo() -> autoplan.Workload:
    """The clipped ratio of PPO, an entropy bonus; the model returns a distribution."""

    def batch(num_samples: int, index: int) -> dict[str, torch.Tensor]:
        seen, value = table(num_samples, 16, index)
        return {
            "seen": seen,
            "action": tokens(num_samples, 1, index)[:, 0] % 4,
            "old": torch.full((num_samples,), -1.386),
            "gain": value[:, 0],
            "clip": torch.tensor(0.2),
        }

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
        policy, value = model(batch["seen"])
        ratio = (policy.log_prob(batch["action"]) - batch["old"]).exp()
        clipped = ratio.clamp(1 - float(batch["clip"]), 1 + float(batch["clip"]))
        gain = torch.min(ratio * batch["gain"], clipped * batch["gain"])
        total = -gain + 0.5 * (value - batch["gain"]).square() - 0.01 * policy.entropy()
        return autoplan.LossSum(total.sum(), len(value))

    return adam("ppo", Policy, batch, loss, max_grad_norm=0.5, global_batch=32)


class Averaged(nn.Module):
    """BYOL: a target that follows the trained encoder, moved at each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16))
        self.predict = nn.Linear(16, 16)
        self.target = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16))
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)

    def forward(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                for old, new in zip(self.target.parameters(), self.online.parameters(), strict=True):
                    old.lerp_(new, 0.01)
        with torch.no_grad():
            wanted = self.target(two)
        return 2 - 2 * F.cosine_similarity(self.predict(self.online(one)), wanted, dim=-1)


def byol() -> autoplan.Workload:
    """Frozen parameters that the forward itself moves; the user says the micro-batch."""

    def batch(num_samples: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows, _ = table(num_samples, 16, index)
        noise, _ = table(num_samples, 16, index + 40)
        return rows, rows + 0.1 * noise

    def loss(model: nn.Module, batch: Any) -> autoplan.LossSum:
        return autoplan.LossSum(model(*batch).sum(), len(batch[0]))

    return adam("byol", Averaged, batch, loss, fixed_micro_batch=8)


class Captions(nn.Module):
    """Scores a picture against a text."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(128, 32)
        self.pixels = nn.Sequential(nn.Conv2d(3, 16, 8, stride=8), nn.GELU(), nn.Flatten(), nn.Linear(256, 32))

    def forward(self, pixels: torch.Tensor, texts: list[str]) -> torch.Tensor:
        letters = [torch.tensor([ord(letter) for letter in text]) for text in texts]
        starts = torch.tensor([0, *(len(part) for part in letters[:-1])]).cumsum(0)
        words = self.words(torch.cat(letters), starts)
        return (words * self.pixels(pixels)).sum(-1)


def captions() -> autoplan.Workload:
    """The batch has a list of texts, one for each sample, that the model reads letter by letter."""

    def batch(num_samples: int, index: int) -> dict[str, Any]:
        pixels, labels = images(num_samples, 32, index)
        return {"pixels": pixels, "texts": [f"a disc in quarter {int(label)}" for label in labels], "labels": labels}

    def loss(model: nn.Module, batch: dict[str, Any]) -> autoplan.LossSum:
        scores = model(batch["pixels"], batch["texts"])
        wanted = (batch["labels"] > 1).float()
        return autoplan.LossSum(F.binary_cross_entropy_with_logits(scores, wanted, reduction="sum"), len(scores))

    return adam("captions", Captions, batch, loss)
