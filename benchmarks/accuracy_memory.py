"""The closed form's memory against published peaks: error, bias, coverage, and the confusion of fits and does not.

Part of `make accuracy`; with `--runs 500` small models are run here under a limit instead (memory_runs.py).

Where a table leaves something open that its own source says elsewhere (the length of the longest sample, a config
file), it is filled in here with the source; a row that still does not say enough is left out, and the reasons are
counted. Nothing is fitted to these rows.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autoplan.planner.cost.analytical.rows import estimate_rows
from autoplan.planner.cost.analytical.step_time import MEMORY_SD, memory_verdicts
from autoplan.planner.cost.prediction import Z_90

DATA = Path(__file__).parent / "data"
GIB = 2**30
VERDICTS = ("fits", "too_close", "does_not_fit")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRow:
    """One published run: its layout and its peak in bytes, None where it ran out of memory.

    `allocator`: the peak is that of torch's allocator, without the process's own share (context, libraries, slack).
    """

    name: str
    layout: dict[str, Any]
    peak_bytes: float | None
    allocator: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTable:
    """The rows of a table that can be estimated, and why the others cannot, with how many."""

    rows: list[MemoryRow]
    left_out: Counter[str]


def _read(name: str) -> Iterator[dict[str, str]]:
    with (DATA / name).open(newline="") as file:
        yield from csv.DictReader(file)


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> dict[str, Any]:
    return _plain(layers, hidden, heads, vocab) | {"kv_heads": kv_heads, "ffn": ffn, "gated_mlp": "true"}


def _plain(layers: int, hidden: int, heads: int, vocab: int) -> dict[str, Any]:
    dims = {"layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab}
    return dims | {"ffn": 4 * hidden, "gated_mlp": "false", "tied_embeddings": "false"}


# Each model's config.json; LitGPT keeps embedding and head apart (its lit_model), torchtune ties Llama 3.2's
LITGPT: dict[str, dict[str, Any]] = {
    "phi-1.5 1.3 B": _plain(24, 2048, 32, 51200),
    "StableLM Alpha 3 B": _plain(16, 4096, 32, 50688),
    "Llama 2 7 B": _llama(32, 4096, 32, 32, 11008, 32000),
    "Llama 2 13 B": _llama(40, 5120, 40, 40, 13824, 32000),
    "Falcon 40 B": _plain(60, 8192, 128, 65024) | {"kv_heads": 8},
    "gemma-2b": _llama(18, 2048, 8, 1, 16384, 256000),
    "llama-2-7b": _llama(32, 4096, 32, 32, 11008, 32000),
    "llama-3-8b": _llama(32, 4096, 32, 8, 14336, 128256),
    "llama-3.1-8b": _llama(32, 4096, 32, 8, 14336, 128256),
    "llama-3.2-1b": _llama(16, 2048, 32, 8, 8192, 128256),
    "llama-3.2-3b": _llama(28, 3072, 24, 8, 8192, 128256),
    "phi-2": _plain(32, 2560, 32, 51200),
    "Phi-3-mini-4k-instruct": _llama(32, 3072, 32, 32, 8192, 32064),
    "stablelm-base-alpha-3b": _plain(16, 4096, 32, 50688),
    "tiny-llama": _llama(22, 2048, 32, 4, 5632, 32000),
}
# Longest sample of Alpaca under each tokenizer: LitGPT, tutorials/resource-tables.md, its preamble
LITGPT_LONGEST = {"phi": 1044, "StableLM": 1034, "Llama": 1304, "Falcon": 1079}
INTERNLM = {
    "7B": _llama(32, 4096, 32, 32, 11008, 103168),  # configs/7B_sft.py
    "20B": _llama(60, 5120, 40, 40, 13824, 103168),  # internlm-20b's config.json
}
LLAMA_32_3B = _llama(28, 3072, 24, 8, 8192, 128256) | {"tied_embeddings": "true"}
LLAMA_31_70B = _llama(80, 8192, 64, 8, 28672, 128256)
# rank 16 on queries, values and output (recipes/configs/llama3_1/70B_lora.yaml): two factors each, 80 layers
LORA_70B = 80 * 16 * ((8192 + 8192) + (8192 + 1024) + (8192 + 8192))
ADAPTERS = "adapters, which put their own operations into the blocks"


def litgpt(several: bool) -> MemoryTable:
    """LoRA on A100 40GB and full fine-tuning on A10G, all in 16 bits throughout (`bf16-true`).

    One GPU: no checkpointing. Several: FSDP over blocks, full checkpointing (LitGPT's finetune scripts).
    """
    rows, left_out = [], Counter[str]()
    for r in _read("litgpt_finetune_peak_memory.csv"):
        config = r["section_or_config"].startswith("Config files")
        method = r["section_or_config"].rsplit("/", 1)[-1].removesuffix(".yaml")
        gpus = int(r["gpu"].replace(" ", "").split("x")[0])
        reason = None
        if r["peak_memory_gb"] == "N/A":
            reason = "no figure"
        elif method == "qlora" or r["quantization"].startswith("bnb"):
            reason = "quantised weights"
        elif "Adapter" in r["section_or_config"]:
            reason = ADAPTERS
        elif config and method == "lora":
            reason = "trained parameters of LoRA not given"
        peak = None if r["peak_memory_gb"] == "OOM" else float(r["peak_memory_gb"] or "nan") * 1e9 if not reason else 0
        layout = _litgpt_layout(r, gpus, config) if reason is None else {}
        if reason is None and config and gpus == 1 and peak is not None and peak < 8 * _parameters(layout):
            reason = "published peak below what the config's AdamW alone holds in 16 bits (8 bytes a parameter)"
        elif reason is None and config and gpus > 1 and r["model"] == "tiny-llama":
            reason = "its config has one device: the same run as the row of one GPU"
        if (gpus > 1) is not several:
            continue
        if reason is not None:
            left_out[reason] += 1
            continue
        name = f"{r['model']} {'full' if config else 'LoRA'} x{gpus} micro_batch={r['micro_batch']}"
        rows.append(MemoryRow(name=name, layout=layout, peak_bytes=peak, allocator=True))
    return MemoryTable(rows=rows, left_out=left_out)


def _litgpt_layout(r: dict[str, str], gpus: int, config: bool) -> dict[str, Any]:
    longest = next((n for name, n in LITGPT_LONGEST.items() if r["model"].startswith(name)), 0)
    micro = int(r["micro_batch"])
    layout = LITGPT[r["model"]] | {
        "seq_len": r["max_seq_len"] if config else longest,
        # an A10G is an A10's chip with the same 24 GB
        "chip": "A10" if config else "A100 SXM 40GB",
        "num_gpus": gpus,
        "gpus_per_node": gpus,
        "sharding": "zero3" if gpus > 1 else "ddp",
        "dp_shard": gpus,
        "micro_batch": micro,
        "global_batch": 4 * micro * gpus,
        "precision": "bf16",
        "states": "16bit",
        "chunked_loss": "true",
        "checkpointing": "full" if gpus > 1 else "none",
        # Fabric's FSDP is FSDP1, whose FlatParameter of a block holds LoRA's and the frozen weights; the scripts
        # accumulate under no_backward_sync (litgpt/finetune/lora.py, full.py), which keeps gradients whole
        "gradient_sync": "last",
        "flat_parameters": "true" if gpus > 1 else "false",
    }
    if r["trainable_params"]:
        layout["trainable_parameters"] = r["trainable_params"].replace(",", "")
    return layout


def _parameters(layout: dict[str, Any]) -> float:
    estimated = estimate_rows([layout])
    assert estimated.layouts is not None, estimated.reasons
    return float(estimated.layouts.parameters[0])


# torchtune's table adds one technique a row; what stands before is kept. None: the row cannot be estimated, and why.
TORCHTUNE_STEPS: dict[str, dict[str, Any] | str] = {
    "Baseline": "samples not packed: their lengths are not given",
    "+ Packed Dataset": {},
    "+ Compile": {"compile": "block"},
    "+ Chunked Cross Entropy": {"compile": "block", "chunked_loss": "true"},
    "+ Activation Checkpointing": {"compile": "block", "chunked_loss": "true", "checkpointing": "full"},
    "+ Fuse optimizer step into backward": "optimizer step inside the backward",
    "+ Activation Offloading": "optimizer step inside the backward",
    "+ 8-bit AdamW": "optimizer step inside the backward",
    "LoRA": "trained parameters of LoRA not given",
    "QLoRA": "quantised weights",
}


def torchtune() -> MemoryTable:
    """Llama 3.2 3B on an A100 80GB: 2 x 4,096 tokens, everything in bf16, AdamW (the README's preamble).

    And Llama 3.1 70B with LoRA over 8 x A100: 2 x 2,048 tokens, compiled, checkpointed (the README and the recipe).
    """
    rows, left_out = [], Counter[str]()
    # the table's commands set optimizer.fused=True
    common = {"chip": "A100 SXM 80GB", "precision": "bf16", "states": "16bit", "micro_batch": 2}
    common |= {"optimizer": "adamw", "optimizer_step": "fused"}
    for r in _read("torchtune_peak_memory.csv"):
        peak = float(r["peak_memory"].split()[0]) * GIB
        steps = TORCHTUNE_STEPS.get(r["method"], "")
        if r["table"].startswith("models"):
            if r["model"] != "Llama 3.1 70B" or r["method"] != "LoRA":
                quantised = "quantised weights" if r["method"] == "QLoRA" else "checkpointing and offloading not given"
                left_out["optimizer step inside the backward" if r["method"].startswith("Full") else quantised] += 1
                continue
            layout = LLAMA_31_70B | common | {"seq_len": 2048, "num_gpus": 8, "dp_shard": 8, "sharding": "zero3"}
            layout |= {"global_batch": 16, "compile": "block", "checkpointing": "full", "chunked_loss": "true"}
            layout |= {"trainable_parameters": LORA_70B}
        elif isinstance(steps, str):
            left_out[steps] += 1
            continue
        else:
            layout = LLAMA_32_3B | common | {"seq_len": 4096, "global_batch": 2} | steps
        rows.append(MemoryRow(name=f"{r['model'][:13]} {r['method']}", layout=layout, peak_bytes=peak, allocator=True))
    return MemoryTable(rows=rows, left_out=left_out)


def internevo() -> MemoryTable:
    """InternLM 7B and 20B on A800 80GB, micro-batch 1, full checkpointing; the memory is the whole GPU's.

    The sequence length is not in the table: 2,048 is that of the config file it names (configs/7B_sft.py).
    """
    rows = []
    for r in _read("internevo_memory_a800.csv"):
        gpus, tp, pp = (int(r[name]) for name in ("n_gpus", "tp", "pp"))
        dp = gpus // (tp * pp)
        layout = INTERNLM[r["model"]] | {
            "seq_len": 2048,
            "chip": "A800",
            "num_gpus": gpus,
            "gpus_per_node": min(gpus, 8),
            "inter_gbits_per_s_per_gpu": 100,
            "tp": tp,
            "pp": pp,
            "sequence_parallel": "false",
            "sharding": "ddp" if dp == 1 else "zero3" if r["fsdp"] == "True" else "zero1",
            "dp_shard": dp,
            "gradient_sync": "every" if dp > 1 and pp == 1 and r["fsdp"] == "True" else "last",
            "micro_batch": 1,
            "global_batch": 4 * dp,
            "checkpointing": "full",
            "precision": "bf16",
            # internlm/solver/optimizer/fsdp_optimizer.py and hybrid_zero_optim.py: fp32 masters beside 16-bit weights
            # and gradients, fp32 gradients made for torch's AdamW
            "states": "master",
        }
        name = f"{r['model']} {gpus} GPUs tp={tp} pp={pp} {layout['sharding']}"
        rows.append(MemoryRow(name=name, layout=layout, peak_bytes=float(r["gpu_memory_gb"]) * 1e9, allocator=False))
    return MemoryTable(rows=rows, left_out=Counter())


def score_memory(table: MemoryTable) -> dict[str, Any]:
    """All figures of one table; errors over the rows that ran, the confusion over all."""
    estimated = estimate_rows([row.layout for row in table.rows])
    assert estimated.table is not None and estimated.layouts is not None and not estimated.reasons, estimated.reasons
    peaks = estimated.table.peak_memory_bytes
    like = np.where([row.allocator for row in table.rows], peaks - estimated.table.overhead_bytes, peaks)
    confusion = {ran: dict.fromkeys(VERDICTS, 0) for ran in ("ran", "out_of_memory")}
    errors, names = [], []
    found_verdicts = memory_verdicts(peaks, estimated.layouts.memory_bytes)
    for i, row in enumerate(table.rows):
        verdict = str(found_verdicts[i])
        confusion["out_of_memory" if row.peak_bytes is None else "ran"][verdict] += 1
        if row.peak_bytes is not None:
            errors.append(float(like[i]) / row.peak_bytes - 1)
            names.append(row.name)
    found = np.array(errors)
    return {
        "rows": len(table.rows),
        "measured": len(found),
        "mean": float(np.mean(np.abs(found))),
        "bias": float(np.mean(found)),
        "covered": float(np.mean(np.abs(np.log1p(found)) <= Z_90 * MEMORY_SD)),
        "confusion": confusion,
        "errors": dict(zip(names, errors, strict=True)),
        "left_out": dict(table.left_out),
    }


TABLES: dict[str, Callable[[], MemoryTable]] = {
    "torchtune": torchtune,
    "LitGPT, one GPU": lambda: litgpt(several=False),
    "LitGPT, FSDP": lambda: litgpt(several=True),
    "InternEvo A800": internevo,
}


def show_memory(*, markdown: bool) -> None:
    """Prints the memory tables."""
    head = "memory | rows | measured | mean | bias | in interval | ran: fits | too close | does not fit"
    head += " | out of memory: fits | too close | does not fit"
    print(f"| {head} |\n|" + "---|" * (head.count("|") + 1) if markdown else head)
    lost = []
    for name, load in TABLES.items():
        s = score_memory(load())
        cells = [name, str(s["rows"]), str(s["measured"]), *(f"{s[k]:.1%}" for k in ("mean", "bias", "covered"))]
        cells += [str(s["confusion"][ran][verdict]) for ran in ("ran", "out_of_memory") for verdict in VERDICTS]
        print(f"| {' | '.join(cells)} |" if markdown else " | ".join(cells))
        lost += [f"{name}: {count} left out: {why}" for why, count in sorted(s["left_out"].items())]
    print("\n" + "\n".join(lost))


def main() -> None:
    """The published tables, or runs of this machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=0, help="run so many configurations of small models here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="with --runs: a JSON file of every run")
    options = parser.parse_args()
    if options.runs:
        from benchmarks.memory_runs import run_here

        run_here(options.runs, options.seed, options.out)
    else:
        show_memory(markdown=False)


if __name__ == "__main__":
    main()
