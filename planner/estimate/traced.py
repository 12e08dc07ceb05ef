"""A traced workload on a cluster that is not here.

In: what a search is given, and a cluster. The workload is looked at and traced as a search does it, on tensors without
values, for the cluster's kind of device; the same space and the same cost model price it. What a search measures comes
from the catalogue of datasheets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from autoplan.errors import ConfigError, WorkloadError
from autoplan.planner.cost.analytical.cluster import Cluster, cluster_hardware, find_chip
from autoplan.planner.cost.analytical.inputs import OTHER_INPUTS, check_names, read_inputs
from autoplan.planner.cost.analytical.layout_search import LARGEST_MICRO_BATCH, Answer, Asked, in_order, powers
from autoplan.planner.cost.analytical.step_time import EstimateTable, group_bytes, node_share, parts_by_name
from autoplan.planner.cost.columns import PRECISIONS, Floats
from autoplan.planner.cost.prediction import CONTEXT_BYTES, RESERVE, Z_90, verdicts
from autoplan.planner.cost.traced.candidates import Candidates, from_configs
from autoplan.planner.cost.traced.estimator import MEMORY_PARTS, CostTable, Estimator
from autoplan.planner.search.inspection import Means, inspect
from autoplan.planner.search.options import SearchObserver, SearchOptions
from autoplan.planner.search.preload import preload_for
from autoplan.planner.search.setup import limits
from autoplan.planner.space.bounds import Bound
from autoplan.planner.space.generate import Space, generate
from autoplan.planner.trace.model_profile import ModelProfile, variants_to_trace
from autoplan.planner.trace.trace import TraceLimits, trace_profile
from autoplan.probes.profile import HardwareProfile, Host
from autoplan.probes.run import read_host_profile
from autoplan.processes import Zygote
from autoplan.strategies.analysis.facts import WorkloadFacts
from autoplan.strategies.config import DEGREES, EXCHANGE_KNOBS, PLAIN, TrainingConfig
from autoplan.strategies.knob_text import check_knob
from autoplan.strategies.techniques.degrees import legal_degrees
from autoplan.strategies.workloads.spec import WorkloadSpec

WANTED = {"precision": ("bf16", "fp16"), "compile": ("block", "model")}
"""The values that a knob takes unless it is fixed, the first that is offered: nothing is faster by the model."""

VARIED = ("checkpointing",)
"""The knobs besides degrees and the micro-batch that are varied; all others stay as in the plain run."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where layouts are priced.

    Attributes:
        estimator: Its rates, and what is known of how they turn out.
        memory_bytes: Of one rank.
        peaks: FLOP/s of one rank, by PRECISIONS; NaN: not known.
        notes: Where its figures come from, in sentences.
    """

    estimator: Estimator
    memory_bytes: float
    peaks: Floats
    notes: tuple[str, ...]


def datasheet_place(profile: ModelProfile, cluster: Cluster, host: Host, global_batch: int) -> Place:
    """A cluster by the rates of its datasheet."""
    chip = find_chip(cluster.chip)
    estimator = Estimator(profile, cluster_hardware(cluster, host), device="cuda", global_batch=global_batch)
    estimator.memory_fit.base_bytes = CONTEXT_BYTES
    note = f"rates: of the datasheet of the {chip.sheet.name}; nothing was measured there"
    return Place(
        estimator=estimator,
        memory_bytes=chip.sheet.memory_bytes.value,
        peaks=np.array([chip.peak(name) or np.nan for name in PRECISIONS]),
        notes=(note, *estimator.rates.assumed),
    )


@dataclass(frozen=True, kw_only=True)
class TracedQuestion(Asked):
    """The question for a traced workload.

    Attributes:
        facts: What the workload is and allows.
        profile: Its operations.
        host: Of this machine.
    """

    facts: WorkloadFacts
    profile: ModelProfile
    host: Host

    def place(self) -> Place:
        """The cluster by the rates of its datasheet."""
        return datasheet_place(self.profile, self.cluster, self.host, self.global_batch)

    def space(self) -> Space:
        """The legal layouts of the cluster."""
        return legal_space(self.facts, self.cluster, self.fixed)

    def solve(self) -> Answer:
        """Every legal layout of the cluster, priced.

        Raises:
            ConfigError: nothing is legal, and why.
        """
        place, space = self.place(), self.space()
        estimator, device = place.estimator, place.estimator.device
        columns = from_configs(
            space.candidates,
            self.global_batch,
            device=device,
            num_blocks=self.profile.num_blocks,
            own_step=self.profile.optimizer_form,
        )
        predicted = estimator.predict(columns)
        groups = group_bytes(columns) if device == "cuda" else np.zeros(len(columns))
        low, high = (peak + groups for peak in (predicted.peak_memory_low_bytes, predicted.peak_memory_high_bytes))
        found = verdicts(low, high, place.memory_bytes, reserve=RESERVE)
        peaks = place.peaks[columns.precision]
        table = self._table(predicted, columns, groups, peaks * columns.num_ranks)
        first = space.candidates[0]
        shown = (*WANTED, "attention", "loss", "optimizer_step", *read_fixed(self.fixed))
        return Answer(
            configs=space.candidates,
            layouts=columns,
            table=table,
            order=in_order(table, found),
            verdicts=found,
            knobs={knob: getattr(first, knob) for knob in dict.fromkeys(shown) if knob not in DEGREES},
            other={},
            optimizer=self.profile.optimizer_name,
            memory_bytes=place.memory_bytes,
            notes=(*self.profile.notes, *place.notes),
        )

    def show_model(self) -> dict[str, Any]:
        """What the trace and the look at the workload found."""
        profile, spec = self.profile, self.facts.spec
        return {
            "parameters": profile.parameters,
            "trainable": profile.trainable,
            "layers": profile.num_blocks,
            "unit": spec.unit,
            "from": f"trace ({profile.method})",
        }

    def _table(self, predicted: CostTable, columns: Candidates, groups: Floats, peak: Floats) -> EstimateTable:
        """The predictions as the answer's columns; `peak` is that of all ranks in FLOP/s."""
        parts = parts_by_name(predicted.parts_s)
        busy = predicted.step_time_s
        tokens = self.global_batch * self.seq_len
        rate = self.cluster.input_tokens_per_s or np.inf
        loading = node_share(columns, self.cluster.gpus_per_node) * tokens / rate
        step = np.maximum(busy, loading)
        return EstimateTable(
            step_time_s=step,
            bubble_s=predicted.bubble_s,
            input_s=step - busy,
            loading_s=loading,
            log_sd=np.log(predicted.step_time_high_s / predicted.step_time_s) / Z_90,
            overhead_bytes=predicted.peak_memory_bytes - predicted.live_bytes + groups,
            peak_memory_bytes=predicted.peak_memory_bytes + groups,
            model_flops=predicted.model_flops,
            hardware_flops=predicted.hardware_flops,
            mfu=predicted.model_flops / (peak * step),
            hfu=predicted.hardware_flops / (peak * step),
            **parts,
            **{f"{name}_bytes": getattr(predicted.memory, name) for name in MEMORY_PARTS},
        )


def read_fixed(fixed: Mapping[str, str]) -> dict[str, Any]:
    """The fixed knobs in their own types.

    Raises:
        ConfigError: an unknown knob, a value that it does not take, or an input that the workload says itself.
    """
    values = read_inputs(fixed).values
    check_names(values)
    for name in values:
        if name in OTHER_INPUTS or name in ("dp", "accumulation"):
            raise ConfigError(
                f"{name} is an input of the closed form, and this model is traced: the workload says it itself",
                hint="Fix knobs alone, for example dp_shard=8, micro_batch=2, parameters=bf16; or describe the model "
                "by its dimensions in a table (--rows).",
            )
    return {name: check_knob(name, value) for name, value in values.items()}


def legal_space(
    facts: WorkloadFacts,
    cluster: Cluster,
    fixed: Mapping[str, str],
    *,
    device: str = "cuda",
    known: TrainingConfig | None = None,
) -> Space:
    """The legal layouts of a workload on all GPUs of a cluster.

    Args:
        facts: Of the workload.
        cluster: Of `device`s: cuda or cpu.
        fixed: Knobs that the user fixed.
        device: What ranks run on.
        known: The knobs that are not varied are as here, where that is legal; None: as WANTED has them.

    Raises:
        ConfigError: there is none, and why.
    """
    knobs, count = read_fixed(fixed), cluster.num_gpus
    degrees, left_out = legal_degrees(facts, count, device=device, ranks_per_node=cluster.gpus_per_node)
    if count == 1:
        degrees = [{}]
    degrees = [found for found in degrees if PLAIN.model_copy(update=dict(found)).world_size == count]
    asked = {name: value for name, value in knobs.items() if name in DEGREES and name not in EXCHANGE_KNOBS}
    legal = [d for d in degrees if all(d.get(name, getattr(PLAIN, name)) == value for name, value in asked.items())]
    if not legal:
        text = " ".join(f"{name}={value}" for name, value in asked.items()) or "no fixed degrees"
        kind = "GPUs" if device == "cuda" else "ranks"
        raise ConfigError(
            f"no layout of {count} {kind} is legal for {facts.spec.name} with {text} "
            f"at a global batch of {facts.spec.global_batch}",
            hint="".join(f"{found.family}: {found.reason} ({found.by}). " for found in left_out[:3])
            + "Another --global-batch is another training, and yours to choose.",
        )
    bounds: dict[str, Bound] = {}
    for choice in facts.choices:
        if choice.knob in (*knobs, *DEGREES, *VARIED) or not choice.values:
            continue
        if choice.knob == "micro_batch":
            some = tuple(size for size in powers(LARGEST_MICRO_BATCH) if size in choice.values)
            bounds["micro_batch"] = Bound(values=some or choice.values)
            continue
        better = WANTED.get(choice.knob, ()) if known is None else (getattr(known, choice.knob),)
        wanted = (*better, getattr(PLAIN, choice.knob), *choice.values)
        knobs[choice.knob] = next(value for value in wanted if value in choice.values)
    return generate(facts.choices, global_batch=facts.spec.global_batch, fixed=knobs, bounds=bounds, degrees=legal)


def trace_for(spec: WorkloadSpec, cluster: Cluster, fixed: Mapping[str, str]) -> TracedQuestion:
    """Looks at a workload and traces it, for a cluster.

    Raises:
        WorkloadError: its functions fail, or its trace does, and why.
        ConfigError: nothing is legal on the cluster.
    """
    host = read_host_profile().host
    read_fixed(fixed)
    looked = look_and_trace(
        spec,
        cluster_hardware(cluster, host),
        ranks=cluster.num_gpus,
        wanted=lambda facts: legal_space(facts, cluster, fixed).candidates,
    )
    return TracedQuestion(cluster=cluster, fixed=dict(fixed), host=host, **looked)


def look_and_trace(
    spec: WorkloadSpec,
    hardware: HardwareProfile,
    *,
    ranks: int,
    wanted: Callable[[WorkloadFacts], Sequence[TrainingConfig]],
    device: Literal["cuda", "cpu"] = "cuda",
) -> dict[str, Any]:
    """Looks at a workload and traces it, without values and without the device.

    Args:
        spec: The workload.
        hardware: Where it is to run.
        ranks: How many there are.
        wanted: From the facts, the configurations whose variants are traced.
        device: What it is traced for.

    Returns:
        The fields of a TracedQuestion that follow: sequence length, global batch, facts, profile.

    Raises:
        WorkloadError: its functions fail, or its trace does, and why.
        ConfigError: nothing is legal.
    """
    _, host_limit = limits(read_host_profile(), "cpu", None)
    with Zygote(preload=preload_for(spec)) as zygote:
        means = Means(options=SearchOptions(spec=spec), zygote=zygote, observer=SearchObserver())
        facts = inspect(means, hardware, device, max(ranks, 2), host_limit)
        if facts.step_s is not None:
            raise WorkloadError(
                f"{facts.spec.name} is a step of which no part is known, so nothing of it can be traced",
                hint="Give its parts: model, make_batch, loss, optimizer (docs/loops.md).",
            )
        profile = trace_profile(
            facts.spec.model_copy(update={"payload": spec.payload}),
            device=device,
            zygote=zygote,
            variants=variants_to_trace(wanted(facts), has_blocks=facts.num_blocks > 0),
            limits=TraceLimits(timing_budget_s=0.0, memory_limit_bytes=host_limit),
        )
    return {
        "seq_len": facts.spec.sequence_length or profile.tokens_per_sample,
        "global_batch": facts.spec.global_batch,
        "facts": facts,
        "profile": profile,
    }
