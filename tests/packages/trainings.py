"""Trainings of packages from PyPI, as their users write them: a model, an optimizer, a DataLoader, a loss.

Each function makes one, small, with random weights and drawn data. `of(package)` puts it into TRAININGS. Most are read
from a loop (`autoplan.from_loop`), which knows its batch size; some are a Workload.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import autoplan

try:
    import torchvision  # noqa: F401
except RuntimeError:  # its wheel has kernels for CUDA, which a CPU build of torch does not load; models need none
    for name in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):  # this file was loaded before, under another name
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

Make = Callable[[], autoplan.Workload]
TRAININGS: dict[str, tuple[str, Make]] = {}
"""By name: the package, and what makes the training."""

BATCH, SAMPLES, SIZE, CLASSES, VOCABULARY = 8, 64, 32, 4, 100


def of(package: str) -> Callable[[Make], Make]:
    """Puts a function into TRAININGS."""

    def add(make: Make) -> Make:
        TRAININGS[make.__name__.replace("_", "-")] = (package, make)
        return make

    return add


def draw(*shape: int, seed: int = 0, high: int | None = None) -> torch.Tensor:
    """Normal numbers, or whole ones below `high`."""
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=numbers) if high is None else torch.randint(high, shape, generator=numbers)


def pictures(channels: int = 3, size: int = SIZE) -> list[Any]:
    """(image, class) samples."""
    return list(zip(draw(SAMPLES, channels, size, size), draw(SAMPLES, high=CLASSES, seed=1), strict=True))


def maps(size: int = SIZE, dims: int = 2) -> list[Any]:
    """(image, classes of its places) samples."""
    shape = (SAMPLES, *[size] * dims)
    return list(zip(draw(SAMPLES, 1, *shape[1:]), draw(*shape, high=CLASSES, seed=1), strict=True))


def texts(length: int = 32) -> list[torch.Tensor]:
    """Token ids."""
    return list(draw(SAMPLES, length, high=VOCABULARY))


def rows(inputs: int, outputs: int = 1) -> list[Any]:
    """(numbers, numbers to predict) samples."""
    data = draw(SAMPLES, inputs)
    return list(zip(data, data[:, :1].sin().repeat(1, outputs), strict=True))


def loop(
    model: nn.Module,
    samples: Any,
    loss: Any,
    *,
    optimizer: Any = None,
    loader: Any = None,
    **settings: Any,
) -> autoplan.Workload:
    """The training of a loop over a DataLoader."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = loader or DataLoader(samples, batch_size=BATCH, shuffle=True)
    return autoplan.from_loop(model, optimizer, loader, loss, loss_mean=os.environ.get("LOSS_MEAN"), **settings)


def classes(model: nn.Module, batch: Any) -> torch.Tensor:
    """Cross-entropy of what a model says of an image, or of its places."""
    logits = model(batch[0])
    return F.cross_entropy(getattr(logits, "logits", logits), batch[1])


def squares(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean squared error."""
    return F.mse_loss(model(batch[0]), batch[1])


def next_token(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the next token."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The model gives its loss."""
    result: torch.Tensor = model(batch)
    return result


def classifier(model: nn.Module, size: int = SIZE, channels: int = 3, **settings: Any) -> autoplan.Workload:
    """A classifier of images."""
    return loop(model, pictures(channels, size), classes, **settings)


# torchvision, timm


@of("torchvision")
def resnet18() -> autoplan.Workload:
    from torchvision.models import resnet18 as build

    model = build(num_classes=CLASSES)
    return classifier(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


@of("torchvision")
def mobilenet_v3() -> autoplan.Workload:
    from torchvision.models import mobilenet_v3_small

    return classifier(mobilenet_v3_small(num_classes=CLASSES))


@of("torchvision")
def vision_transformer() -> autoplan.Workload:
    from torchvision.models import VisionTransformer

    return classifier(VisionTransformer(SIZE, 8, 4, 4, 64, 128, num_classes=CLASSES))


@of("torchvision")
def swin() -> autoplan.Workload:
    from torchvision.models import SwinTransformer

    return classifier(SwinTransformer([2, 2], 32, [2, 2], [2, 4], [4, 4], num_classes=CLASSES))


@of("torchvision")
def convnext() -> autoplan.Workload:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return classifier(ConvNeXt([CNBlockConfig(32, 64, 2), CNBlockConfig(64, None, 2)], num_classes=CLASSES))


@of("torchvision")
def fcn() -> autoplan.Workload:
    from torchvision.models.segmentation import fcn_resnet50

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0].expand(-1, 3, -1, -1))["out"], batch[1])

    return loop(fcn_resnet50(weights=None, weights_backbone=None, num_classes=CLASSES), maps(), loss)


def timm_model(name: str, **options: Any) -> autoplan.Workload:
    """A classifier of timm."""
    import timm

    return classifier(timm.create_model(name, num_classes=CLASSES, **options))


@of("timm")
def timm_vit() -> autoplan.Workload:
    return timm_model("test_vit", img_size=SIZE)


@of("timm")
def timm_resnet() -> autoplan.Workload:
    return timm_model("test_resnet")


@of("timm")
def timm_efficientnet() -> autoplan.Workload:
    return timm_model("test_efficientnet")


@of("timm")
def timm_convnext() -> autoplan.Workload:
    return timm_model("test_convnext")


@of("timm")
def timm_mixer() -> autoplan.Workload:
    return timm_model("mixer_s32_224", img_size=SIZE)


@of("timm")
def timm_nfnet() -> autoplan.Workload:
    return timm_model("test_nfnet")


@of("timm")
def timm_lamb() -> autoplan.Workload:
    import timm
    from timm.optim import Lamb

    model = timm.create_model("test_vit", img_size=SIZE, num_classes=CLASSES)
    return classifier(model, optimizer=Lamb(model.parameters(), lr=1e-3))


# diffusion


@of("diffusers")
def unet2d() -> autoplan.Workload:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        SIZE, block_out_channels=(32, 64), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), layers_per_block=1, norm_num_groups=8,
    )  # fmt: skip

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        noise, times = torch.randn_like(batch[0]), torch.randint(1000, (len(batch[0]),))
        return F.mse_loss(model(batch[0] + noise, times).sample, noise)

    return loop(model, pictures(), loss)


@of("diffusers")
def autoencoder_kl() -> autoplan.Workload:
    from diffusers import AutoencoderKL

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.mse_loss(model(batch[0]).sample, batch[0])

    return loop(AutoencoderKL(block_out_channels=(32,), norm_num_groups=8), pictures(), loss)


@of("diffusers")
def dit() -> autoplan.Workload:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(2, 16, in_channels=3, num_layers=2, sample_size=16, patch_size=4, norm_num_groups=1)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        times = batch[1] * 10
        return model(batch[0], timestep=times, class_labels=batch[1]).sample[:, :3].sub(batch[0]).square().mean()

    return loop(model, pictures(size=16), loss)


@of("denoising-diffusion-pytorch")
def gaussian_diffusion() -> autoplan.Workload:
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    model = GaussianDiffusion(Unet(16, dim_mults=(1, 2)), image_size=16, timesteps=100)
    return loop(model, list(draw(SAMPLES, 3, 16, 16).sigmoid()), own_loss)


# sequences


@of("x-transformers")
def x_decoder() -> autoplan.Workload:
    from x_transformers import Decoder, TransformerWrapper

    model = TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=32, attn_layers=Decoder(dim=64, depth=3, heads=4))
    return loop(model, texts(), next_token)


@of("x-transformers")
def x_autoregressive() -> autoplan.Workload:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=64, depth=2, heads=4, rotary_pos_emb=True, attn_flash=True)
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=32, attn_layers=layers))
    return loop(model, texts(), own_loss)


@of("x-transformers")
def x_vit() -> autoplan.Workload:
    from x_transformers import Encoder, ViTransformerWrapper

    layers = Encoder(dim=64, depth=3, heads=4)
    return classifier(ViTransformerWrapper(image_size=SIZE, patch_size=8, num_classes=CLASSES, attn_layers=layers))


@of("x-transformers")
def x_translator() -> autoplan.Workload:
    from x_transformers import XTransformer

    model = XTransformer(
        dim=64, enc_num_tokens=VOCABULARY, enc_depth=2, enc_heads=4, enc_max_seq_len=32, dec_num_tokens=VOCABULARY,
        dec_depth=2, dec_heads=4, dec_max_seq_len=32,
    )  # fmt: skip
    return loop(model, texts(), lambda model, batch: model(batch, batch))


@of("performer-pytorch")
def performer() -> autoplan.Workload:
    from performer_pytorch import PerformerLM

    model = PerformerLM(num_tokens=VOCABULARY, max_seq_len=32, dim=32, depth=2, heads=2, dim_head=16, causal=False)
    return loop(model, texts(), next_token)


@of("local-attention")
def local_transformer() -> autoplan.Workload:
    from local_attention import LocalTransformer

    model = LocalTransformer(
        num_tokens=VOCABULARY, dim=32, depth=2, max_seq_len=32, local_attn_window_size=8, heads=2, dim_head=16
    )
    return loop(model, texts(33), lambda model, batch: model(batch, return_loss=True))


@of("conformer")
def conformer() -> autoplan.Workload:
    from conformer import ConformerBlock

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([ConformerBlock(dim=32, dim_head=16, heads=2) for _ in range(2)])
            self.head = nn.Linear(32, CLASSES)

        def forward(self, frames: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                frames = block(frames)
            return self.head(frames).transpose(1, 2)

    samples = list(zip(draw(SAMPLES, 24, 32), draw(SAMPLES, 24, high=CLASSES), strict=True))
    return loop(Tagger(), samples, classes)


@of("entmax")
def entmax_attention() -> autoplan.Workload:
    from entmax import entmax15

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.score = nn.Embedding(VOCABULARY, 64), nn.Linear(64, 1)
            self.head = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            states = self.embed(ids)
            return self.head((entmax15(self.score(states), dim=1) * states).sum(1))

    samples = list(zip(texts(), draw(SAMPLES, high=CLASSES), strict=True))
    return loop(Reader(), samples, classes)


@of("lion-pytorch")
def lion() -> autoplan.Workload:
    from lion_pytorch import Lion

    model = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1))
    return loop(model, rows(16), squares, optimizer=Lion(model.parameters(), lr=1e-4, weight_decay=1e-2))


class Recurrent(nn.Module):
    """nn.LSTM as it comes: (time, batch, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.LSTM(8, 32), nn.Linear(32, CLASSES)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(frames)[0][-1])
        return logits


def time_first_samples() -> list[Any]:
    """(sequence, class) samples."""
    return list(zip(draw(SAMPLES, 20, 8), draw(SAMPLES, high=CLASSES), strict=True))


def stacked(samples: list[Any]) -> dict[str, torch.Tensor]:
    """A batch with the time first."""
    return {"x": torch.stack([x for x, _ in samples], dim=1), "y": torch.stack([y for _, y in samples])}


@of("torch")
def time_first() -> autoplan.Workload:
    """In a loop: refused, with the advice to give SampleBatches."""
    samples = time_first_samples()
    loader = DataLoader(samples, batch_size=BATCH, collate_fn=stacked)
    return loop(Recurrent(), samples, lambda model, batch: classes(model, (batch["x"], batch["y"])), loader=loader)


@of("torch")
def time_first_samples_kept() -> autoplan.Workload:
    """The same after the advice."""
    samples = time_first_samples()

    def make_batch(count: int, index: int) -> Any:
        chosen = [samples[(index * count + number) % SAMPLES] for number in range(count)]
        return autoplan.SampleBatch(chosen, stacked, rows_are_samples=False)

    return autoplan.Workload(
        name="time first",
        build_model=Recurrent,
        make_batch=make_batch,
        loss=lambda model, batch: autoplan.LossSum(
            F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])
        ),
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        global_batch=BATCH,
    )


@of("torch")
def muon_and_adamw() -> autoplan.Workload:
    """An optimizer by shape, given as a function."""

    def build_optimizer(parameters: Any) -> torch.optim.Optimizer:
        matrices = [parameter for parameter in parameters if parameter.dim() == 2]
        return torch.optim.Muon(matrices, lr=1e-3)

    return autoplan.Workload(
        name="muon",
        build_model=lambda: nn.Sequential(nn.Linear(16, 64, bias=False), nn.ReLU(), nn.Linear(64, 1, bias=False)),
        make_batch=lambda count, index: {"x": draw(count, 16, seed=index), "y": draw(count, 1, seed=index)},
        loss=lambda model, batch: autoplan.LossSum((model(batch["x"]) - batch["y"]).square().sum(), len(batch["x"])),
        build_optimizer=build_optimizer,
        global_batch=BATCH,
    )


@of("torch")
def one_cycle() -> autoplan.Workload:
    """A schedule that is shorter than a trial."""
    model = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
    return loop(model, rows(16), squares, optimizer=optimizer, schedule=schedule)


@of("torch")
def spectral_norm() -> autoplan.Workload:
    norm = nn.utils.parametrizations.spectral_norm
    return loop(nn.Sequential(norm(nn.Linear(16, 64)), nn.ReLU(), norm(nn.Linear(64, 1))), rows(16), squares)


# vit-pytorch, perceiver


def vit_pytorch(model: Any, size: int = SIZE) -> autoplan.Workload:
    """A classifier of vit-pytorch."""
    return classifier(model, size)


VIT: dict[str, Any] = {
    "image_size": SIZE, "patch_size": 8, "num_classes": CLASSES, "dim": 64, "depth": 3, "heads": 4, "mlp_dim": 128,
}  # fmt: skip


@of("vit-pytorch")
def lucid_vit() -> autoplan.Workload:
    from vit_pytorch import ViT

    return classifier(ViT(**VIT, dropout=0.1))


@of("vit-pytorch")
def simple_vit() -> autoplan.Workload:
    from vit_pytorch import SimpleViT

    return classifier(SimpleViT(**VIT))


@of("vit-pytorch")
def cait() -> autoplan.Workload:
    from vit_pytorch.cait import CaiT

    return classifier(CaiT(**VIT, cls_depth=2))


@of("vit-pytorch")
def deep_vit() -> autoplan.Workload:
    from vit_pytorch.deepvit import DeepViT

    return classifier(DeepViT(**VIT))


@of("vit-pytorch")
def cct() -> autoplan.Workload:
    from vit_pytorch.cct import CCT

    model = CCT(
        img_size=SIZE, embedding_dim=64, n_conv_layers=1, num_layers=2, num_heads=2, mlp_ratio=2.0, num_classes=CLASSES,
        stochastic_depth_rate=0.0,
    )  # fmt: skip
    return classifier(model)


@of("vit-pytorch")
def register_vit() -> autoplan.Workload:
    from vit_pytorch.simple_vit_with_register_tokens import SimpleViT

    return classifier(SimpleViT(**VIT))


@of("vit-pytorch")
def distilled_vit() -> autoplan.Workload:
    """A student and a frozen teacher of its class, side by side."""
    from vit_pytorch import SimpleViT

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = SimpleViT(**VIT), SimpleViT(**VIT).requires_grad_(False)

        def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.student(images), self.teacher(images)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        student, teacher = model(batch[0])
        return F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")

    return loop(Pair(), pictures(), loss)


@of("perceiver-pytorch")
def perceiver() -> autoplan.Workload:
    from perceiver_pytorch import Perceiver

    model = Perceiver(
        num_freq_bands=4, depth=2, max_freq=8.0, num_latents=16, latent_dim=32, cross_dim_head=16, latent_heads=2,
        latent_dim_head=16, num_classes=CLASSES,
    )  # fmt: skip
    return loop(model, [(image.permute(1, 2, 0), label) for image, label in pictures(size=16)], classes)


@of("perceiver-pytorch")
def perceiver_io() -> autoplan.Workload:
    from perceiver_pytorch import PerceiverIO

    model = PerceiverIO(
        dim=16, queries_dim=16, logits_dim=4, depth=2, num_latents=16, latent_dim=32, latent_heads=2,
        cross_dim_head=16, latent_dim_head=16, decoder_ff=False,
    )  # fmt: skip

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.mse_loss(model(batch[0], queries=batch[0]), batch[1])

    samples = list(zip(draw(SAMPLES, 12, 16), draw(SAMPLES, 12, 4), strict=True))
    return loop(model, samples, loss)


# images and volumes of medicine


@of("segmentation-models-pytorch")
def smp_unet() -> autoplan.Workload:
    import segmentation_models_pytorch as smp

    return loop(smp.Unet("resnet18", encoder_weights=None, in_channels=1, classes=CLASSES), maps(), classes)


@of("segmentation-models-pytorch")
def smp_fpn() -> autoplan.Workload:
    import segmentation_models_pytorch as smp

    return loop(smp.FPN("mobilenet_v2", encoder_weights=None, in_channels=1, classes=CLASSES), maps(), classes)


@of("segmentation-models-pytorch")
def smp_dice() -> autoplan.Workload:
    import segmentation_models_pytorch as smp

    dice = smp.losses.DiceLoss("multiclass")
    model = smp.Segformer("mit_b0", encoder_weights=None, in_channels=3, classes=CLASSES)
    samples = [(image.expand(3, -1, -1), places) for image, places in maps(64)]
    return loop(model, samples, lambda model, batch: dice(model(batch[0]), batch[1]))


@of("monai")
def monai_unet() -> autoplan.Workload:
    from monai.networks.nets import UNet

    model = UNet(spatial_dims=3, in_channels=1, out_channels=CLASSES, channels=(8, 16), strides=(2,), num_res_units=1)
    return loop(model, maps(16, 3), classes)


@of("monai")
def unetr() -> autoplan.Workload:
    from monai.networks.nets import UNETR

    model = UNETR(1, CLASSES, (32, 32), feature_size=8, hidden_size=48, mlp_dim=96, num_heads=4, spatial_dims=2)
    return loop(model, maps(), classes)


@of("monai")
def swin_unetr() -> autoplan.Workload:
    from monai.networks.nets import SwinUNETR

    return loop(SwinUNETR(1, CLASSES, feature_size=12, spatial_dims=2), maps(64), classes)


@of("monai")
def monai_densenet() -> autoplan.Workload:
    from monai.networks.nets import DenseNet

    model = DenseNet(
        spatial_dims=2, in_channels=3, out_channels=CLASSES, init_features=16, growth_rate=8, block_config=(2, 2)
    )
    return classifier(model)


@of("monai")
def segresnet() -> autoplan.Workload:
    from monai.losses import DiceCELoss
    from monai.networks.nets import SegResNet

    dice = DiceCELoss(to_onehot_y=True, softmax=True)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return dice(model(batch[0]), batch[1][:, None])

    return loop(SegResNet(spatial_dims=2, in_channels=1, out_channels=CLASSES, init_filters=8), maps(), loss)


@of("kornia")
def kornia_vit() -> autoplan.Workload:
    from kornia.models.vit import VisionTransformer

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = VisionTransformer(image_size=SIZE, patch_size=8, embed_dim=64, depth=2, num_heads=4)
            self.head = nn.Linear(64, CLASSES)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(images)[:, 0])

    return classifier(Classifier())


# physics, graphs, dynamics


@of("neuraloperator")
def fno() -> autoplan.Workload:
    from neuralop.models import FNO

    samples = list(zip(draw(SAMPLES, 1, 16, 16), draw(SAMPLES, 1, 16, 16, seed=1), strict=True))
    return loop(FNO(n_modes=(8, 8), in_channels=1, out_channels=1, hidden_channels=16, n_layers=3), samples, squares)


@of("neuraloperator")
def tfno() -> autoplan.Workload:
    from neuralop.losses import LpLoss
    from neuralop.models import TFNO

    error = LpLoss(d=2)
    samples = list(zip(draw(SAMPLES, 1, 16, 16), draw(SAMPLES, 1, 16, 16, seed=1), strict=True))
    model = TFNO(n_modes=(8, 8), in_channels=1, out_channels=1, hidden_channels=16, n_layers=2)
    return loop(model, samples, lambda model, batch: error(model(batch[0]), batch[1]))


@of("e3nn")
def equivariant() -> autoplan.Workload:
    from e3nn import o3

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            hidden, sphere = o3.Irreps("8x0e + 4x1o"), o3.Irreps.spherical_harmonics(2)
            self.sphere = sphere
            self.first = o3.FullyConnectedTensorProduct(sphere, sphere, hidden)
            self.second = o3.FullyConnectedTensorProduct(hidden, sphere, "1x0e")

        def forward(self, places: torch.Tensor) -> torch.Tensor:
            angles = o3.spherical_harmonics(self.sphere, places, normalize=True)
            return self.second(self.first(angles, angles), angles)

    samples = list(zip(draw(SAMPLES, 3), draw(SAMPLES, 1, seed=1), strict=True))
    return loop(Net(), samples, squares)


@of("e3nn")
def e3nn_mlp() -> autoplan.Workload:
    from e3nn.nn import FullyConnectedNet

    return loop(FullyConnectedNet([8, 64, 64, 1], torch.relu), rows(8), squares)


@of("torch-geometric")
def dense_graphs() -> autoplan.Workload:
    from torch_geometric.nn import DenseGCNConv

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = DenseGCNConv(8, 32), DenseGCNConv(32, 32)
            self.head = nn.Linear(32, CLASSES)

        def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            return self.head(self.second(self.first(nodes, edges).relu(), edges).mean(1))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0], batch[1]), batch[2])

    edges = (draw(SAMPLES, 10, 10) > 0.5).float()
    samples = list(zip(draw(SAMPLES, 10, 8), edges, draw(SAMPLES, high=CLASSES), strict=True))
    return loop(Net(), samples, loss)


def graph_net() -> Any:
    """A graph network over torch_geometric's batches, or the fields of one, and its samples."""
    from torch_geometric.data import Data
    from torch_geometric.nn import GCNConv, global_mean_pool

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = GCNConv(8, 32), GCNConv(32, 32), nn.Linear(32, CLASSES)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor, batch: torch.Tensor, graphs: int) -> torch.Tensor:
            x = self.second(self.first(x, edge_index).relu(), edge_index)
            return self.head(global_mean_pool(x, batch, graphs))

    sizes = [5 + number % 6 for number in range(SAMPLES)]
    samples = [
        Data(x=draw(size, 8, seed=number), edge_index=draw(2, 12, high=size, seed=number), y=torch.tensor([number % 4]))
        for number, size in enumerate(sizes)
    ]
    return Net(), samples


@of("torch-geometric")
def graph_loader() -> autoplan.Workload:
    """Graphs of different sizes, as the package's own loader gives them."""
    from torch_geometric.loader import DataLoader as GraphLoader

    model, samples = graph_net()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch.x, batch.edge_index, batch.batch, batch.num_graphs), batch.y)

    return loop(model, samples, loss, loader=GraphLoader(samples, batch_size=BATCH, shuffle=True))


@of("torch-geometric")
def graph_samples() -> autoplan.Workload:
    """The same graphs in an autoplan.SampleBatch, which collates the samples of each micro-batch by themselves."""
    from torch_geometric.data import Batch

    model, samples = graph_net()

    def collate(graphs: list[Any]) -> dict[str, Any]:
        whole = Batch.from_data_list(graphs)
        return {"x": whole.x, "edge_index": whole.edge_index, "batch": whole.batch, "y": whole.y}

    def make_batch(count: int, index: int) -> Any:
        chosen = [samples[(index * count + number) % SAMPLES] for number in range(count)]
        return autoplan.SampleBatch(chosen, collate, rows_are_samples=False)

    def loss(model: nn.Module, batch: Any) -> autoplan.LossSum:
        graphs = len(batch["y"])
        logits = model(batch["x"], batch["edge_index"], batch["batch"], graphs)
        return autoplan.LossSum(F.cross_entropy(logits, batch["y"], reduction="sum"), graphs)

    return autoplan.Workload(
        name="graphs",
        build_model=lambda: graph_net()[0],
        make_batch=make_batch,
        loss=loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        global_batch=BATCH,
    )


@of("torchdiffeq")
def neural_ode() -> autoplan.Workload:
    from torchdiffeq import odeint

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4))

        def forward(self, start: torch.Tensor) -> torch.Tensor:
            times = torch.linspace(0, 1, 5, device=start.device)
            return odeint(lambda t, y: self.field(y), start, times, method="rk4")[-1]

    return loop(Flow(), rows(4, 4), squares)


@of("torchdiffeq")
def adaptive_ode() -> autoplan.Workload:
    """Steps by the error over the whole batch."""
    from torchdiffeq import odeint

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4))

        def forward(self, start: torch.Tensor) -> torch.Tensor:
            return odeint(lambda t, y: self.field(y), start, torch.tensor([0.0, 1.0]), method="dopri5")[-1]

    return loop(Flow(), rows(4, 4), squares)


@of("torchsde")
def neural_sde() -> autoplan.Workload:
    import torchsde

    class Noisy(nn.Module):
        noise_type, sde_type = "diagonal", "ito"

        def __init__(self) -> None:
            super().__init__()
            self.drift = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 4))
            self.rate = nn.Parameter(torch.full((4,), 0.1))

        def f(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.drift(y)

        def g(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.rate.expand_as(y)

        def forward(self, start: torch.Tensor) -> torch.Tensor:
            return torchsde.sdeint(self, start, torch.linspace(0, 1, 3), dt=0.25, method="euler")[-1]

    return loop(Noisy(), rows(4, 4), squares)


@of("snntorch")
def spiking() -> autoplan.Workload:
    import snntorch as snn

    class Spikes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 64), nn.Linear(64, CLASSES)
            self.lif1, self.lif2 = snn.Leaky(beta=0.9), snn.Leaky(beta=0.9)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            one, two = self.lif1.init_leaky(), self.lif2.init_leaky()
            total: Any = 0
            for _ in range(5):
                spikes, one = self.lif1(self.first(inputs), one)
                _, two = self.lif2(self.second(spikes), two)
                total = total + two
            return total

    return loop(Spikes(), list(zip(draw(SAMPLES, 16), draw(SAMPLES, high=CLASSES), strict=True)), classes)


@of("snntorch")
def hidden_spikes() -> autoplan.Workload:
    """The state lies in the neuron, and nobody resets it."""
    import snntorch as snn

    model: Any = nn.Sequential(nn.Linear(16, 64), snn.Leaky(beta=0.9, init_hidden=True), nn.Linear(64, CLASSES))

    def loss(model: Any, batch: Any) -> torch.Tensor:
        model[1].mem = model[1].mem.detach()
        return classes(model, batch)

    return loop(model, list(zip(draw(SAMPLES, 16), draw(SAMPLES, high=CLASSES), strict=True)), loss)


@of("siren-pytorch")
def siren() -> autoplan.Workload:
    from siren_pytorch import SirenNet

    return loop(SirenNet(2, 64, 1, 3), rows(2), squares)


@of("pykan")
def kan() -> autoplan.Workload:
    from kan import KAN

    model = KAN(width=[4, 5, 1], grid=3, k=3, auto_save=False, save_act=False, symbolic_enabled=False)
    return loop(model, rows(4), squares)


# densities, codebooks, metric learning, tables


@of("nflows")
def nflow() -> autoplan.Workload:
    from nflows.distributions.normal import StandardNormal
    from nflows.flows import Flow
    from nflows.transforms import CompositeTransform, MaskedAffineAutoregressiveTransform, ReversePermutation

    layers = [part for _ in range(3) for part in (ReversePermutation(4), MaskedAffineAutoregressiveTransform(4, 32))]
    model = Flow(CompositeTransform(layers), StandardNormal([4]))
    return loop(model, list(draw(SAMPLES, 4)), lambda model, batch: -model.log_prob(batch).mean())


@of("zuko")
def spline_flow() -> autoplan.Workload:
    import zuko

    model = zuko.flows.NSF(4, transforms=2, hidden_features=(32, 32))
    return loop(model, list(draw(SAMPLES, 4)), lambda model, batch: -model().log_prob(batch).mean())


@of("vector-quantize-pytorch")
def codebook() -> autoplan.Workload:
    """A codebook in buffers, which each forward moves."""
    from vector_quantize_pytorch import VectorQuantize

    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(16, 8), nn.Linear(8, 16)
            self.codes = VectorQuantize(dim=8, codebook_size=32)

        def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            codes, _, commitment = self.codes(self.encode(rows)[:, None])
            return self.decode(codes[:, 0]), commitment

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        decoded, commitment = model(batch)
        return F.mse_loss(decoded, batch) + commitment.sum()

    return loop(Coder(), list(draw(SAMPLES, 16)), loss)


@of("vector-quantize-pytorch")
def scalar_codes() -> autoplan.Workload:
    from vector_quantize_pytorch import FSQ

    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode, self.codes = nn.Linear(16, 3), nn.Linear(3, 16), FSQ([8, 5, 5])

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.decode(self.codes(self.encode(rows)[:, None])[0][:, 0])

    return loop(Coder(), list(draw(SAMPLES, 16)), lambda model, batch: F.mse_loss(model(batch), batch))


@of("pytorch-metric-learning")
def contrastive() -> autoplan.Workload:
    """Each sample is compared with the others of its batch."""
    from pytorch_metric_learning.losses import NTXentLoss

    compare = NTXentLoss()
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    samples = list(zip(draw(SAMPLES, 16), draw(SAMPLES, high=CLASSES), strict=True))
    return loop(model, samples, lambda model, batch: compare(model(batch[0]), batch[1]))


@of("pytorch-metric-learning")
def arcface() -> autoplan.Workload:
    from pytorch_metric_learning.losses import ArcFaceLoss

    class Faces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
            self.margin = ArcFaceLoss(CLASSES, 8)

        def forward(self, batch: Any) -> torch.Tensor:
            return self.margin(self.body(batch[0]), batch[1])

    samples = list(zip(draw(SAMPLES, 16), draw(SAMPLES, high=CLASSES), strict=True))
    return loop(Faces(), samples, own_loss)


def table() -> list[Any]:
    """(categories, numbers, class) samples."""
    return list(zip(draw(SAMPLES, 3, high=5), draw(SAMPLES, 4), draw(SAMPLES, high=CLASSES), strict=True))


def table_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Cross-entropy of the class of a row."""
    return F.cross_entropy(model(batch[0], batch[1]), batch[2])


TABLE: dict[str, Any] = {
    "categories": (5, 5, 5), "num_continuous": 4, "dim": 32, "depth": 2, "heads": 2, "dim_out": CLASSES,
}  # fmt: skip


@of("tab-transformer-pytorch")
def tab_transformer() -> autoplan.Workload:
    from tab_transformer_pytorch import TabTransformer

    return loop(TabTransformer(**TABLE, mlp_act=nn.ReLU()), table(), table_loss)


@of("tab-transformer-pytorch")
def ft_transformer() -> autoplan.Workload:
    from tab_transformer_pytorch import FTTransformer

    return loop(FTTransformer(**TABLE), table(), table_loss)


@of("pytorch-tabnet")
def tabnet() -> autoplan.Workload:
    from pytorch_tabnet.tab_network import TabNetNoEmbeddings

    groups = torch.eye(8)
    model = TabNetNoEmbeddings(8, CLASSES, group_attention_matrix=groups)
    samples = list(zip(draw(SAMPLES, 8), draw(SAMPLES, high=CLASSES), strict=True))
    return loop(model, samples, lambda model, batch: F.cross_entropy(model(batch[0])[0], batch[1]))


@of("gpytorch")
def deep_kernel() -> autoplan.Workload:
    """A variational Gaussian process over features: its evidence bound is a mean over samples and a constant."""
    import gpytorch

    class Process(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            places = draw(8, 2)
            variational = gpytorch.variational.CholeskyVariationalDistribution(8)
            super().__init__(gpytorch.variational.VariationalStrategy(self, places, variational))
            self.features = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
            self.mean, self.kernel = gpytorch.means.ConstantMean(), gpytorch.kernels.RBFKernel()
            self.noise = gpytorch.likelihoods.GaussianLikelihood()

        def forward(self, places: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(places), self.kernel(places))

    model = Process()
    bound = gpytorch.mlls.VariationalELBO(model.noise, model, num_data=SAMPLES)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        found: torch.Tensor = bound(model(model.features(batch[0])), batch[1][:, 0])
        return -found

    return loop(model, rows(4), loss)


# Lightning


@of("lightning")
def lightning_module() -> Any:
    """A module that keeps its last output."""
    import lightning

    class Keeps(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.last = self.body(inputs)
            return self.last

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return F.mse_loss(self(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

        def train_dataloader(self) -> Any:
            return DataLoader(rows(16), batch_size=BATCH)

    return Keeps()


@of("lightning")
def fabric_loop() -> autoplan.Workload:
    """A loop's parts as fabric.setup gives them."""
    from lightning import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model: Any = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    loader: Any = fabric.setup_dataloaders(DataLoader(rows(16), batch_size=BATCH))
    return autoplan.from_loop(model, optimizer, loader, squares)
