"""What contradicts itself in a layout: said in a sentence instead of being estimated."""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.planner.cost.analytical.transformer import Transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class Degrees:
    """How one row is laid out, as it is checked; `sequence_parallel` is None where nothing was said."""

    tp: int = 1
    pp: int = 1
    virtual_stages: int = 1
    pp_schedule: str = "1f1b"
    dp_replicate: int = 1
    dp_shard: int = 1
    sharding: str = "ddp"
    gradient_sync: str = "last"
    accumulation: int = 1
    sequence_parallel: bool | None = None
    flat_parameters: bool = False


def contradiction(degrees: Degrees, model: Transformer, seq_len: int) -> tuple[str, str] | None:
    """What of a layout contradicts itself or the model, and what to do; None if nothing does."""
    return (
        _of_sharding(degrees)
        or _of_gradient_sync(degrees)
        or _of_tensor_parallelism(degrees, model, seq_len)
        or _of_pipeline(degrees, model)
    )


def _of_sharding(d: Degrees) -> tuple[str, str] | None:
    if d.sharding == "ddp" and d.dp_shard > 1:
        return (
            f"sharding=ddp shards nothing, and dp_shard={d.dp_shard} shards over {d.dp_shard} ranks",
            "Replicas are counted by dp_replicate.",
        )
    if d.sharding != "ddp" and d.dp_shard == 1:
        return f"sharding={d.sharding} with dp_shard=1 shards nothing", "Give dp_shard of at least 2, or sharding=ddp."
    if d.flat_parameters and d.sharding not in ("zero3", "shard_grad_op"):
        return f"flat_parameters=true needs FSDP, and sharding is {d.sharding}", "Leave flat_parameters out."
    return None


def _of_gradient_sync(d: Degrees) -> tuple[str, str] | None:
    if d.gradient_sync != "every":
        return None
    if d.sharding in ("ddp", "zero1"):
        return (
            f"gradient_sync=every needs sharded gradients, and with sharding={d.sharding} every rank keeps whole ones",
            "Give dp_shard of at least 2 with FSDP, or leave gradient_sync out.",
        )
    if d.pp > 1:
        return (
            "gradient_sync=every does not go with a pipeline: its stages reduce gradients once per pass",
            "Leave gradient_sync out.",
        )
    if d.accumulation == 1:
        return (
            "gradient_sync=every needs several micro-batches per step, and there is one",
            "Leave gradient_sync out: with one micro-batch both are the same.",
        )
    return None


def _of_tensor_parallelism(d: Degrees, model: Transformer, seq_len: int) -> tuple[str, str] | None:
    if d.tp == 1:
        if d.sequence_parallel:
            return "sequence_parallel=true with tp=1 splits nothing", "Leave it out, or give tp of at least 2."
        return None
    if d.tp > model.heads:
        return f"tp={d.tp} is more than the {model.heads} heads that it splits", "Give a smaller tp."
    for count, name in ((model.heads, "heads"), (model.kv_heads, "key-value heads")):
        if count % d.tp:
            return f"tp={d.tp} does not divide the {count} {name}", "Give a tp that divides them."
    if d.sequence_parallel is not False and seq_len % d.tp:
        return (
            f"tp={d.tp} does not divide the sequence of {seq_len} tokens, which sequence parallelism splits",
            "Give another tp or sequence length.",
        )
    return None


def _of_pipeline(d: Degrees, model: Transformer) -> tuple[str, str] | None:
    interleaves = d.pp_schedule in ("interleaved_1f1b", "zero_bubble")
    if d.pp * d.virtual_stages > model.layers:
        return (
            f"pp={d.pp} x virtual_stages={d.virtual_stages} is more than the {model.layers} layers",
            "A stage holds at least one layer.",
        )
    if d.pp == 1:
        if d.virtual_stages > 1:
            return f"virtual_stages={d.virtual_stages} with pp=1: there is no pipeline", "Give pp of at least 2."
        return None
    if interleaves and d.virtual_stages == 1:
        return f"pp_schedule={d.pp_schedule} needs several stages per rank", "Give virtual_stages of at least 2."
    if not interleaves and d.virtual_stages > 1:
        return (
            f"pp_schedule={d.pp_schedule} takes one stage per rank, and virtual_stages is {d.virtual_stages}",
            "Give pp_schedule=interleaved_1f1b, or leave it out.",
        )
    if d.pp_schedule == "zero_bubble" and d.dp_replicate * d.dp_shard > 1:
        return (
            "pp_schedule=zero_bubble computes gradients past the hooks that data parallelism reduces them in",
            "Give another schedule, or no data-parallel ranks.",
        )
    return None
