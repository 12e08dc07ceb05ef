"""Candidates: many configurations as columns, so that the cost model prices them all at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoplan.planner.trace.model_profile import VariantKey
from autoplan.strategies.config import TrainingConfig

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SHARDINGS = ("ddp", "zero1", "zero2", "zero3")
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
OPTIMIZERS = ("for_loop", "foreach", "fused")
COMPILES = ("off", "block", "model")
# every how many blocks one is checkpointed whole, the first of each stack among them: techniques/checkpointing.py
_EVERY = {"every_4": 4, "every_3": 3, "every_2": 2, "full": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """One array per knob, all of one length.

    Attributes:
        variants: The variants that occur; `variant` indexes them.
        full_variant: For each candidate the same variant with full checkpointing, for shares between none and full.
        checkpointed: Share of blocks that are checkpointed whole, 0 to 1; blends the two variants.
        matmul_dtype: The dtype of matmul rates: float32, tf32, bfloat16, float16, float8.
        scatters_each: FSDP2 scatters gradients at every micro-step, not the sum of all at the last.
        sharding, schedule, optimizer, compiled: Indices into SHARDINGS, SCHEDULES, OPTIMIZERS, COMPILES.
        passes: Pipeline passes per optimizer step.
        keeps_memory: The C library keeps freed memory (allocator=keep).
        threads: CPU threads per rank; 0: all.
    """

    variants: tuple[VariantKey, ...]
    dtypes: tuple[str, ...]
    variant: Ints
    full_variant: Ints
    checkpointed: Floats
    matmul_dtype: Ints
    micro_batch: Floats
    accumulation: Floats
    dp_replicate: Floats
    dp_shard: Floats
    tp: Floats
    sequence_parallel: NDArray[np.bool_]
    pp: Floats
    virtual_stages: Floats
    passes: Floats
    schedule: Ints
    sharding: Ints
    scatters_each: NDArray[np.bool_]
    optimizer: Ints
    compiled: Ints
    graphs: NDArray[np.bool_]
    keeps_memory: NDArray[np.bool_]
    threads: Floats

    def __len__(self) -> int:
        return len(self.micro_batch)

    def take(self, index: Any) -> Candidates:
        """The candidates at an index (mask or positions)."""
        columns = {f.name: getattr(self, f.name)[index] for f in fields(self) if f.name not in ("variants", "dtypes")}
        return replace(self, **columns)


def checkpointed_share(policy: str, num_blocks: int) -> float:
    """Share of the blocks that a policy checkpoints whole."""
    every = _EVERY.get(policy)
    if every is None:
        return 0.0
    return -(-num_blocks // every) / num_blocks if num_blocks else 1 / every


def from_configs(
    configs: Sequence[TrainingConfig], global_batch: int, *, device: str, num_blocks: int = 0
) -> Candidates:
    """Training configurations as columns.

    Args:
        configs: Legal for the global batch.
        global_batch: Samples per optimizer step.
        device: cpu or cuda: what the workload's own optimizer step is there.
        num_blocks: In each stack; 0 where that is not known.
    """
    keys: dict[VariantKey, int] = {}
    dtypes = ("float32", "tf32", "bfloat16", "float16")
    dtype_of = {"fp32": 0, "tf32": 1, "bf16": 2, "fp16": 3}
    # torch's own choice: foreach on CUDA, the plain loop on CPU (torch.optim.optimizer._default_to_fused_or_foreach)
    own = OPTIMIZERS.index("foreach" if device == "cuda" else "for_loop")
    known: dict[tuple[Any, ...], tuple[int, int]] = {}

    def variants_of(config: TrainingConfig) -> tuple[int, int]:
        place = (config.precision, config.attention, config.checkpointing, config.loss, config.compile != "off")
        if place not in known:
            share = checkpointed_share(config.checkpointing, num_blocks)
            base = VariantKey(
                precision="half" if config.precision in ("bf16", "fp16") else "fp32",
                attention=config.attention,
                checkpointing="selective" if config.checkpointing == "selective" else "none",
                loss=config.loss,
                compiled=config.compile != "off",
            )
            full = base.model_copy(update={"checkpointing": "full"}) if share else base
            known[place] = keys.setdefault(base, len(keys)), keys.setdefault(full, len(keys))
        return known[place]

    pairs = [variants_of(config) for config in configs]
    accumulation = [config.accumulation(global_batch) for config in configs]

    def column(name: str) -> Floats:
        return np.array([getattr(config, name) for config in configs], dtype=np.float64)

    def coded(values: list[int]) -> Ints:
        return np.array(values, dtype=np.int64)

    return Candidates(
        variants=tuple(keys),
        dtypes=dtypes,
        variant=coded([a for a, _ in pairs]),
        full_variant=coded([b for _, b in pairs]),
        checkpointed=np.array([checkpointed_share(config.checkpointing, num_blocks) for config in configs]),
        matmul_dtype=coded([dtype_of[config.precision] for config in configs]),
        micro_batch=column("micro_batch"),
        accumulation=np.array(accumulation, dtype=np.float64),
        dp_replicate=column("dp_replicate"),
        dp_shard=column("dp_shard"),
        tp=column("tp"),
        sequence_parallel=np.ones(len(configs), dtype=bool),
        pp=column("pp"),
        virtual_stages=column("virtual_stages"),
        passes=np.array([a / c.pp_microbatches if c.pp > 1 else 1 for a, c in zip(accumulation, configs, strict=True)]),
        schedule=coded([SCHEDULES.index(config.pp_schedule) for config in configs]),
        sharding=coded(
            [
                0 if c.dp_shard == 1 else SHARDINGS.index("zero3" if c.reshard_after_forward else "zero2")
                for c in configs
            ]
        ),
        scatters_each=np.array([config.gradient_sync == "every" for config in configs], dtype=bool),
        optimizer=coded([own if c.optimizer_step == "own" else OPTIMIZERS.index(c.optimizer_step) for c in configs]),
        compiled=coded([COMPILES.index(config.compile) for config in configs]),
        graphs=np.array([config.compile_mode in ("reduce-overhead", "max-autotune") for config in configs], dtype=bool),
        keeps_memory=np.array([config.allocator == "keep" for config in configs], dtype=bool),
        threads=np.array([config.threads or 0 for config in configs], dtype=np.float64),
    )
