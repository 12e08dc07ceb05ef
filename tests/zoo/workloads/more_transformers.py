"""More models of transformers, of the families that are less often met."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from decoders import SIZES, documents, own_loss, pretraining
from encoders import LENGTH, classified_text, fine_tuning, masked_text
from images import classification_loss
from sounds import SIZES as SOUND_SIZES
from sounds import _recognition
from torch import nn
from transformers import (
    BatchEncoding,
    BigBirdConfig,
    BigBirdForMaskedLM,
    BlenderbotConfig,
    BlenderbotForConditionalGeneration,
    BlipConfig,
    BlipForConditionalGeneration,
    CLIPSegConfig,
    CLIPSegForImageSegmentation,
    Data2VecAudioConfig,
    Data2VecAudioForCTC,
    DeepseekV3Config,
    FalconH1Config,
    FunnelConfig,
    FunnelForMaskedLM,
    GPT2Config,
    GraniteMoeConfig,
    JambaConfig,
    LayoutLMv3Config,
    LayoutLMv3ForTokenClassification,
    LongformerConfig,
    LongformerForMaskedLM,
    PerceiverConfig,
    PerceiverForMaskedLM,
    TimesformerConfig,
    TimesformerForVideoClassification,
    VideoMAEConfig,
    VideoMAEForPreTraining,
    XLNetConfig,
    XLNetForSequenceClassification,
)
from translators import BART_SIZES, translation
from zoo_data import VOCABULARY, images, padded, tokens

import autoplan


def blenderbot() -> autoplan.Workload:
    """Encoder-decoder with the norms first."""
    sizes = BART_SIZES | {"max_position_embeddings": 64}
    return translation("blenderbot", lambda: BlenderbotForConditionalGeneration(BlenderbotConfig(**sizes)))


ENCODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": 80, "pad_token_id": 0,
}  # fmt: skip


def longformer() -> autoplan.Workload:
    """Sliding windows; pads its input to a multiple of the window."""
    config = LongformerConfig(**ENCODER, attention_window=16)
    return fine_tuning("longformer", lambda: LongformerForMaskedLM(config), masked_text)


def bigbird() -> autoplan.Workload:
    """Block-sparse attention with blocks drawn by NumPy."""
    config = BigBirdConfig(**ENCODER, block_size=4, num_random_blocks=1)
    return fine_tuning("bigbird", lambda: BigBirdForMaskedLM(config), masked_text)


def perceiver() -> autoplan.Workload:
    """Latents that look at the input across."""
    config = PerceiverConfig(
        num_latents=8, d_latents=32, d_model=32, num_self_attends_per_block=3, num_self_attention_heads=4,
        num_cross_attention_heads=4, qk_channels=32, v_channels=32, vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
    )  # fmt: skip

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
        logits = model(inputs=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        total = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        return autoplan.LossSum(total, (batch["labels"] != -100).sum())

    return fine_tuning("perceiver", lambda: PerceiverForMaskedLM(config), masked_text, loss)


def xlnet() -> autoplan.Workload:
    """Two-stream attention's layers, relative positions."""
    config = XLNetConfig(
        vocab_size=VOCABULARY, d_model=64, n_layer=4, n_head=4, d_inner=128, num_labels=2, pad_token_id=0
    )
    return fine_tuning("xlnet", lambda: XLNetForSequenceClassification(config), classified_text)


def funnel() -> autoplan.Workload:
    """The sequence is pooled between stages, and spread again for the decoder."""
    config = FunnelConfig(vocab_size=VOCABULARY, block_sizes=[2, 2], d_model=32, n_head=4, d_head=8, d_inner=64)
    return fine_tuning("funnel", lambda: FunnelForMaskedLM(config), masked_text)


def data2vec_audio() -> autoplan.Workload:
    """CTC, layerdrop, several position convolutions."""
    sizes = {k: v for k, v in SOUND_SIZES.items() if k != "num_conv_pos_embeddings"}
    config = Data2VecAudioConfig(**sizes, num_conv_pos_embeddings=2, conv_pos_kernel_size=3, mask_time_length=4)
    return _recognition("data2vec-audio", lambda: Data2VecAudioForCTC(config))


def _clips(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    frames = [images(num_samples, 16, 10 * index + frame) for frame in range(4)]
    return {"pixel_values": torch.stack([pixels for pixels, _ in frames], 1), "labels": frames[0][1]}


VIDEO: dict[str, Any] = {
    "image_size": 16, "patch_size": 8, "num_frames": 4, "hidden_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "intermediate_size": 64,
}  # fmt: skip


def timesformer() -> autoplan.Workload:
    """Attention over time, then over space."""
    config = TimesformerConfig(**VIDEO, num_labels=4, drop_path_rate=0)
    return autoplan.Workload(
        name="timesformer",
        build_model=lambda: TimesformerForVideoClassification(config),
        make_batch=_clips,
        loss=classification_loss,
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4),
        global_batch=8,
        max_grad_norm=1.0,
    )


def _masked_clips(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    order = torch.rand(num_samples, 8, generator=torch.Generator().manual_seed(index)).argsort(-1)
    return {"pixel_values": _clips(num_samples, index)["pixel_values"], "bool_masked_pos": order < 6}


def videomae() -> autoplan.Workload:
    """Which tubes are masked comes with the batch; booleans index the hidden states."""
    config = VideoMAEConfig(
        **VIDEO, decoder_num_attention_heads=4, decoder_hidden_size=16, decoder_num_hidden_layers=2,
        decoder_intermediate_size=32,
    )  # fmt: skip

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
        count = len(batch["pixel_values"])
        return autoplan.LossSum(model(**batch).loss * count, count)

    return autoplan.Workload(
        name="videomae",
        build_model=lambda: VideoMAEForPreTraining(config),
        make_batch=_masked_clips,
        loss=loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        global_batch=8,
    )


TOWERS: dict[str, dict[str, Any]] = {
    "text_config": {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "max_position_embeddings": 16, "projection_dim": 16, "eos_token_id": 2,
        "bos_token_id": 1, "pad_token_id": 0,
    },
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "image_size": 32, "patch_size": 8, "projection_dim": 16,
    },
}  # fmt: skip


def _prompted(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    pixels, _ = images(num_samples, 32, index)
    ids = tokens(num_samples, 8, index)
    ids[:, -1] = 2
    return {"pixel_values": pixels, "input_ids": ids, "labels": (pixels.mean(1) > 0.6).float()}


def clipseg() -> autoplan.Workload:
    """Two frozen towers, a trained decoder on their hidden states."""

    def build() -> nn.Module:
        model = CLIPSegForImageSegmentation(
            CLIPSegConfig(**TOWERS, projection_dim=16, reduce_dim=16, extract_layers=[1, 2, 3],
                          decoder_num_attention_heads=4, decoder_intermediate_size=32)
        )  # fmt: skip
        model.clip.requires_grad_(False)
        return model

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
        logits = model(pixel_values=batch["pixel_values"], input_ids=batch["input_ids"]).logits
        total = F.binary_cross_entropy_with_logits(logits, batch["labels"], reduction="sum")
        return autoplan.LossSum(total, batch["labels"].numel())

    return autoplan.Workload(
        name="clipseg",
        build_model=build,
        make_batch=_prompted,
        loss=loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        global_batch=8,
    )


def _captioned(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    pixels, _ = images(num_samples, 32, index)
    ids, mask = padded(num_samples, 12, index)
    return {
        "pixel_values": pixels,
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


def blip() -> autoplan.Workload:
    """A vision tower and a text decoder that looks at it; label smoothing off."""
    towers = {name: dict(sizes) for name, sizes in TOWERS.items()}
    towers["text_config"] |= {"encoder_hidden_size": 32, "sep_token_id": 2, "label_smoothing": 0.0}
    config = BlipConfig(**towers, projection_dim=16, image_text_hidden_size=16)
    return autoplan.Workload(
        name="blip",
        build_model=lambda: BlipForConditionalGeneration(config),
        make_batch=_captioned,
        loss=own_loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        global_batch=8,
    )


def _documents(num_samples: int, index: int) -> dict[str, torch.Tensor]:
    ids, mask = padded(num_samples, 24, index)
    corner = tokens(num_samples * 24, 2, index, vocabulary=500).view(num_samples, 24, 2)
    pixels, _ = images(num_samples, 32, index)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "bbox": torch.cat([corner, corner + 40], -1),
        "pixel_values": pixels,
        "labels": (ids % 5).masked_fill(mask == 0, -100),
    }


def layoutlm() -> autoplan.Workload:
    """Text, boxes and an image in one sequence; a tag for each token."""
    config = LayoutLMv3Config(
        **ENCODER, coordinate_size=12, shape_size=8, input_size=32, patch_size=8, num_labels=5, visual_embed=True
    )

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> autoplan.LossSum:
        count = (batch["labels"] != -100).sum()
        return autoplan.LossSum(model(**batch).loss * count, count)

    return autoplan.Workload(
        name="layoutlm",
        build_model=lambda: LayoutLMv3ForTokenClassification(config),
        make_batch=_documents,
        loss=loss,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        global_batch=8,
    )


def jamba() -> autoplan.Workload:
    """Mamba layers, attention layers and experts in turn."""
    config = JambaConfig(
        **SIZES, num_key_value_heads=2, use_mamba_kernels=False, mamba_d_state=8, attn_layer_period=2,
        attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return pretraining("jamba", config)


def falcon_h1() -> autoplan.Workload:
    """Mamba-2 and attention side by side in each block."""
    config = FalconH1Config(
        **SIZES, num_key_value_heads=2, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8,
        mamba_chunk_size=16,
    )  # fmt: skip
    return pretraining("falcon-h1", config)


def granite_moe() -> autoplan.Workload:
    """Experts with the router's loss left out."""
    config = GraniteMoeConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    return pretraining("granite-moe", config)


def deepseek_v3() -> autoplan.Workload:
    """Latent attention; groups of experts, a bias that no gradient trains."""
    config = DeepseekV3Config(
        **SIZES, moe_intermediate_size=32, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=8, n_group=2,
        topk_group=1, num_experts_per_tok=2, kv_lora_rank=16, q_lora_rank=32, qk_rope_head_dim=8, v_head_dim=16,
        qk_nope_head_dim=8, first_k_dense_replace=1,
    )  # fmt: skip
    return pretraining("deepseek-v3", config)


def batch_encoding() -> autoplan.Workload:
    """The batch is a BatchEncoding, as a tokenizer returns it."""
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=4, n_head=4, n_positions=64)

    def batch(num_samples: int, index: int) -> BatchEncoding:
        return BatchEncoding(documents(num_samples, index))

    return pretraining("batch-encoding", config, make_batch=batch)
