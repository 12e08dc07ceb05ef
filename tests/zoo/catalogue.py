"""The table of the zoo: each workload with its kind, what is special about it, and how a search of it has to end."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

FOLDER = Path(__file__).resolve().parent / "workloads"

Kind = Literal[
    "decoder", "experts", "encoder", "encoder-decoder", "vision", "audio", "generative", "recurrent", "fine-tuning",
    "plain torch", "habits",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One workload of the zoo.

    Attributes:
        name: Names it on the command line and in tables.
        kind: What family of trainings it stands for.
        function: `file.py:function`, the file in `workloads/`.
        special: What about it may stand in a planner's way.
        expected: How a search has to end.
        because: Why a refusal is right; empty where a plan is expected.
        says: What the refusal has to say, in its text or its hint.
        fix: Knobs that a user gives with it.
        needs: Packages that it needs beside autoplan's own.
    """

    name: str
    kind: Kind
    function: str
    special: str
    expected: Literal["plans", "refused"] = "plans"
    because: str = ""
    says: str = ""
    fix: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()

    @property
    def reference(self) -> str:
        """What `--model` takes."""
        return f"{FOLDER}/{self.function}"

    @property
    def missing(self) -> tuple[str, ...]:
        """The packages it needs that are not installed here."""
        return tuple(package for package in self.needs if importlib.util.find_spec(package) is None)


def _rows(kind: Kind, file: str, rows: Mapping[str, str | tuple[str, dict[str, Any]]]) -> list[Entry]:
    """Entries of one file: function name to what is special, or to that and further fields."""
    found = []
    for function, row in rows.items():
        special, more = (row, {}) if isinstance(row, str) else row
        name = more.pop("name", function.replace("_", "-"))
        found.append(Entry(name=name, kind=kind, function=f"{file}.py:{function}", special=special, **more))
    return found


CATALOGUE: tuple[Entry, ...] = (
    *_rows(
        "decoder",
        "decoders",
        {
            "gpt2": "KV cache on by default, dropout, Conv1D, tied head",
            "llama": "KV cache, grouped queries",
            "mistral": "KV cache, window shorter than the sequence",
            "qwen3": "KV cache, query and key norms, tied head, count=",
            "gemma2": "KV cache, capped logits, window and full layers in turn",
            "gemma3": "KV cache, five window layers to one full, padded",
            "phi3": "KV cache, fused projections, loss from the logits",
            "falcon": "KV cache, one key and value for all heads, parallel residual",
            "bloom": "KV cache, ALiBi, padded",
            "opt": "KV cache, dropout, layerdrop",
            "gpt_neox": "KV cache, parallel residual, padded, loss from the logits",
            "gptj": "KV cache, dropout, head with a bias",
            "stablelm": "KV cache, rotary positions on part of a head",
            "olmo2": "KV cache, norms after attention and MLP",
            "cohere": "KV cache, scaled logits, tied head",
        },
    ),
    *_rows(
        "experts",
        "experts",
        {
            "mixtral": ("router loss inside the model's loss; --fix micro_batch=4", {"fix": {"micro_batch": 4}}),
            "qwen3_moe": "dense and sparse layers in turn, no router loss",
            "olmoe": "eight small experts, padded, no router loss",
            "switch": (
                "top-1 routing with a capacity, router losses; --fix micro_batch=4",
                {"fix": {"micro_batch": 4}},
            ),
            "plain_experts": "routing by index in plain torch, balance loss on the module; fixed_micro_batch=4",
        },
    ),
    *_rows(
        "encoder",
        "encoders",
        {
            "bert": "dropout, uneven numbers of labels",
            "roberta": "a class for each sequence",
            "deberta": "disentangled attention, no sdpa",
            "electra": "a tag for each token",
            "modernbert": "local and global attention in turn",
            "distilbert": "two positions for each sample",
            "albert": "one layer called for every depth",
        },
    ),
    *_rows(
        "encoder-decoder",
        "translators",
        {
            "t5": "KV cache in the decoder's own copy of the config, relative positions",
            "bart": "KV cache, dropout, warm-up",
            "mbart": "KV cache, layerdrop in both halves",
            "pegasus": "KV cache, label smoothing",
            "whisper": "KV cache, frames of sound in, text out",
        },
    ),
    *_rows(
        "vision",
        "images",
        {
            "vit": "class token",
            "deit": "distillation token, dropout, clipping",
            "dinov2": "layer scale, stochastic depth",
            "swin": "lists in the config, shifted windows, stochastic depth",
            "convnext": "lists in the config, depthwise convolutions, stochastic depth",
            "resnet": ("BatchNorm; --fix micro_batch=4", {"fix": {"micro_batch": 4}}),
            "segformer": (
                "BatchNorm in the head, lists in the config; --fix micro_batch=4",
                {"fix": {"micro_batch": 4}},
            ),
            "mae": "the mask is drawn in the forward",
            "clip": ("contrastive loss; --fix micro_batch=8", {"fix": {"micro_batch": 8}}),
            "detector": "matches by value in Python, clipping at 0.1",
        },
    ),
    *_rows(
        "audio",
        "sounds",
        {
            "wav2vec2": "CTC, layerdrop, SpecAugment drawn with NumPy",
            "hubert": "CTC, layerdrop, frozen feature encoder",
            "ast": "spectrograms in overlapping patches",
        },
    ),
    *_rows(
        "generative",
        "generators",
        {
            "unet": "noise and time drawn in the loss",
            "dit": "noise drawn in the loss, labels dropped in the forward",
            "vae": "latent drawn in the forward, batch is a tuple",
        },
    ),
    *_rows(
        "recurrent",
        "recurrences",
        {
            "mamba": "scan over the sequence in Python",
            "mamba2": "scan in chunks",
            "rwkv": "time mixing step by step",
            "lstm": "nn.LSTM, tied head, SGD",
            "gru": "packed sequences, lengths read on the CPU",
        },
    ),
    *_rows(
        "fine-tuning",
        "adapters",
        {
            "lora_gpt2": ("peft over a fused projection, adapter dropout", {"needs": ("peft",)}),
            "lora_llama": ("peft over all linear layers, head trained too", {"needs": ("peft",)}),
            "lora_plain": "layers replaced inside a frozen model",
            "dpo": "policy and frozen reference in one module",
            "dpo_closure": "the loss holds the reference model",
            "reward": "two passes over one classifier",
            "distillation": "teacher in eval mode by an overridden train()",
            "bf16_llama": "parameters in bf16",
            "bf16_gpt2": "built in bf16 by transformers, dropout, padded",
        },
    ),
    *_rows(
        "plain torch",
        "plain_models",
        {
            "nn_transformer": "nn.Transformer, padding and causal masks",
            "nn_encoder": "nn.TransformerEncoder, padding mask",
            "nanogpt": "a mean from the forward, tied head, tuple batch",
            "sequentials": "a ModuleList of Sequentials",
            "mlp": "a Sequential with dropout",
            "graph": "a mask of booleans picks what the loss counts",
            "recommender": "embedding bags, Adagrad",
            "two_tasks": "two losses, learnt weights outside any layer",
        },
    ),
    *_rows(
        "habits",
        "habits",
        {
            "stochastic_depth": "residuals dropped per sample, rates differ by block",
            "layerdrop": "layers dropped by Python's random",
            "batchnorm": "BatchNorm with fixed_micro_batch=4 in the workload",
            "frozen_backbone": "frozen backbone left in eval mode",
            "frozen_norms": "train() keeps BatchNorm in eval mode",
            "own_checkpointing": "torch.utils.checkpoint in the forward",
            "hf_checkpointing": "gradient_checkpointing_enable()",
            "ragged": "very uneven numbers of labels",
            "ragged_collator": "batches padded to their longest sample",
            "packed": "position_ids that start anew",
            "decay_groups": "two parameter groups",
            "adafactor": "factored optimizer state",
            "lion": "an optimizer class of the user's own",
            "nesterov": "SGD with Nesterov momentum",
            "warmup": "warm-up and cosine",
            "label_smoothing": "the fused loss would lose the smoothing",
            "z_loss": "the fused loss would lose the z-loss",
        },
    ),
    *_rows(
        "encoder-decoder",
        "more_transformers",
        {
            "blenderbot": "KV cache, norms first",
        },
    ),
    *_rows(
        "encoder",
        "more_transformers",
        {
            "longformer": "sliding windows; pads its own input",
            "bigbird": "blocks drawn by NumPy; index puts that refuse autocast",
            "perceiver": "as many positions as it has, no fewer",
            "xlnet": "relative positions, batch as the second dim inside",
            "funnel": "the sequence shrinks from stage to stage",
        },
    ),
    *_rows(
        "audio",
        "more_transformers",
        {
            "data2vec_audio": "CTC, layerdrop, SpecAugment",
        },
    ),
    *_rows(
        "vision",
        "more_transformers",
        {
            "timesformer": "attention over time, then space",
            "videomae": "a mask of booleans comes with the batch",
            "clipseg": "two frozen towers, hidden states of some layers",
            "blip": "KV cache, a text decoder that looks at an image",
            "layoutlm": "text, boxes and an image in one batch",
        },
    ),
    *_rows(
        "recurrent",
        "more_transformers",
        {
            "jamba": "Mamba, attention and experts in turn",
            "falcon_h1": "Mamba-2 and attention in one block",
        },
    ),
    *_rows(
        "experts",
        "more_transformers",
        {
            "granite_moe": "KV cache, routing by sorting",
            "deepseek_v3": "latent attention, groups of experts",
        },
    ),
    *_rows(
        "habits",
        "more_transformers",
        {
            "batch_encoding": "the batch is a BatchEncoding",
        },
    ),
    *_rows(
        "generative",
        "more_plain",
        {
            "gan": "two losses, weights detached for one of them",
            "vq_vae": "codes in buffers that the forward moves; fixed_micro_batch=8",
        },
    ),
    *_rows(
        "vision",
        "more_plain",
        {
            "plain_unet": "skips, GroupNorm, Dropout2d, dice loss",
            "siamese": "the batch is a list, one encoder called three times",
        },
    ),
    *_rows(
        "recurrent",
        "more_plain",
        {
            "seq2seq": "teacher forcing by Python's random",
        },
    ),
    *_rows(
        "plain torch",
        "more_plain",
        {
            "pinn": "the loss differentiates the model by its input",
            "fourier": "complex weights, FFT, weight norm",
            "sparse": "sparse gradients, SparseAdam",
            "ppo": "the model gives a distribution, a number in the batch",
            "captions": "a list of texts in the batch",
        },
    ),
    *_rows(
        "habits",
        "more_plain",
        {
            "counters": "buffers that only evaluation reads; fixed_micro_batch=4",
            "byol": "frozen weights that the forward moves; fixed_micro_batch=8",
        },
    ),
    Entry(
        name="resnet-unfixed",
        kind="vision",
        function="images.py:resnet",
        special="BatchNorm without a micro-batch",
        expected="refused",
        because="the micro-batch is part of what BatchNorm trains, and only the user knows it",
        says="micro_batch",
    ),
    Entry(
        name="clip-unfixed",
        kind="vision",
        function="images.py:clip",
        special="a contrastive loss without a micro-batch",
        expected="refused",
        because="the micro-batch is part of what a contrastive loss trains, and only the user knows it",
        says="micro_batch",
    ),
    Entry(
        name="mean-loss",
        kind="habits",
        function="habits.py:mean_loss",
        special="a mean handed over as a sum of one item",
        expected="refused",
        because="the training would change with the micro-batch",
        says="micro_batch",
    ),
)

BY_NAME: Mapping[str, Entry] = {entry.name: entry for entry in CATALOGUE}


def pick(names: list[str]) -> list[Entry]:
    """The entries of these names or kinds; all where none is given.

    Raises:
        SystemExit: a name that is none.
    """
    if not names:
        return list(CATALOGUE)
    unknown = [name for name in names if name not in BY_NAME and all(e.kind != name for e in CATALOGUE)]
    if unknown:
        raise SystemExit(f"the zoo has no {', '.join(unknown)}; it has {', '.join(BY_NAME)}")
    return [entry for entry in CATALOGUE if entry.name in names or entry.kind in names]
