"""The parity check of a workload: of a whole training (compare.py), or of a step function (step_losses.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoplan.planner.parity import compare, step_losses
from autoplan.planner.parity.records import Rung
from autoplan.planner.records.trials import Parity
from autoplan.processes import ProcessReport, Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.spec import WorkloadSpec


def check_parity(
    zygote: Zygote,
    spec: WorkloadSpec,
    config: TrainingConfig,
    *,
    plain: TrainingConfig | None,
    device: str,
    directory: Path,
    deadline_s: float,
    memory_limit_bytes: int | None = None,
    on_attempt: Callable[[ProcessReport], None] | None = None,
    time_s: float | None = None,
    cache_dir: Path | None = None,
    own_shapes: bool = False,
) -> Parity:
    """Checks a configuration; of a step function nothing but the losses is compared.

    Args:
        zygote, spec, config, device, directory, deadline_s, memory_limit_bytes, on_attempt: See `run_parity`.
        plain: The plain run that fits; None: it is not known, as where the baseline is the user's own setting.
        time_s, cache_dir: See `run_parity`; not for a step function.
        own_shapes: The same; only where `plain` needs no knob to fit.

    Raises:
        TaskFailedError, DidNotRunError, CandidateDidNotRunError: see `run_parity`.
    """
    given: dict[str, Any] = {
        "device": device,
        "directory": directory,
        "deadline_s": deadline_s,
        "memory_limit_bytes": memory_limit_bytes,
        "on_attempt": on_attempt,
    }
    if spec.is_step:
        return step_losses.run_step_parity(zygote, spec, config, **given)
    rung = rung_of(plain)
    more: dict[str, Any] = {"time_s": time_s, "cache_dir": cache_dir, "ranks": config.world_size, "rung": rung}
    return compare.run_parity(zygote, spec, config, own_shapes=own_shapes and rung == "plain", **given, **more)


def rung_of(plain: TrainingConfig | None) -> Rung:
    """Which plain run fits at the workload's own length, by the knobs that it needed."""
    knobs = set[str]() if plain is None else plain.knobs_off_default().keys() - {"micro_batch"}
    return "plain" if not knobs else "checkpointing" if knobs == {"checkpointing"} else "none"
