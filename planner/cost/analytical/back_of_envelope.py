"""The back-of-the-envelope estimate of the literature: FLOPs, bytes per parameter, memory by part, ratios."""

from __future__ import annotations

import math
from typing import Any

from autoplan.planner.cost.analytical.cluster import Cluster, find_chip
from autoplan.planner.cost.analytical.transformer import Transformer

# (weights, gradients, master weights, Adam's two moments) in bytes per parameter
STATE_BYTES = {
    "fp32, AdamW": (4, 4, 0, 8),
    "bf16 with fp32 master and 16-bit gradients, AdamW": (2, 2, 4, 8),
    "bf16 with fp32 master and fp32 gradients, AdamW (Megatron-LM)": (2, 4, 4, 8),
    "autocast over fp32 parameters, AdamW (what autoplan runs)": (4, 4, 0, 8),
    "bf16 with fp32 master, 8-bit AdamW": (2, 2, 4, 2),
    "fp32, SGD with momentum": (4, 4, 0, 4),
    "fp32, SGD": (4, 4, 0, 0),
}
# the usual breakdown: 16-bit weights and gradients, fp32 master and moments (Rajbhandari et al. 2020: 16 bytes)
USUAL = "bf16 with fp32 master and 16-bit gradients, AdamW"


def back_of_envelope(
    model: Transformer, cluster: Cluster, *, seq_len: int, global_batch: int, tokens: float | None
) -> dict[str, Any]:
    """The estimate as a document; every figure follows from the formula beside it."""
    chip = find_chip(cluster.chip)
    peak = chip.peak("bf16") or chip.peak("fp16")
    assert peak is not None, "every chip of the catalogue has 16-bit units"
    n = model.parameters
    document: dict[str, Any] = {
        "parameters": n,
        "flops": _flops(model, seq_len, global_batch, tokens, peak, cluster),
        "bytes_per_parameter": {name: sum(parts) for name, parts in STATE_BYTES.items()},
        "memory_breakdown": _memory(model, seq_len),
        "tensor_parallel_limit": _tensor_limit(model, chip.intra_bytes_per_s, peak),
    }
    pipeline = []
    for p in (1, 2, 4, 8, 16):
        if model.layers % p == 0:
            m = max(1, global_batch // 64)
            pipeline.append(
                {
                    "pp": p,
                    "bubble": (p - 1) / m,
                    "micro_batches": m,
                    "held_on_first_stage": min(p, m),
                    "layers": model.layers // p,
                }
            )
    document["pipeline"] = {
        "formula": "bubble (p-1)/m of the ideal time; the first stage holds min(p, m) micro-batches of L/p layers",
        "by_depth": pipeline,
    }
    document["gradient_exchange"] = _gradient_exchange(model, cluster, seq_len, global_batch, peak)
    return document


def _flops(
    model: Transformer, s: int, batch: int, tokens: float | None, peak: float, cluster: Cluster
) -> dict[str, Any]:
    n, h, layers, vocab = model.parameters, model.hidden, model.layers, model.vocab
    plain = 72 * batch * layers * s * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))
    full = 96 * batch * layers * s * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
    out = {
        "per_token_6N": 6.0 * n,
        "per_step_6ND": 6.0 * n * batch * s,
        "per_step_72BLsh2_form": plain,
        "per_step_96BLsh2_form_full_recomputation": full,
        "note": "the 72 and 96 forms hold for a plain block with f = 4h and as many key heads as heads",
    }
    if tokens is not None:
        total = 6.0 * n * tokens
        out["training_6ND"] = total
        out["days_at_40_percent_mfu"] = total / (0.4 * peak * cluster.num_gpus) / 86400
    return out


def _memory(model: Transformer, s: int, batch: int = 8) -> dict[str, Any]:
    """The breakdown of one copy of a model: states at 16 bytes per parameter, activations of a batch of sequences."""
    n = model.parameters
    weights, gradients, master, moments = (float(b * n) for b in STATE_BYTES[USUAL])
    kept = batch * s * model.hidden * 34.0 * model.layers
    scores = 5.0 * model.heads * s * s * batch * model.layers
    inputs = 2.0 * batch * s * model.hidden * model.layers
    out: dict[str, Any] = {
        "batch": batch,
        "seq_len": s,
        "weights_bytes": weights,
        "gradients_bytes": gradients,
        "master_weights_bytes": master,
        "adam_moments_bytes": moments,
        "states_bytes": weights + gradients + master + moments,
        "activations_34sbhL_bytes": kept,
        "attention_scores_5as2bL_bytes": scores,
        "activations_full_recomputation_2sbhL_bytes": inputs,
        "formula": "arXiv 2205.05198: sbhL(34 + 5as/h) in 16 bits; flash drops 5as/h; full recomputation 2sbhL",
    }
    total = out["states_bytes"] + inputs
    out["total_with_full_recomputation_bytes"] = total
    out["devices"] = {}
    for name in ("A100 SXM 80GB", "H100 SXM", "RTX 4090"):
        memory = find_chip(name).sheet.memory_bytes.value
        out["devices"][name] = {
            "states_only": math.ceil(out["states_bytes"] / memory),
            "states_and_activations_full_recomputation": math.ceil(total / memory),
            "states_and_activations_flash": math.ceil((out["states_bytes"] + kept) / memory),
        }
    return out


def _tensor_limit(model: Transformer, intra: float, peak: float) -> dict[str, Any]:
    """How far tensor parallelism goes before communication outweighs compute.

    A block's forward has 24 b s h^2 / (t F) seconds of products and two all-reduces of 2 b s h bytes, 8 b s h / B
    seconds on a ring for large t: equal at t = 3 h B / F, F the peak and B the bandwidth of a GPU in one direction.
    """
    from autoplan.probes import catalog

    rtx = find_chip("RTX 4090")
    pcie = catalog.link_reading("PCIe 4", 16).value or 0.0
    h100 = find_chip("H100 SXM")
    out = {
        "formula": "t = 3 h B / F: 24bsh^2/(tF) of products against 8bsh/B of all-reduces, per block forward",
        "this_cluster": 3 * model.hidden * intra / peak,
    }
    for name, bandwidth, rate in (
        ("RTX 4090 (dense peak with fp16 sums, 330 TFLOP/s) on PCIe 4 x16", pcie, 2 * (rtx.peak("fp16") or 0.0)),
        ("RTX 4090 (dense peak with fp32 sums) on PCIe 4 x16", pcie, rtx.peak("fp16") or 0.0),
        ("A100 on PCIe 4 x16", pcie, find_chip("A100 SXM 80GB").peak("bf16") or 0.0),
        ("H100 on NVLink 4", h100.intra_bytes_per_s, h100.peak("bf16") or 0.0),
    ):
        out[name] = 3 * model.hidden * bandwidth / rate
    return out


def _gradient_exchange(model: Transformer, cluster: Cluster, s: int, batch: int, peak: float) -> dict[str, Any]:
    """2 x 2N bytes of a ring all-reduce of 16-bit gradients beside 6ND FLOPs shared by all GPUs at 40 % of the peak."""
    gpus = cluster.num_gpus
    between = (cluster.inter_gbits_per_s_per_gpu or 0.0) * 1e9 / 8 if cluster.nodes > 1 else 0.0
    bandwidth = between or find_chip(cluster.chip).intra_bytes_per_s
    per_gpu = 2.0 * 2.0 * model.parameters / min(gpus, 8)  # a node's eight GPUs share one model copy
    compute = 6.0 * model.parameters * batch * s / gpus / (0.4 * peak)
    return {
        "formula": "ring all-reduce 2 x 2N bytes, one copy of the model on up to 8 GPUs; compute 6ND/(GPUs x 0.4 F)",
        "exchange_s": per_gpu / bandwidth,
        "compute_s": compute,
        "share": per_gpu / bandwidth / compute,
        "global_batch": "accumulation x nodes x GPUs per node x micro-batch, over tp x pp",
    }
