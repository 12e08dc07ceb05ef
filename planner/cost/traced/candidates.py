"""Candidates: TrainingConfigs as columns, with the traced variant that each of them runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoplan.planner.cost.columns import Bools, Columns, Floats, Ints, config_columns
from autoplan.planner.cost.offload import OFFLOADS
from autoplan.planner.trace.model_profile import VariantKey, variants_of
from autoplan.strategies.config import CUDAGRAPH_MODES, TrainingConfig
from autoplan.strategies.techniques.sizes import RECIPES

FP8 = ("off", *RECIPES)
MOMENTS = ("own", "bf16", "8bit")
MOMENT_SHARES = np.array([1.0, 0.5, (1 + 4 / 256) / 4])
"""Of their fp32 bytes, what moments take between steps: 8 bits, and an fp32 scale for each 256."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates(Columns):
    """Columns, and what else a traced profile is read with.

    Attributes:
        variants: The variants that occur; `variant` and `full_variant` index them.
        variant: For each candidate its variant without whole-block checkpointing (none or selective).
        full_variant: The same with full checkpointing, for shares between none and full.
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
    graphs: Bools
    offload: Ints
    liger: Bools
    keeps_memory: Bools
    fp8: Ints
    threads: Floats
    by_chance: Bools
    moments: Ints


def from_configs(
    configs: Sequence[TrainingConfig], global_batch: int, *, device: str, num_blocks: int = 0
) -> Candidates:
    """Training configurations as columns.

    Args:
        configs: Legal for the global batch.
        global_batch: Samples per optimizer step.
        device: cpu or cuda: what the workload's own optimizer step is there.
        num_blocks: In each stack; 0 where that is not known.

    Raises:
        ConfigError: a micro-batch does not divide the global batch.
    """
    keys: dict[VariantKey, int] = {}
    codes = _variant_codes(configs, keys)
    return Candidates(
        **config_columns(
            configs,
            [config.accumulation(global_batch) for config in configs],
            device=device,
            num_blocks=[num_blocks] * len(configs),
        ),
        variants=tuple(keys),
        variant=codes[:, 0],
        full_variant=codes[:, 1],
        graphs=np.array([config.compile_mode in CUDAGRAPH_MODES for config in configs], dtype=bool),
        offload=np.array([OFFLOADS.index(config.offload) for config in configs], dtype=np.int64),
        liger=np.array([config.kernels == "liger" for config in configs], dtype=bool),
        keeps_memory=np.array([config.allocator == "keep" for config in configs], dtype=bool),
        fp8=np.array([FP8.index(config.fp8) for config in configs], dtype=np.int64),
        by_chance=np.array([config.parameters == "bf16_stochastic" for config in configs], dtype=bool),
        moments=np.array([MOMENTS.index(config.optimizer_state) for config in configs], dtype=np.int64),
        threads=np.array([config.threads or 0 for config in configs], dtype=np.float64),
    )


def _variant_codes(configs: Sequence[TrainingConfig], keys: dict[VariantKey, int]) -> Ints:
    """For each configuration the codes of its two variants; `keys` takes in the variants in the order of their codes.

    The two are made once for each combination of the knobs that they depend on: there may be 100,000 configurations.
    """
    known: dict[tuple[str, ...], tuple[int, int]] = {}
    out = []
    for config in configs:
        products = (config.precision, config.attention, config.checkpointing, config.loss)
        knobs = (*products, config.compile, config.parameters)
        if knobs not in known:
            plain, full = variants_of(config)
            known[knobs] = keys.setdefault(plain, len(keys)), keys.setdefault(full, len(keys))
        out.append(known[knobs])
    return np.array(out, dtype=np.int64).reshape(len(configs), 2)
