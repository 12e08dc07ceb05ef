"""Columns: many configurations at once, one array per quantity. Both front ends of the cost model fill them.

The front end of the search (`planner.cost.traced`) fills them from TrainingConfigs and adds what it reads from a traced
model; that of `autoplan estimate` (`planner.cost.analytical`) fills them from rows of a table or from an enumeration of
layouts and adds the dimensions of a transformer and the datasheet of a chip. What is computed from the columns alone
(states, communication, pipeline, exposed time) is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, get_args

import numpy as np
from numpy.typing import NDArray

from autoplan.strategies.config import Checkpointing, TrainingConfig

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# The values of columns that hold a code: the code is the place in these tuples.
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")
DTYPES = ("float32", "tf32", "bfloat16", "float16", "float8")
CHECKPOINTING: tuple[str, ...] = get_args(Checkpointing)
# shard_grad_op: FSDP that keeps gathered parameters from the forward to the backward (FSDP1's name for it), what
# reshard_after_forward=False does. zero1 and zero2 are DeepSpeed's and Megatron's, which keep whole parameters.
SHARDINGS = ("ddp", "zero1", "zero2", "shard_grad_op", "zero3")
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
OPTIMIZERS = ("for_loop", "foreach", "fused")
COMPILES = ("off", "block", "model")
# What a rank keeps per parameter. fp32: parameters, gradients and optimizer states in fp32, autocast computes in 16
# bits (what autoplan runs, unless `parameters` says otherwise). megatron: 16-bit parameters, fp32 gradients, fp32
# master copies (Megatron-LM). master: 16-bit parameters and gradients, fp32 master copies (parameters=bf16). 16bit: no
# master copies (parameters=bf16_stochastic); elsewhere the states are in 16 bits too.
STATES = ("fp32", "megatron", "master", "16bit")

_STATES_OF = {"own": "fp32", "bf16": "master", "bf16_stochastic": "16bit"}

# Of every so many blocks one is checkpointed whole, the first of each stack among them: techniques/checkpointing.py.
_EVERY = {"every_4": 4, "every_3": 3, "every_2": 2, "full": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """One array per quantity, all of one length.

    Attributes:
        micro_batch: Samples per forward and backward of one data-parallel rank.
        accumulation: Micro-batches per optimizer step and data-parallel rank.
        passes: Pipeline passes per optimizer step; 1 without a pipeline.
        sharding, schedule, precision, checkpointing, compiled, optimizer_step, states: Codes of the tuples above.
        checkpointed: Share of the blocks that are checkpointed whole, 0 to 1.
        scatters_each: gradient_sync=every: sharded gradients are scattered at each micro-step, not their sum at the
            last one.
        reduces_16bit: Gradients are reduced in 16 bits. autoplan reduces them in fp32 (strategies/techniques/
            data_parallel.py, reduce_dtype); most other trainers under FSDP in 16 bits.
    """

    micro_batch: Floats
    accumulation: Floats
    passes: Floats
    dp_replicate: Floats
    dp_shard: Floats
    sharding: Ints
    scatters_each: Bools
    reduces_16bit: Bools
    tp: Floats
    sequence_parallel: Bools
    pp: Floats
    virtual_stages: Floats
    schedule: Ints
    precision: Ints
    checkpointing: Ints
    checkpointed: Floats
    compiled: Ints
    optimizer_step: Ints
    states: Ints

    def __len__(self) -> int:
        return len(self.micro_batch)

    @property
    def dp(self) -> Floats:
        """Data-parallel degree."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_ranks(self) -> Floats:
        """All ranks."""
        return self.dp * self.tp * self.pp

    @property
    def half(self) -> Bools:
        """Products run in 16 bits or fewer."""
        return np.asarray(self.precision >= PRECISIONS.index("bf16"))

    @property
    def shards(self) -> Floats:
        """Ranks over which optimizer states are divided."""
        return np.where(self.sharding > 0, self.dp_shard, 1.0)

    @property
    def shards_gradients(self) -> Bools:
        """Gradients are divided too: ZeRO-2, ZeRO-3 and FSDP."""
        return np.asarray(self.sharding >= SHARDINGS.index("zero2"))

    @property
    def shards_parameters(self) -> Bools:
        """Parameters are divided too: FSDP, with and without resharding after the forward."""
        return np.asarray(self.sharding >= SHARDINGS.index("shard_grad_op"))

    @property
    def keeps_whole_gradients(self) -> Bools:
        """A rank keeps gradients of all parameters up to the last micro-step of a step."""
        waits = ~self.scatters_each & (self.accumulation > 1)
        return np.asarray(~self.shards_gradients | waits)

    def take(self, index: Any) -> Self:
        """The rows at an index (mask or positions)."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v[index] for k, v in values.items() if isinstance(v, np.ndarray)})


def checkpointed_share(policy: str, num_blocks: int) -> float:
    """Share of the blocks that a policy checkpoints whole; num_blocks of 0: not known."""
    every = _EVERY.get(policy)
    if every is None:
        return 0.0
    return -(-num_blocks // every) / num_blocks if num_blocks else 1 / every


def sharding_of(config: TrainingConfig) -> str:
    """What a configuration shards, as one of SHARDINGS."""
    if config.dp_shard == 1:
        return "ddp"
    return "zero3" if config.reshard_after_forward else "shard_grad_op"


def config_columns(
    configs: Sequence[TrainingConfig], accumulation: Sequence[int], *, device: str, num_blocks: Sequence[int]
) -> dict[str, Any]:
    """The fields of Columns for training configurations.

    Args:
        configs: What is run.
        accumulation: Of each, micro-batches per optimizer step and data-parallel rank.
        device: cpu or cuda: what the workload's own optimizer step is there.
        num_blocks: Of each model, in each stack; 0 where that is not known.
    """
    # torch's own choice: foreach on CUDA, the plain loop on CPU (torch.optim.optimizer._default_to_fused_or_foreach)
    own = "foreach" if device == "cuda" else "for_loop"

    def numbers(name: str) -> Floats:
        return np.array([getattr(config, name) for config in configs], dtype=np.float64)

    def codes(values: Sequence[str], allowed: Sequence[str]) -> Ints:
        place = {value: code for code, value in enumerate(allowed)}
        return np.array([place[value] for value in values], dtype=np.int64)

    passes = [a / c.pp_microbatches if c.pp > 1 else 1 for a, c in zip(accumulation, configs, strict=True)]
    forms = [own if c.optimizer_step == "own" else c.optimizer_step for c in configs]
    return {
        **{name: numbers(name) for name in ("micro_batch", "dp_replicate", "dp_shard", "tp", "pp", "virtual_stages")},
        "accumulation": np.array(accumulation, dtype=np.float64),
        "passes": np.array(passes, dtype=np.float64),
        "sharding": codes([sharding_of(config) for config in configs], SHARDINGS),
        "scatters_each": np.array([config.gradient_sync == "every" for config in configs], dtype=bool),
        "reduces_16bit": np.zeros(len(configs), dtype=bool),
        "sequence_parallel": np.ones(len(configs), dtype=bool),
        "schedule": codes([config.pp_schedule for config in configs], SCHEDULES),
        "precision": codes([config.precision for config in configs], PRECISIONS),
        "checkpointing": codes([config.checkpointing for config in configs], CHECKPOINTING),
        "checkpointed": np.array(
            [checkpointed_share(c.checkpointing, blocks) for c, blocks in zip(configs, num_blocks, strict=True)]
        ),
        "compiled": codes([config.compile for config in configs], COMPILES),
        "optimizer_step": codes(forms, OPTIMIZERS),
        "states": codes([_STATES_OF[config.parameters] for config in configs], STATES),
    }
