"""The cost model against published tables: error, bias, coverage, regret, top-5 recall. `make accuracy` prints it.

    python -m benchmarks.accuracy [--markdown] [--draws 50] [--trials FILE_OR_FOLDER ...]

Each table is estimated as it comes (uncalibrated), and again corrected by three and by ten rows of each kind of GPU,
which are drawn at random, many times over. Rows that were drawn are left out of the error. Median change: of the mean
error of the rest by calibration, over the draws; used: how often leaving groups out found the correction better. The
data are facts as published, each row with its source (benchmarks/data). Published peaks of memory follow
(accuracy_memory.py), then recorded searches of this machine (accuracy_trials.py): by default those in
benchmarks/results.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autoplan.planner.cost.analytical.layouts import Layouts
from autoplan.planner.cost.analytical.rows import estimate_rows
from autoplan.planner.cost.analytical.step_time import (
    EstimateTable,
    activation_bytes,
    estimate_layouts,
    learn_correction,
)
from autoplan.planner.cost.columns import Floats
from autoplan.planner.cost.prediction import Z_90
from benchmarks import accuracy_time
from benchmarks.accuracy_memory import show_memory
from benchmarks.accuracy_trials import show_trials

DATA = Path(__file__).parent / "data"
RESULTS = Path(__file__).parent / "results"
# layers, hidden, heads of the MPT models (llm-foundry's benchmarking configs)
MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
LLAMA2: dict[str, dict[str, int]] = {
    "Llama-2-7B": {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008},
    "Llama-2-13B": {"layers": 40, "hidden": 5120, "heads": 40, "ffn": 13824},
    "Llama-2-34B": {"layers": 48, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 22016},
    "Llama-2-70B": {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672},
}
NEMO: dict[str, dict[str, Any]] = {
    "GPT3-5B": {"layers": 24, "hidden": 4096, "heads": 32, "vocab": 51200},
    "GPT3-20B": {"layers": 44, "hidden": 6144, "heads": 48, "vocab": 51200},
    "GPT3-175B": {"layers": 96, "hidden": 12288, "heads": 96, "vocab": 51200},
    "LLAMA2-7B": LLAMA2["Llama-2-7B"] | {"vocab": 32000, "gated_mlp": "true"},
    "LLAMA2-13B": LLAMA2["Llama-2-13B"] | {"vocab": 32000, "gated_mlp": "true"},
    "LLAMA2-70B": LLAMA2["Llama-2-70B"] | {"vocab": 32000, "gated_mlp": "true"},
}
CHIPS = {"h100_80gb": "H100 SXM", "a100_80gb": "A100 SXM 80GB", "a100_40gb": "A100 SXM 40GB"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One published measurement: how it was laid out, its step time, its GPU type, its group of equal work."""

    layout: dict[str, Any]
    seconds: float
    gpu: str
    group: str


def read(name: str) -> list[dict[str, str]]:
    """The rows of a data file."""
    with (DATA / name).open(newline="") as file:
        return list(csv.DictReader(file))


def llm_foundry() -> list[Row]:
    """MPT under FSDP; 1,600 Gbit/s a node of A100s and 3,200 of H100s (their README)."""
    out = []
    for r in read("llm_foundry_mpt_throughput.csv"):
        layers, hidden, heads = MPT[r["model"]]
        precision = "fp8" if "fp8" in r["precision"] else "bf16"
        layout = {
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "vocab": 50368,
            "seq_len": r["seq_len"],
            "chip": CHIPS[r["gpu"]],
            "num_gpus": r["n_gpus"],
            "gpus_per_node": 8,
            "inter_gbits_per_s_per_gpu": 400 if "h100" in r["gpu"] else 200,
            "sharding": "zero3" if r["sharding_strategy"] == "FULL_SHARD" and int(r["n_gpus"]) > 1 else "ddp",
            # FSDP1 under MixedPrecision(param_dtype) reduces gradients in that type, at every micro-step
            "reduce_dtype": "bf16",
            "gradient_sync": "every" if int(r["grad_accum"]) > 1 and int(r["n_gpus"]) > 1 else "last",
            "micro_batch": r["micro_batch"],
            "global_batch": r["global_batch"],
            "precision": "bf16",
            "fp8": str(precision == "fp8"),
            "checkpointing": "full" if r["activation_checkpointing"] == "True" else "none",
        }
        seconds = float(r["global_batch"]) * float(r["seq_len"]) / float(r["throughput_tok_per_s"])
        group = f"{r['model']} {r['seq_len']} {r['n_gpus']} {r['gpu']} {precision}"
        out.append(Row(layout=layout, seconds=seconds, gpu=f"{r['gpu']} {precision}", group=group))
    return out


def fms_fsdp() -> list[Row]:
    """Llama 2 under FSDP2 with compile; the link figure is per node."""
    out = []
    for r in read("fms_fsdp_llama2.csv"):
        gpus = int(r["n_gpus"])
        batch = int(r["batch_per_gpu"]) * gpus
        hopper = "H100" in r["gpu"]
        layout = {
            **LLAMA2[r["model"]],
            "vocab": 32000,
            "gated_mlp": "true",
            "seq_len": 4096,
            "chip": "H100 SXM" if hopper else "A100 SXM 80GB",
            "num_gpus": gpus,
            "gpus_per_node": 8,
            "inter_gbits_per_s_per_gpu": (800 if hopper else 400) / 8,
            "sharding": "zero3",
            "dp_shard": 8 if r["sharding"] == "HSDP" else gpus,
            "precision": "bf16",
            "reduce_dtype": "bf16",  # its mixed-precision policy, bfSixteen
            "micro_batch": r["batch_per_gpu"],
            "global_batch": batch,
            "checkpointing": r["activation_checkpointing"],
            "compile": "block",
        }
        seconds = 4096 * batch / (float(r["tok_per_s_per_gpu"]) * gpus)
        out.append(Row(layout=layout, seconds=seconds, gpu=r["gpu"], group=r["model"]))
    return out


def vtrain() -> list[Row]:
    """GPT-like models under Megatron-DeepSpeed on one node, full recomputation, plain attention."""
    out = []
    for r in read("vtrain_single_node.csv"):
        layout = {
            **{name: r[name] for name in ("layers", "hidden", "heads", "seq_len", "tp", "pp", "micro_batch")},
            "vocab": 51200,
            "chip": "A100 SXM 80GB",
            "num_gpus": r["n_gpus"],
            "sequence_parallel": "false",
            "dp_replicate": r["dp"],
            "dp_shard": 1,
            "sharding": "ddp",
            "global_batch": r["global_batch"],
            "precision": "fp16",
            "states": "megatron",
            "checkpointing": "full",
            "attention": "eager",
        }
        group = f"{r['hidden']} {r['layers']} {r['n_gpus']} {r['global_batch']}"
        out.append(Row(layout=layout, seconds=float(r["iter_time_ms"]) / 1e3, gpu=r["gpu"], group=group))
    return out


def nemo() -> list[Row]:
    """FP8 pretraining under NeMo (Transformer Engine), without context parallelism; a table not used in building."""
    out = []
    for r in read("nemo_2024_h100_fp8.csv"):
        if r["section"] != "Pretraining" or r["model"] not in NEMO or r["cp"] not in ("1", ""):
            continue
        stages = int(r["vp"] or 1)
        gpus = int(r["n_gpus"])
        shards = gpus // (int(r["tp"]) * int(r["pp"]))
        layout = {
            **NEMO[r["model"]],
            "seq_len": r["seq_len"],
            "chip": "H100 SXM",
            "num_gpus": gpus,
            "gpus_per_node": 8,
            "inter_gbits_per_s_per_gpu": 400,
            "tp": r["tp"],
            "pp": r["pp"],
            "virtual_stages": stages,
            "schedule": "interleaved_1f1b" if stages > 1 else "1f1b",
            "dp_shard": shards,
            "sharding": "zero1" if shards > 1 else "ddp",
            "states": "megatron",
            "micro_batch": r["micro_batch"],
            "global_batch": r["global_batch"],
            "precision": "bf16",
            "fp8": "true",
            "compile": "block",
        }
        seconds = float(r["global_batch"]) * float(r["seq_len"]) / (float(r["tok_per_s_per_gpu"]) * gpus)
        out.append(Row(layout=layout, seconds=seconds, gpu="H100 fp8", group=f"{r['model']} {gpus}"))
    return out


def score(rows: list[Row], draws: int, numbers: Sequence[int] = (3, 10)) -> dict[str, Any]:
    """All figures of one table: as it comes, and corrected by so many rows of each kind of GPU, drawn at random."""
    estimated = estimate_rows([row.layout for row in rows])
    assert estimated.layouts is not None and not estimated.reasons, estimated.reasons
    seconds = np.array([row.seconds for row in rows])
    raw = estimate_layouts(estimated.layouts)
    errors = raw.step_time_s / seconds - 1
    regret, top5 = choices(rows, raw.step_time_s, seconds)
    return {
        "rows": len(rows),
        "mean": float(np.mean(np.abs(errors))),
        "bias": float(np.mean(errors)),
        "covered": _covered(raw, seconds),
        "regret": regret,
        "top5": top5,
        "drawn": {number: _drawn(rows, estimated.layouts, seconds, number, draws) for number in numbers},
    }


def _covered(table: EstimateTable, seconds: Floats) -> float:
    return float(np.mean(np.abs(np.log(table.step_time_s / seconds)) <= Z_90 * table.log_sd))


def _drawn(rows: list[Row], layouts: Layouts, seconds: Floats, number: int, draws: int) -> dict[str, float]:
    """Figures of the rows that were not drawn: means over the draws, and the median of what calibration changes."""
    gpus, rng = np.array([row.gpu for row in rows]), np.random.default_rng(0)
    found = defaultdict(list)
    for _ in range(draws):
        chosen = np.zeros(len(rows), dtype=bool)
        for gpu in np.unique(gpus):
            here = np.flatnonzero(gpus == gpu)
            chosen[rng.choice(here, min(number, max(1, len(here) - 1)), replace=False)] = True
        correction = learn_correction(layouts.take(chosen), seconds[chosen])
        raw, table = (estimate_layouts(layouts.take(~chosen), learned) for learned in (None, correction))
        before, after = (float(np.mean(np.abs(one.step_time_s / seconds[~chosen] - 1))) for one in (raw, table))
        found["mean"].append(after)
        found["change"].append(after - before)
        found["covered"].append(_covered(table, seconds[~chosen]))
        found["used"].append(float(correction.used))
        everything = estimate_layouts(layouts, correction).step_time_s
        found["regret"].append(choices(rows, everything, seconds)[0])
    means = {name: float(np.mean(values)) for name, values in found.items()}
    return means | {"median_change": float(np.median(found["change"])), "worst": float(np.max(found["mean"]))}


def choices(rows: list[Row], predicted: np.ndarray[Any, Any], seconds: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Regret of the predicted best, and whether the best is among the predicted five, over groups of 3 or more."""
    groups: dict[str, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        groups[row.group].append(i)
    regrets, recalls = [], []
    for members in groups.values():
        if len(members) < 3:
            continue
        here = np.array(members)
        best = seconds[here].min()
        order = here[np.argsort(predicted[here])]
        regrets.append(seconds[order[0]] / best - 1)
        recalls.append(float(seconds[order[:5]].min() <= best))
    if not regrets:
        return float("nan"), float("nan")
    return float(np.mean(regrets)), float(np.mean(recalls))


def korthikanti() -> dict[str, float]:
    """Error of the states and activations against arXiv 2205.05198's own arithmetic (figure 1)."""
    dims = {
        "megatron-22B": (48, 6144, 64),
        "gpt3-175B": (96, 12288, 96),
        "turing-530B": (105, 20480, 128),
        "megatron-1T": (128, 25600, 160),
    }
    states, activations = [], []
    for r in read("korthikanti_fig1_memory_gib.csv"):
        layers, hidden, heads = dims[r["model"]]
        together = r["mode"] == "seqsel"
        layout = {
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "vocab": 51200,
            "seq_len": 2048,
            "chip": "A100 SXM 80GB",
            "num_gpus": int(r["tp"]) * int(r["pp"]),
            "tp": r["tp"],
            "pp": r["pp"],
            "virtual_stages": r["interleave"],
            "schedule": "interleaved_1f1b" if int(r["interleave"]) > 1 else "1f1b",
            "inter_gbits_per_s_per_gpu": 200,
            "gpus_per_node": 8,
            "sharding": "ddp",
            "micro_batch": r["micro_batch"],
            "global_batch": r["global_batch"],
            "sequence_parallel": str(together and int(r["tp"]) > 1),
            "precision": "fp16",
            "states": "megatron",
            "attention": "eager",
            "checkpointing": "selective" if together else "none",
        }
        estimated = estimate_rows([layout])
        assert estimated.layouts is not None and estimated.table is not None, estimated.reasons
        table, columns = estimated.table, estimated.layouts
        held = table.parameters_bytes[0] + table.gradients_bytes[0] + table.optimizer_bytes[0]
        kept = activation_bytes(columns)
        states.append(held / 2**30 / float(r["params_and_optimizer_gib"]) - 1)
        activations.append(kept[0] / 2**30 / float(r["activations_gib"]) - 1)
    return {"states": float(np.mean(np.abs(states))), "activations": float(np.mean(np.abs(activations)))}


def speed() -> float:
    """Configurations estimated per second on one core, over the layouts of Llama-2 70B on 2,048 H100s, repeated."""
    from autoplan.planner.cost.analytical.cluster import parse_cluster
    from autoplan.planner.cost.analytical.layout_search import Question
    from autoplan.planner.cost.analytical.transformer import find_transformer

    cluster, _ = parse_cluster("256x8xH100")
    question = Question(
        model=find_transformer("llama2-70b"), cluster=cluster, seq_len=4096, global_batch=2048, fixed={}
    )
    layouts = question.solve().layouts
    layouts = layouts.take(np.tile(np.arange(len(layouts)), 20))
    started = time.process_time()
    estimate_layouts(layouts)
    return len(layouts) / (time.process_time() - started)


def _share(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.1%}"


def main() -> None:
    """Prints the scoreboard."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument(
        "--trials",
        type=Path,
        nargs="+",
        default=[RESULTS],
        help="documents of `autoplan search --json`, record.jsonl files, or folders of either",
    )
    options = parser.parse_args()
    head = "table | rows | mean | bias | in interval | regret | top-5 | rows a GPU | calibrated: mean | worst draw"
    head += " | median change | in interval | used | regret"
    print(f"| {head} |" if options.markdown else head)
    if options.markdown:
        print("|" + "---|" * (head.count("|") + 1))
    tables = {"llm-foundry": llm_foundry, "fms-fsdp": fms_fsdp, "vTrain one node": vtrain, "NeMo 2024 fp8": nemo}
    for name, load in tables.items():
        s = score(load(), options.draws)
        first = [name, str(s["rows"]), *(_share(s[k]) for k in ("mean", "bias", "covered", "regret", "top5"))]
        for number, drawn in s["drawn"].items():
            cells = [*first, str(number), *(_share(drawn[k]) for k in ("mean", "worst"))]
            cells += [f"{100 * drawn['median_change']:+.1f} points"]
            cells += [_share(drawn[k]) for k in ("covered", "used", "regret")]
            print(f"| {' | '.join(cells)} |" if options.markdown else " | ".join(cells))
    print()
    show_memory(markdown=options.markdown)
    accuracy_time.show(accuracy_time.RESULTS, markdown=options.markdown)
    show_trials(options.trials, markdown=options.markdown)
    paper = korthikanti()
    print(f"\nformulas against arXiv 2205.05198 figure 1: states {paper['states']:.1%}, activations ", end="")
    print(f"{paper['activations']:.1%} mean difference")
    print(f"speed: {speed():,.0f} configurations/s on one core")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"commit: {commit.stdout.strip() or 'unknown'}")


if __name__ == "__main__":
    main()
