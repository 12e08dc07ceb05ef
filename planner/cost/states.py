"""States: bytes of parameters, gradients, optimizer states and gathered units on the fullest rank (ZeRO and FSDP).

    parameters = w P / d     gradients = g T / d     optimizer = (m + o) T / d

P and T are the elements, all and trainable, that the rank's tensor and pipeline shares hold; w, g, m, o the widths in
bytes of a parameter, a gradient, a master copy and the optimizer's own states. d is dp_shard for what is sharded and 1
for the rest: ZeRO-1 shards m + o, ZeRO-2 also g, ZeRO-3 and FSDP also w (Rajbhandari et al. 2020, arXiv 1910.02054,
section 5). Whole gradients are kept between micro-steps of which only the last one reduces.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoplan.planner.cost.columns import OPTIMIZERS, SHARDINGS, STATES, Bools, Columns, Floats

# DDP's buckets are views of the gradients (gradient_as_bucket_view); one bucket of 25 MiB is in flight besides.
DDP_BUCKET_BYTES = 25 * 2**20
# The buckets in which DeepSpeed and Megatron reduce gradients are buffers of their own; assumed, nothing was fitted.
# Not DDP's figure, for these trainers do not run DDP.
ZERO_BUCKET_BYTES = 1e8
# A for-loop Adam step has the square root and the quotient of one parameter at a time, in fp32.
FOR_LOOP_TEMPORARY_BYTES = 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Elements of a model, before any degree divides it; numbers or one array entry per row.

    Attributes:
        largest_parameter: Of the largest tensor: the embedding of a language model.
        flat_parameters: Frozen parameters have gradients too, as in a FlatParameter of FSDP1.
        expert_share: Of all parameters, the share of experts, which expert parallelism divides.
        frozen_bytes: Of a frozen parameter of a block, where it is quantised (QLoRA); 0: as the others.
    """

    parameters: float | Floats
    trainable: float | Floats
    num_blocks: float | Floats
    block_parameters: float | Floats
    largest_parameter: float | Floats
    flat_parameters: bool | Bools = False
    expert_share: float | Floats = 0.0
    frozen_bytes: float | Floats = 0.0

    def alone(self, columns: Columns) -> Floats:
        """Of the parameters that a rank would hold without shards, the share left where ranks share the experts."""
        if not np.any(columns.ep > 1):
            return np.asarray(1.0)
        return np.asarray(1.0 - np.asarray(self.expert_share) * (1.0 - 1.0 / columns.ep))

    @property
    def outside_parameters(self) -> Floats:
        """Of all that lies outside the blocks: embeddings, last norm, output head."""
        return np.asarray(self.parameters - self.num_blocks * self.block_parameters)

    @property
    def gradient_share(self) -> Floats:
        """Share of the parameters that have a gradient: all but the frozen ones."""
        return np.asarray(np.where(self.flat_parameters, 1.0, self.trainable / np.maximum(self.parameters, 1)))

    @property
    def trained_share(self) -> Floats:
        """Share of the parameters that the optimizer steps."""
        return np.asarray(self.trainable / np.maximum(self.parameters, 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Bytes on the fullest rank, one array each.

    Attributes:
        gathered: Units of FSDP that are gathered at once, or buckets in which gradients are reduced.
        stepped_gradients: What is left of the gradients when the optimizer steps.
        temporaries: What the optimizer step allocates and frees.
    """

    parameters: Floats
    gradients: Floats
    optimizer: Floats
    gathered: Floats
    stepped_gradients: Floats
    temporaries: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class StateWidths:
    """Bytes per parameter of each state.

    Attributes:
        piece: Elements that the optimizer steps at once; None: all.
        widened: What a step puts into fp32 for a while, of each element that it steps at once; with no `piece` the fp32
            gradients of states=master.
    """

    parameter: Floats
    gradient: Floats
    master: Floats
    optimizer: float | Floats
    gathered: Floats
    reduced: Floats
    temporary: float | Floats
    piece: Floats | None = None
    widened: float | Floats = 0.0


def state_widths(
    columns: Columns,
    *,
    device: str,
    optimizer_bytes: float | Floats,
    temporary_bytes: float | Floats,
    parameter_bytes: float = 4.0,
) -> StateWidths:
    """Bytes per parameter of each state.

    Args:
        columns: The configurations.
        device: cpu or cuda: FSDP2 gathers blocks in 16 bits under autocast on CUDA alone (techniques/data_parallel.py).
        optimizer_bytes: Of the optimizer's own states, master copies left out: 8 for Adam in fp32.
        temporary_bytes: What a foreach step allocates per parameter that it steps: 4 for Adam in fp32.
        parameter_bytes: As the model has its parameters where states=fp32.
    """
    kind = columns.states
    narrow = (kind == STATES.index("master")) | (kind == STATES.index("16bit"))
    narrow_parameters = kind != STATES.index("fp32")
    autocast = columns.shards_parameters & columns.half & (device == "cuda")
    copies = (kind == STATES.index("megatron")) | (kind == STATES.index("master"))
    return StateWidths(
        parameter=np.where(narrow_parameters, 2.0, parameter_bytes),
        gradient=np.where(narrow, 2.0, 4.0),
        master=np.where(copies, 4.0, 0.0),
        optimizer=optimizer_bytes,
        gathered=np.where(autocast | narrow_parameters, 2.0, 4.0),
        reduced=np.where(narrow | columns.reduces_16bit, 2.0, 4.0),
        temporary=temporary_bytes,
    )


def first_stage_outside(size: ModelSize, columns: Columns) -> Floats:
    """Elements outside the blocks that the first pipeline stage holds, before tensor parallelism.

    An output head of its own (untied: what lies outside the blocks is at least twice the largest tensor) is on the
    last stage; a tied one is the embedding, which both stages hold.
    """
    outside = size.outside_parameters
    untied = outside >= 2 * np.asarray(size.largest_parameter)
    first = np.where(untied, outside - size.largest_parameter, outside)
    return np.asarray(np.where(columns.pp > 1, first, outside))


def rank_parameters(size: ModelSize, columns: Columns) -> Floats:
    """Elements that the tensor and pipeline shares of the fullest rank hold: the first stage, whole blocks."""
    stage = np.ceil(size.num_blocks / columns.pp) * size.block_parameters + first_stage_outside(size, columns)
    return np.asarray(np.where(columns.pp > 1, stage, size.parameters) / columns.tp)


def state_bytes(columns: Columns, size: ModelSize, widths: StateWidths) -> StateBytes:
    """Bytes of all states on the fullest rank."""
    held, alone = rank_parameters(size, columns), size.alone(columns)
    # shards are parts of what a rank holds alone, over fewer ranks: the same bytes of experts as of all others
    shards = np.where(columns.shards > 1, columns.shards, 1 / alone)
    stepped = held * size.trained_share / shards
    made = widths.gradient * held * size.gradient_share
    width = widths.parameter
    if np.any(size.frozen_bytes):  # embeddings and the head stay as they are
        quantised = np.where(np.asarray(size.frozen_bytes) > 0, 1.0 - size.trained_share, 0.0)
        quantised = quantised * size.num_blocks * size.block_parameters / np.maximum(size.parameters, 1)
        width = (1 - quantised) * width + quantised * size.frozen_bytes
    return StateBytes(
        parameters=width * held / np.where(columns.shards_parameters, shards, 1 / alone),
        gradients=made / np.where(columns.keeps_whole_gradients, 1 / alone, shards),
        optimizer=(widths.master + widths.optimizer) * stepped,
        gathered=_gathered_bytes(columns, size, widths) * alone,
        stepped_gradients=made / np.where(columns.shards_gradients, shards, 1 / alone),
        temporaries=_temporary_bytes(columns, size, widths, stepped),
    )


def _gathered_bytes(columns: Columns, size: ModelSize, widths: StateWidths) -> Floats:
    """Gathered units: FSDP has two blocks at once (one is used, the next is on its way) and all that lies outside the
    blocks, which stays gathered and in its own width; without resharding after the forward all blocks of the rank."""
    blocks = np.ceil(size.num_blocks / columns.pp)
    resharded = columns.sharding == SHARDINGS.index("zero3")
    at_once = np.where(resharded, np.minimum(blocks, 2.0), blocks) * size.block_parameters
    units = widths.gathered * at_once + widths.parameter * first_stage_outside(size, columns)
    fsdp = np.where(columns.dp_shard > 1, units / columns.tp, 0.0)
    bucket = np.where(columns.sharding == SHARDINGS.index("ddp"), DDP_BUCKET_BYTES, ZERO_BUCKET_BYTES)
    return np.asarray(np.where(columns.shards_parameters, fsdp, np.where(columns.dp > 1, bucket, 0.0)))


def _temporary_bytes(columns: Columns, size: ModelSize, widths: StateWidths, stepped: Floats) -> Floats:
    """The optimizer step's own: a foreach Adam has one temporary of the size of what it steps, a for-loop those of one
    tensor, a fused one none; an optimizer with 16-bit gradients and fp32 master copies makes fp32 gradients."""
    if widths.piece is not None:
        stepped = np.minimum(stepped, widths.piece)
    tensor = np.minimum(stepped, size.largest_parameter / columns.tp / columns.shards)
    loop = np.where(np.asarray(widths.temporary) > 0, FOR_LOOP_TEMPORARY_BYTES, 0.0) * tensor
    form = columns.optimizer_step
    own = np.where(
        form == OPTIMIZERS.index("foreach"),
        widths.temporary * stepped,
        np.where(form == OPTIMIZERS.index("for_loop"), loop, 0.0),
    )
    if widths.piece is not None:
        return np.asarray(own + widths.widened * stepped)
    return np.asarray(own + np.where(columns.states == STATES.index("master"), 4.0, 0.0) * stepped)
