"""Finds a technique that an export does not know: each knob must change the export, or be reported as not carried."""

from __future__ import annotations

from typing import Any

import pytest

from autoplan.errors import ExportError
from autoplan.planner.export.run import TARGETS, load_target
from autoplan.strategies.config import KNOBS, TrainingConfig, knob_values
from tests.recorded import make_plan

PLAIN = TrainingConfig(micro_batch=2)
# Knobs that have an effect only if another knob is set.
NEEDED_KNOBS: dict[str, dict[str, Any]] = {
    "compile_mode": {"compile": "model"},
    "reshard_after_forward": {"dp_shard": 2},
    "fsdp_prefetch": {"dp_shard": 2},
    "gradient_sync": {"dp_shard": 2},
    "ddp_bucket_mb": {"dp_replicate": 2},
    "ddp_static_graph": {"dp_replicate": 2},
    "pp_schedule": {"pp": 2},
    "pp_microbatches": {"pp": 2},
    "virtual_stages": {"pp": 2},
}


def other_values(knob: str) -> list[Any]:
    """Every value of a knob except its default; 4 and 2 for numbers."""
    plain = getattr(PLAIN, knob)
    return [value for value in knob_values(knob) or (4, 2) if value != plain]


def exported(target: str, device: str, config: TrainingConfig) -> str | None:
    """The text of an export: its files and what it does not carry; None if it refuses the plan."""
    try:
        export = load_target(target).render(make_plan(config, device=device), "plan")
    except ExportError as error:
        assert error.hint
        return None
    # The comments repeat the configuration, which would hide a knob that is not carried.
    kept = [line for text in export.files.values() for line in text.splitlines() if "Configuration:" not in line]
    return "\n".join([line for line in kept if not line.startswith("#   ")] + list(export.not_carried))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("knob", KNOBS)
def test_each_value_of_each_knob_shows_or_is_refused(target: str, knob: str) -> None:
    needed = NEEDED_KNOBS.get(knob, {})
    plain = {d: exported(target, d, TrainingConfig(**({"micro_batch": 2} | needed))) for d in ("cpu", "cuda")}
    for value in other_values(knob):
        config = TrainingConfig(**({"micro_batch": 2} | needed | {knob: value}))
        # A value may be the default on one device only (AdamW is foreach on CUDA, a loop on a CPU).
        texts = {device: exported(target, device, config) for device in ("cpu", "cuda")}
        assert any(texts[d] is None or texts[d] != plain[d] for d in texts), f"{target} does not know {knob}={value}"
