"""The references of a plan: the user's own setting, the plain run, and the setting of a careful person by hand.

In: a `Session`. Out: configurations; nothing runs here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from autoplan.planner.cost.columns import ConfigTable
from autoplan.planner.space.prune import memory_share_bytes
from autoplan.planner.trials.request import VERY_EXPENSIVE_S
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.techniques.rules import incompatible
from autoplan.units import format_bytes

if TYPE_CHECKING:
    from autoplan.planner.search.session import Session
    from autoplan.planner.search.setup import SearchContext

MAX_HALVINGS = 4

NEAR = 0.05
"""Predicted steps that differ by less than this share are the same to who chooses a micro-batch by hand."""


def plain_configs(session: Session) -> list[TrainingConfig]:
    """What may be the baseline, in the order in which it is tried: the user's own setting, then each rung (`rungs`).

    A rung begins at the largest power-of-two micro-batch that should fit and is cheap. It is left out if even its
    smallest is predicted, at the low end, to take more than there is; the last rung is always there.
    """
    own, limit_bytes = session.own_config, session.context.memory_limit_bytes
    offered = session.context.space.values["micro_batch"]
    sizes = [size for size in offered if size & (size - 1) == 0] or offered
    found: list[TrainingConfig] = [] if own is None else [own]
    ladder = rungs(session)
    for knobs in ladder:
        configs = [TrainingConfig.model_validate({"micro_batch": size} | knobs) for size in sorted(sizes, reverse=True)]
        if knobs != ladder[-1] and session.predict(configs[-1]).peak_memory_low_bytes > limit_bytes:
            continue
        fits = (at for at, config in enumerate(configs) if _is_cheap_and_fits(session, config))
        first = next(fits, len(configs) - 1)
        found += [config for config in configs[first:][: MAX_HALVINGS + 1] if config != own]
    return found


def rungs(session: Session) -> list[dict[str, Any]]:
    """Knobs of the plain run, and of what takes its place where it does not fit, in the order in which they are tried.

    Plain, full checkpointing, fused loss too; each with the offload without which nothing fits. What is not legal here
    is left out.
    """
    moved, values = needed_offload(session), session.context.space.values
    ladder: list[dict[str, Any]] = [{} if moved == "none" else {"offload": moved}]
    for knob, value in (("checkpointing", "full"), ("loss", "fused")):
        if value in values.get(knob, ()):
            ladder.append(ladder[-1] | {knob: value})
    return ladder


def _is_cheap_and_fits(session: Session, config: TrainingConfig) -> bool:
    prediction = session.predict(config)
    micro_step_s = prediction.step_time_s / config.accumulation(session.context.spec.global_batch)
    return micro_step_s <= VERY_EXPENSIVE_S and prediction.peak_memory_high_bytes <= session.context.memory_limit_bytes


def needed_offload(session: Session) -> Any:
    """The offload of the plain run: none; or, if nothing fits so, the one that takes the least memory on one device."""
    candidates = session.context.candidates
    values = {config.offload for config in candidates if config.world_size == 1}
    if not values or "none" in {config.offload for config in candidates}:
        return "none"
    size = min(config.micro_batch for config in candidates)
    plain = {value: TrainingConfig.model_validate({"micro_batch": size, "offload": value}) for value in values}
    return min(sorted(values), key=lambda value: session.predict(plain[value]).peak_memory_bytes)


def what_would_fit(context: SearchContext) -> str:
    """Sentences for people: what to change where the plain run does not fit, by the parts of its predicted peak.

    Activations are taken to shrink with the length of the sequences, and LoRA to leave no gradients and no optimizer
    state of the weights.
    """
    candidates = ConfigTable.of(context.space.candidates)
    alone = candidates.take(candidates.world_size == 1) or candidates
    least = int(np.argmin(context.estimator.outlook(alone).peak_memory_bytes))
    table = context.estimator.table([alone[least]])
    peak, limit = float(table.peak_memory_bytes[0]), float(context.memory_limit_bytes)
    activations, length = float(table.memory.activations[0]), context.spec.sequence_length
    ways = []
    if length is not None:
        room = (limit - peak + activations) / max(activations, 1.0)
        fitting = int(length * min(room, 0.5))  # half where all of it was predicted to fit, and did not
        ways += [f"sequences of at most {fitting:,} tokens (--seq-len; by estimate)"] if fitting > 0 else []
    without = peak - float(table.memory.gradients[0] + table.memory.optimizer[0])
    if context.profile.trainable > 0.5 * context.profile.parameters and without <= limit:
        ways.append(f"LoRA (some {format_bytes(without)} by estimate)")
    ways += ["a smaller model", "a device with more memory"]
    return (
        f"What would fit: {', '.join(ways)}. More devices help where the plain run, with checkpointing and a fused "
        "loss, fits one of them; `autoplan estimate` says what a cluster holds."
    )


def hand_setting(session: Session) -> TrainingConfig | None:
    """The setting of a careful person: the predicted fastest of a few usual ones that should fit; None: none does.

    The micro-batch is a power of two: the smallest whose step is predicted within NEAR of the shortest, since a larger
    one takes more memory, and a longer look, for nothing. If there are several devices, the settings have DDP on as
    many as the space has; if that does not fit, FSDP.
    """
    context, fitting = session.context, dict[TrainingConfig, float]()
    for spread in ("dp_replicate", "dp_shard"):
        settings = list(_usual_settings(session, spread))
        predicted = zip(settings, context.estimator.estimate(settings), strict=True)
        fitting = {
            config: found.step_time_s
            for config, found in predicted
            if found.peak_memory_high_bytes <= memory_share_bytes(config, context.memory_limit_bytes, context.device)
        }
        if context.nproc == 1 or any(config.world_size > 1 for config in fitting):
            break
    near = [config for config, seconds in fitting.items() if seconds <= (1 + NEAR) * min(fitting.values())]
    return min(near, key=lambda config: (config.micro_batch, fitting[config]), default=None)


def _usual_settings(session: Session, spread: str) -> Iterator[TrainingConfig]:
    """The legal ones of: each power-of-two micro-batch, on one device and spread over the most.

    On CUDA bf16 (fp16 where there is none), the fused optimizer, sdpa and compile; on CPU fp32 or bf16, not compiled.
    What the user fixed is kept.
    """
    values, on_cuda = session.context.space.values, session.context.device == "cuda"

    def pick(knob: str, *wanted: str) -> str:
        return next((value for value in wanted if value in values[knob]), str(values[knob][0]))

    usual: dict[str, object] = {}
    if on_cuda:
        usual = {
            "optimizer_step": pick("optimizer_step", "fused"),
            "attention": pick("attention", "sdpa", "own"),
            "compile": pick("compile", "model", "block"),
        }
    sizes = [size for size in values["micro_batch"] if size & (size - 1) == 0] or values["micro_batch"]
    tried = ("bf16",) if on_cuda else ("fp32", "bf16")
    precisions = [one for one in tried if one in values["precision"]] or [pick("precision", "fp16")]
    most = max((ranks for ranks in values.get(spread, ()) if ranks <= session.context.nproc), default=1)
    for ranks, precision, size in itertools.product(sorted({1, most}), precisions, sizes):
        own = {spread: ranks, "precision": precision, "micro_batch": size}
        knobs = usual | own | dict(session.options.fix)
        config, batch = TrainingConfig.model_validate(knobs), session.context.spec.global_batch
        if batch % (config.micro_batch * config.dp) == 0 and incompatible(config, batch) is None:
            yield config
