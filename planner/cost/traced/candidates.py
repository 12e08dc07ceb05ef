"""Candidates: TrainingConfigs as columns, with the traced variant that each of them runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoplan.planner.cost.columns import Bools, Columns, ConfigTable, Floats, Ints, config_columns
from autoplan.planner.cost.offload import OFFLOADS
from autoplan.planner.trace.model_profile import VARIANT_KNOBS, VariantKey, variants_of
from autoplan.strategies.config import CUDAGRAPH_MODES, TrainingConfig
from autoplan.strategies.techniques.sizes import RECIPES

FP8 = ("off", *RECIPES)
MOMENTS = ("own", "bf16", "8bit")
MOMENT_SHARES = np.array([1.0, 0.5, (1 + 4 / 256) / 4])
"""Of their fp32 bytes, what moments take between steps: 8 bits, and an fp32 scale for each 256."""

MICRO_STEP_KNOBS = (*VARIANT_KNOBS, "micro_batch", "tp", "threads", "fp8", "compile_mode", "kernels")
"""The knobs that the operations of a micro-step, and their times, depend on."""

RANKS = ("dp_replicate", "dp_shard", "pp")
"""What they depend on besides on a CPU, whose ranks share its cores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates(Columns):
    """Columns, and what else a traced profile is read with.

    Attributes:
        variants: The variants that occur; `variant` and `full_variant` index them.
        variant: For each candidate its variant without whole-block checkpointing (none or selective).
        full_variant: The same with full checkpointing, for shares between none and full.
        micro_step: A number; the operations of a micro-step take the same time where it is the same.
        graphs: CUDA graphs launch the operations of compiled code.
        offload: What lies on the host, as a place in `planner.cost.offload.OFFLOADS`.
        liger: Norms, rotary embeddings and gated MLPs run on Liger's kernels.
        keeps_memory: The C library keeps freed memory (allocator=keep).
        fp8: The recipe of products in 8 bits: the code is the place in FP8.
        threads: CPU threads per rank; 0: all.
        by_chance: Parameters in bf16 without master copies (parameters=bf16_stochastic).
        moments: How Adam's moments are kept: the code is the place in MOMENTS.
    """

    variants: tuple[VariantKey, ...]
    variant: Ints
    full_variant: Ints
    micro_step: Ints
    graphs: Bools
    offload: Ints
    liger: Bools
    keeps_memory: Bools
    fp8: Ints
    threads: Floats
    by_chance: Bools
    moments: Ints


def from_configs(
    configs: Sequence[TrainingConfig],
    global_batch: int,
    *,
    device: str,
    num_blocks: int = 0,
    own_step: str | None = None,
) -> Candidates:
    """Training configurations as columns.

    Args:
        configs: Legal for the global batch.
        global_batch: Samples per optimizer step.
        device: cpu or cuda.
        num_blocks: In each stack; 0 where that is not known.
        own_step: The form in which the workload's own optimizer steps; None: torch chooses, by the device.

    Raises:
        ConfigError: a micro-batch does not divide the global batch.
    """
    table = ConfigTable.of(configs)
    keys: dict[VariantKey, int] = {}
    first, kind = table.kinds(*VARIANT_KNOBS)
    pairs = [[keys.setdefault(key, len(keys)) for key in variants_of(table[int(place)])] for place in first]
    codes = np.array(pairs, dtype=np.int64).reshape(-1, 2)[kind]
    first, kind = table.kinds("micro_batch", "dp_replicate", "dp_shard")
    accumulation = np.array([table[int(place)].accumulation(global_batch) for place in first], dtype=np.float64)[kind]
    return Candidates(
        **config_columns(table, accumulation, device=device, num_blocks=num_blocks, own_step=own_step),
        variants=tuple(keys),
        variant=codes[:, 0],
        full_variant=codes[:, 1],
        micro_step=table.alike((*MICRO_STEP_KNOBS, *(RANKS if device == "cpu" else ()))),
        graphs=table.has("compile_mode", *CUDAGRAPH_MODES),
        offload=table.column("offload", OFFLOADS.index),
        liger=table.has("kernels", "liger"),
        keeps_memory=table.has("allocator", "keep"),
        fp8=table.column("fp8", FP8.index),
        by_chance=table.has("parameters", "bf16_stochastic"),
        moments=table.column("optimizer_state", MOMENTS.index),
        threads=table.column("threads", lambda count: float(count or 0)),
    )
