"""The setting that a search starts from: as the user says it, else as it was read of the training.

In: the facts of a workload, and the options. Out: its spec, with a setting that is possible here, or with none.
"""

from __future__ import annotations

from autoplan.errors import ConfigError, UsageError
from autoplan.planner.records.baseline import YOURS
from autoplan.planner.search.options import SearchOptions
from autoplan.strategies.analysis.facts import WorkloadFacts
from autoplan.strategies.config import DEGREES, TrainingConfig
from autoplan.strategies.techniques.rules import incompatible
from autoplan.strategies.workloads.spec import WorkloadSpec


def with_own_setting(facts: WorkloadFacts, options: SearchOptions) -> WorkloadSpec:
    """The spec of a workload with the setting that its search starts from: as the user says it, else as it was read.

    Knobs that the user does not name stay as they were read, but for a micro-batch that is fixed now. What was read and
    cannot run here is left out, with a note.

    Raises:
        ConfigError: the user's is not possible here.
        UsageError: it lacks the micro-batch, and none is known.
    """
    spec, said = facts.spec, options.baseline
    if said is None and spec.own_setting is None:
        return spec
    if said == "plain":
        return spec.model_copy(update={"own_setting": None})
    read = {} if spec.own_setting is None else spec.own_setting.knobs_off_default()
    fixed = spec.options.get("fixed_micro_batch")
    knobs = read | ({} if fixed is None else {"micro_batch": fixed}) | dict(said or {})
    if "micro_batch" not in knobs:
        raise UsageError(
            f"--baseline names no micro_batch, and that of {spec.name} is not known",
            hint=f"Name it too: --baseline micro_batch={spec.global_batch} where a step is one micro-batch.",
        )
    own = TrainingConfig.model_validate(knobs)
    why = _why_not_here(own, facts)
    if why is None:
        return spec.model_copy(update={"own_setting": own})
    if said is not None:
        raise ConfigError(
            f"the baseline {own.describe()} is not possible here: {why}",
            hint="It is the setting that the training has now, in one process. --baseline plain: the plain fp32 run.",
        )
    note = f"{YOURS} ({own.describe()}) is not the baseline, since it is not possible here: {why}"
    return spec.model_copy(update={"own_setting": None, "notes": (*spec.notes, note)})


def _why_not_here(config: TrainingConfig, facts: WorkloadFacts) -> str | None:
    """Why a configuration cannot run here in one process; None: it can, if it fits."""
    offered = {choice.knob: choice for choice in facts.choices}
    for knob, value in config.knobs_off_default().items():
        if knob in DEGREES:
            return f"{knob}={value} is of several processes, and a baseline runs in one"
        choice = offered.get(knob)
        if knob == "threads" or choice is None or value in choice.values:
            continue
        if knob == "micro_batch" and facts.spec.global_batch % value:
            return f"micro_batch={value} does not divide the global batch of {facts.spec.global_batch}"
        reasons = (left_out.reason for left_out in choice.left_out if left_out.value == value)
        return f"{knob}={value}: {next(reasons, 'this workload does not offer it on this device')}"
    return incompatible(config, facts.spec.global_batch)
