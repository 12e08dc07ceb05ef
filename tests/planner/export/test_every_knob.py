"""Finds a technique that an export does not know: each knob must change the export, or be reported as not carried."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from autoplan.errors import ExportError
from autoplan.planner.export.run import TARGETS, load_target
from autoplan.strategies.config import KNOBS, TrainingConfig
from autoplan.strategies.workloads.sources import make_spec
from tests.contracts.knob_cases import needed_by, tried_values
from tests.recorded import LANGUAGE_TRAINING, make_plan

SHARDS = {("offload", "parameters"): {"dp_shard": 2}}
"""What a value needs that the other values of its knob do not."""

FOR_GPUS = ("torchtitan", "megatron")
"""Targets that train language models of their own on GPUs; torchtitan has no GPT-2."""


@functools.cache
def exported(target: str, device: str, config: TrainingConfig) -> str | None:
    """The text of an export: its files and what it does not carry; None if it refuses the plan."""
    given: dict[str, Any] = {}
    if target in FOR_GPUS:
        spec = make_spec(model="llama2-7b", sequence_length=32, global_batch=32)
        given = {"workload": spec, "accumulation": config.accumulation(32), "training": LANGUAGE_TRAINING}
    try:
        export = load_target(target).render(make_plan(config, device=device, **given), "plan")
    except ExportError as error:
        assert error.hint
        return None
    # The comments repeat the configuration, which would hide a knob that is not carried.
    kept = [line for text in export.files.values() for line in text.splitlines() if "Configuration:" not in line]
    return "\n".join([line for line in kept if not line.startswith("#   ")] + list(export.not_carried))


def test_ray_trains_by_the_script_of_pytorch() -> None:
    """So what pytorch shows of a knob, ray does."""
    (driver, training), plan = (f"plan{end}.py" for end in ("", "_training")), make_plan(TrainingConfig(micro_batch=1))
    files = load_target("ray").render(plan, "plan").files
    assert list(files) == [driver, training]
    assert files[training] == load_target("pytorch").render(plan, "plan_training").files[training]


@pytest.mark.slow
@pytest.mark.parametrize("target", [target for target in TARGETS if target != "ray"])
@pytest.mark.parametrize("knob", KNOBS)
def test_each_value_of_each_knob_shows_or_is_refused(target: str, knob: str) -> None:
    for value in tried_values(knob):
        if (target, value) == ("torchtitan", "foreach"):
            continue  # torch's own form on CUDA: the same recipe
        beside: dict[str, Any] = {"micro_batch": 1} | needed_by(knob) | SHARDS.get((knob, value), {})
        plain, config = TrainingConfig(**beside), TrainingConfig(**(beside | {knob: value}))
        # What is the default on one device (AdamW is foreach on CUDA, a loop on a CPU) differs on the other.
        devices = ("cuda",) if target in FOR_GPUS else ("cpu", "cuda")
        texts = ((exported(target, device, config), exported(target, device, plain)) for device in devices)
        assert any(text is None or text != other for text, other in texts), f"{target} does not know {knob}={value}"


@pytest.mark.parametrize("target", FOR_GPUS)
def test_a_target_for_gpus_takes_a_plan(target: str) -> None:
    assert exported(target, "cuda", TrainingConfig(micro_batch=1)), "a refusal would hide every knob"
