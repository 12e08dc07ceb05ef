"""What a plan is compared with: the plain run, and the hand setting that a careful person would choose by hand.

In: a `Session`. Out: configurations; nothing runs here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoplan.planner.trials.request import VERY_EXPENSIVE_S
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.techniques.rules import incompatible

if TYPE_CHECKING:
    from autoplan.planner.search.session import Session

MAX_HALVINGS = 4


def plain_configs(session: Session) -> list[TrainingConfig]:
    """The plain run at the largest power-of-two micro-batch that should fit and is cheap, then at smaller ones."""
    sizes = [size for size in session.context.space.values["micro_batch"] if isinstance(size, int)]
    if len(sizes) > 1:
        sizes = [size for size in sizes if size & (size - 1) == 0] or sizes
    offload = needed_offload(session)
    configs = [TrainingConfig(micro_batch=size, offload=offload) for size in sorted(sizes, reverse=True)]
    limit = session.context.memory_limit_bytes
    chosen: list[TrainingConfig] = []
    for config in configs:
        prediction = session.predict(config)
        micro_step_s = prediction.step_time_s / config.accumulation(session.context.spec.global_batch)
        cheap = micro_step_s <= VERY_EXPENSIVE_S
        if chosen or config is configs[-1] or (cheap and prediction.peak_memory_high_bytes <= limit):
            chosen.append(config)
    return chosen[: MAX_HALVINGS + 1]


def needed_offload(session: Session) -> Any:
    """What the plain run keeps on the host: nothing, or if nothing fits so, what takes least on one device."""
    candidates = session.context.candidates
    values = {config.offload for config in candidates if config.world_size == 1}
    if not values or "none" in {config.offload for config in candidates}:
        return "none"
    size = min(config.micro_batch for config in candidates)
    plain = {value: TrainingConfig.model_validate({"micro_batch": size, "offload": value}) for value in values}
    return min(sorted(values), key=lambda value: session.predict(plain[value]).peak_memory_bytes)


def hand_setting(session: Session) -> TrainingConfig | None:
    """What a careful person would set: the predicted fastest of a few usual settings that should fit; None: none does.

    On CUDA bf16, the fused optimizer, sdpa and compile; on CPU fp32 or bf16, not compiled. The micro-batch is the power
    of two whose step is predicted to be the shortest. What the user fixed is kept.
    """
    values = session.context.space.values

    def pick(knob: str, *wanted: object) -> object:
        return next((value for value in wanted if value in values[knob]), values[knob][0])

    on_cuda = session.context.device == "cuda"
    usual: dict[str, object] = {}
    if on_cuda:
        usual = {
            "optimizer_step": pick("optimizer_step", "fused"),
            "attention": pick("attention", "sdpa", "own"),
            "compile": pick("compile", "model", "block"),
        }
    sizes = [size for size in values["micro_batch"] if isinstance(size, int)]
    settings = []
    for precision in ("bf16",) if on_cuda else ("fp32", "bf16"):
        for size in [size for size in sizes if size & (size - 1) == 0] or sizes:
            knobs = usual | {"precision": precision, "micro_batch": size} | dict(session.options.fix)
            config = TrainingConfig.model_validate(knobs)
            if precision in values["precision"] and incompatible(config, session.context.spec.global_batch) is None:
                settings.append(config)
    limit = session.context.memory_limit_bytes
    predicted = zip(settings, session.context.estimator.estimate(settings), strict=True)
    fitting = {config: found.step_time_s for config, found in predicted if found.peak_memory_high_bytes <= limit}
    return min(fitting, key=lambda config: fitting[config], default=None)
