"""Columns: many configurations at once, one array per quantity. Both front ends of the cost model fill them.

The front end of the search (`planner.cost.traced`) fills them from TrainingConfigs and adds what it reads from a traced
model; that of `autoplan estimate` (`planner.cost.analytical`) fills them from rows of a table or from an enumeration of
layouts and adds the dimensions of a transformer and the datasheet of a chip. What is computed from the columns alone
(states, communication, pipeline, exposed time) is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, get_args, overload

import numpy as np
from numpy.typing import NDArray

from autoplan.strategies.config import KNOBS, PLAIN, RANK_COUNTS, Checkpointing, TrainingConfig

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


class ConfigTable(Sequence[TrainingConfig]):
    """Configurations, millions if need be: of each knob its values, and of each configuration the places of its own.

    A configuration itself is made when it is asked for.

    Args:
        values: The values of each knob.
        codes: For each knob the place of every configuration's value among them; one value needs no codes.
        size: How many configurations there are.
    """

    def __init__(self, values: Mapping[str, Sequence[Any]], codes: Mapping[str, NDArray[Any]], size: int) -> None:
        self.values = {knob: tuple(values[knob]) for knob in KNOBS}
        self.codes = {knob: codes[knob] for knob in KNOBS if len(values[knob]) > 1}
        self._size = size

    @classmethod
    def of(cls, configs: Sequence[TrainingConfig]) -> ConfigTable:
        """The table of a list of configurations; of a table itself."""
        if isinstance(configs, cls):
            return configs
        places: dict[str, dict[Any, int]] = {knob: {} for knob in KNOBS}
        codes = {}
        for knob, known in places.items():
            column = np.array(
                [known.setdefault(getattr(config, knob), len(known)) for config in configs], dtype=np.int64
            )
            codes[knob] = column.astype(np.min_scalar_type(len(known)))
        return cls({knob: tuple(known) for knob, known in places.items()}, codes, len(configs))

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> TrainingConfig: ...
    @overload
    def __getitem__(self, index: slice) -> ConfigTable: ...
    def __getitem__(self, index: int | slice) -> TrainingConfig | ConfigTable:
        if isinstance(index, slice):
            return self.take(index)
        place = range(self._size)[index]
        row = {knob: v[self.codes[knob][place] if knob in self.codes else 0] for knob, v in self.values.items()}
        return PLAIN.model_copy(update=row)

    def take(self, index: Any) -> ConfigTable:
        """The configurations at an index: a slice, a mask or positions."""
        codes = {knob: column[index] for knob, column in self.codes.items()}
        size = len(next(iter(codes.values()))) if codes else len(np.empty(self._size, dtype=np.bool_)[index])
        return ConfigTable(self.values, codes, size)

    def column(self, knob: str, read: Callable[[Any], Any] = lambda value: value) -> NDArray[Any]:
        """The knob's value as `read` gives it, for every configuration."""
        found = np.array([read(value) for value in self.values[knob]])
        return found[self.codes[knob]] if knob in self.codes else np.repeat(found, self._size)

    def has(self, knob: str, *values: Any) -> Bools:
        """Where a knob has one of these values."""
        return self.column(knob, lambda value: value in values)

    def off_plain(self, knob: str) -> Bools:
        """Where a knob has another value than in the plain run."""
        return ~self.has(knob, getattr(PLAIN, knob))

    @property
    def world_size(self) -> Floats:
        """Ranks."""
        degrees = [self.column(knob, float) for knob in RANK_COUNTS if self.values[knob] != (1,)]
        return np.asarray(np.multiply.reduce(degrees) if degrees else np.ones(self._size))

    def used(self, knob: str) -> set[Any]:
        """The values of a knob that some configuration has."""
        if knob not in self.codes:
            return set(self.values[knob] if self._size else ())
        counts = np.bincount(self.codes[knob], minlength=len(self.values[knob]))
        return {value for value, count in zip(self.values[knob], counts, strict=True) if count}

    def alike(self, knobs: Sequence[str], read: Callable[[str, Any], Any] = lambda knob, value: value) -> Ints:
        """For each configuration a number: two have the same where the same is read of all these knobs."""
        key, kinds = np.zeros(self._size, dtype=np.int64), 1
        for knob in knobs:
            places: dict[Any, int] = {}
            of_value = np.array([places.setdefault(read(knob, v), len(places)) for v in self.values[knob]])
            if len(places) < 2:
                continue
            if kinds * len(places) > 2**62:
                key, kinds = np.unique(key, return_inverse=True)[1], self._size
            key *= len(places)
            key += of_value[self.codes[knob]]
            kinds *= len(places)
        return key

    def kinds(self, *knobs: str) -> tuple[Ints, Ints]:
        """The first configuration of each combination of values of these knobs, and of which each one is.

        The combinations are numbered as they first occur.
        """
        return first_of_each(self.alike(knobs))


def first_of_each(keys: NDArray[Any]) -> tuple[Ints, Ints]:
    """The place of each key's first occurrence, in their order, and for each key its number among them."""
    if keys.dtype.kind == "i" and 0 <= keys.max(initial=0) < len(keys):  # few kinds: without sorting
        found = np.full(int(keys.max()) + 1, len(keys))
        found[keys[::-1]] = np.arange(len(keys) - 1, -1, -1)
        known = np.flatnonzero(found < len(keys))
        first, inverse = found[known], (np.cumsum(found < len(keys), dtype=np.int32) - 1)[keys]
    else:
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty(len(order), dtype=np.int32)
    number[order] = np.arange(len(order))
    return first[order], number[inverse]


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
        cp: Ranks that share each sequence (context parallelism); a rank has 1/cp of its tokens.
        ep: Ranks that share the experts, of the data-parallel ones.
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
    cp: Floats
    ep: Floats
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
        return self.dp * self.tp * self.pp * self.cp

    @property
    def samples(self) -> Floats:
        """Samples of a micro-batch that a rank works on: a part of each, where ranks share the sequences."""
        return self.micro_batch / self.cp

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


def config_columns(
    table: ConfigTable,
    accumulation: Floats,
    *,
    device: str,
    num_blocks: Sequence[int] | int,
    own_step: str | None = None,
) -> dict[str, Any]:
    """The fields of Columns for training configurations.

    Args:
        table: What is run.
        accumulation: Of each, micro-batches per optimizer step and data-parallel rank.
        device: cpu or cuda.
        num_blocks: Of each model, or of all, in each stack; 0 where that is not known.
        own_step: The form in which the workload's own optimizer steps; None: torch chooses, by the device.
    """
    # torch's own choice: foreach on CUDA, the plain loop on CPU (torch.optim.optimizer._default_to_fused_or_foreach)
    own = own_step or ("foreach" if device == "cuda" else "for_loop")
    numbers = ("micro_batch", "dp_replicate", "dp_shard", "tp", "pp", "virtual_stages")
    sharded = table.column(
        "reshard_after_forward", lambda again: SHARDINGS.index("zero3" if again else "shard_grad_op")
    )
    checkpointing = table.column("checkpointing", CHECKPOINTING.index)
    blocks, which = np.unique(num_blocks, return_inverse=True)
    checkpointed = np.array([[checkpointed_share(policy, int(n)) for n in blocks] for policy in CHECKPOINTING])
    return {
        **{name: table.column(name, float) for name in numbers},
        "accumulation": accumulation,
        "passes": np.where(table.has("pp", 1), 1.0, accumulation / table.column("pp_microbatches", float)),
        "sharding": np.where(table.has("dp_shard", 1), SHARDINGS.index("ddp"), sharded),
        "scatters_each": table.has("gradient_sync", "every"),
        "reduces_16bit": np.zeros(len(table), dtype=bool),
        "sequence_parallel": np.ones(len(table), dtype=bool),
        "cp": np.ones(len(table)),
        "ep": np.ones(len(table)),
        "schedule": table.column("pp_schedule", SCHEDULES.index),
        "precision": table.column("precision", PRECISIONS.index),
        "checkpointing": checkpointing,
        "checkpointed": checkpointed[checkpointing, which],
        "compiled": table.column("compile", COMPILES.index),
        "optimizer_step": table.column("optimizer_step", lambda form: OPTIMIZERS.index(own if form == "own" else form)),
        "states": table.column("parameters", lambda kept: STATES.index(_STATES_OF[kept])),
    }
