"""What a search measured on its own device, carried to a cluster: `autoplan estimate --anchor plan.json`.

The search's model of its machine is made again from the plan: the probes' rates, and the factors by which the plan's
trials corrected them. On more devices of the same kind they hold as they are. On another chip

    t(there) = t(measured here) x t(datasheet there) / t(datasheet here)

for each kind of operation, with a wider interval. Links between nodes, and whatever was not measured, are the
catalogue's. Every part of the answer says which.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from autoplan.errors import PlanError, UsageError
from autoplan.planner.cost.analytical.cluster import Cluster, cluster_hardware, find_chip, parse_cluster
from autoplan.planner.cost.analytical.step_time import FACTORS_OF
from autoplan.planner.cost.calibrate import FACTORS, PRIOR_SD
from autoplan.planner.cost.columns import DTYPES, Floats
from autoplan.planner.cost.communication import ASSUMED_LINK_EFFICIENCY, Links, links_of
from autoplan.planner.cost.roofline import DatasheetProducts
from autoplan.planner.cost.traced.estimator import Estimator
from autoplan.planner.cost.traced.rates import MatmulFit, Rates
from autoplan.planner.estimate.traced import (
    Place,
    TracedQuestion,
    datasheet_place,
    legal_space,
    look_and_trace,
    read_fixed,
)
from autoplan.planner.plan.parts import refuse_unverified
from autoplan.planner.plan.plan import Plan
from autoplan.planner.plan.prepare import refuse_changed_code
from autoplan.planner.records.trials import Outcome, Trial
from autoplan.planner.records.trust import TRAINING_CODE, own_workload
from autoplan.planner.search.setup import MEMORY_SHARE, context_bytes
from autoplan.planner.space.generate import Space
from autoplan.planner.trace.model_profile import ModelProfile
from autoplan.probes.profile import Device, HardwareProfile
from autoplan.strategies.config import PLAIN, TrainingConfig
from autoplan.strategies.workloads.spec import WorkloadSpec

OTHER_CHIP_SD = {
    "matmul/full": 0.10,
    "matmul/half": 0.10,
    "matmul/fp8": 0.25,
    "attention": 0.15,
    "memory": 0.10,
    "fused_memory": 0.20,
    "dispatch": 0.30,
    "optimizer": 0.10,
}
"""How far off a factor may be on another chip than the one it was measured on: standard deviation of its logarithm, on
top of what the trials left open. Assumed, a half to two thirds of what it is before any trial; launches are the host's,
which is another one. The pairs of A100 and H100 of llm-foundry's table are within it (benchmarks/projection.py)."""

MORE_RANKS_SD = 0.2
"""The same of communication for each doubling of the ranks beyond those that trials ran on. Assumed."""

MORE_RANKS_ALL_SD = {"cpu": 0.12, "cuda": 0.04}
"""The same of the whole step, whose parts it moves together. cpu: set by the recorded pairs of
benchmarks/projection.py, 1 rank to 2; cuda: assumed, a third of it, since ranks share neither cores nor memory."""

MORE_CORES_SD = 0.1
"""The same of what cores compute, for each doubling of the cores. Assumed."""

BANDWIDTH_BY_CORES = 0.25
"""The bandwidth of memory grows with this power of the cores: 28.5 GB/s on one, 34.4 on two, measured (the hardware of
the first tables of benchmarks/search_tables.py). Beyond that assumed."""

LEARNED = 0.6
"""A factor was measured by the trials if they left less than this share of what was open before them."""

WAITS = 0.02
"""A loader is as fast as it can be where the step waits for it longer than this share of the time."""

COMPUTED = ("matmul/full", "matmul/half", "matmul/fp8", "attention", "memory", "fused_memory", "optimizer")
"""The factors that another chip changes in proportion to its datasheet."""

_HERE = re.compile(r"(?:(\d+)x)?(?:(\d+)x)?here(?::(\d+))?")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A cluster beside the anchor's device.

    Attributes:
        cluster: Its size and links.
        here: Its devices are of the anchor's own kind.
        cores: Of a host of CPUs; 0: GPUs.
        assumed: What was assumed of it, in sentences.
    """

    cluster: Cluster
    here: bool
    cores: int
    assumed: tuple[str, ...]


def read_anchor(source: str | Path | Plan) -> Plan:
    """The plan whose measurements are carried.

    Raises:
        PlanError: it cannot be read, is unverified, was edited where it was measured, or has no trial with a step time.
    """
    plan = source if isinstance(source, Plan) else Plan.load(source)
    refuse_unverified(plan)
    if plan.edited:
        raise PlanError(
            f"the measured part of the anchor was edited: {', '.join(plan.edited)}",
            hint="Run the same autoplan search again: it writes the plan without repeating a trial.",
        )
    if not Measured.of(plan).timed:
        raise PlanError(
            "the anchor has no trial with a step time, so nothing was measured that could be carried",
            hint="Take the plan.json that autoplan search wrote, not an export or a plan made by hand.",
        )
    return plan


def anchored_spec(
    plan: Plan, given: WorkloadSpec | None, *, code: str | None, global_batch: int | None
) -> WorkloadSpec:
    """The workload to trace: the plan's own, or that given where it is the same training.

    Args:
        plan: The anchor.
        given: Of the model that the user gave as an object; None: none.
        code: What the user named in place of the plan's file; None: nothing.
        global_batch: Of the cluster's steps; None: the plan's.

    Raises:
        PlanError: the plan is of objects, which no plan carries, or of code that nobody named or that changed since.
        UsageError: what was given is another training.
    """
    if given is not None:
        spec = given
        _refuse_other_training(plan, spec)
    elif plan.workload.kind == "object":
        raise PlanError(
            f"the anchor is of {plan.workload.name}, an object of a program, which a plan does not carry",
            hint="Give it: autoplan.estimate(model, cluster, anchor=plan).",
        )
    else:
        spec = own_workload(plan.workload, plan.study, code)
        refuse_changed_code(spec, changed_ok=False, hint="Search again: autoplan search.")
    if global_batch is not None and global_batch != spec.global_batch:
        spec = spec.model_copy(update={"global_batch": global_batch})
    return spec


def _refuse_other_training(plan: Plan, spec: WorkloadSpec) -> None:
    """Raises UsageError where a spec that the user gave is of another training than the anchor."""
    hint = "Take a plan of this training, or leave out --model for the anchor's own."
    for part in TRAINING_CODE:
        mine, other = spec.digests.get(part), plan.workload.digests.get(part)
        if mine is not None and other is not None and mine != other:
            raise UsageError(
                f"the anchor is of another workload: {plan.workload.name}, and {spec.name} has another {part}",
                hint=hint,
            )
    if not plan.workload.digests and spec.name != plan.workload.name:
        raise UsageError(f"the anchor is of another workload: {plan.workload.name}, not {spec.name}", hint=hint)


def read_target(plan: Plan, given: str | Cluster, links: Mapping[str, float | None]) -> Target:
    """The cluster as it was given; `here` in place of a chip is the anchor's own device: 4xhere, 2x8xhere.

    On a CPU the ranks of a host share its cores, as in a search: 4xhere are four ranks of this host, 4xhere:16 four
    ranks of one like it with 16 cores.

    Raises:
        UsageError: the cluster cannot be.
    """
    device = plan.hardware.device(plan.device)
    assumed: tuple[str, ...] = ()
    document = _read_cluster(Path(given)) if isinstance(given, str) and given.endswith(".json") else None
    chip = given if document is None else document.get("chip")
    found = _HERE.fullmatch(chip.replace(" ", "").lower()) if isinstance(chip, str) else None
    if found is None:
        cluster, assumed = parse_cluster(given, **links) if isinstance(given, str) else (given, ())
        here = device.datasheet_name is not None and find_chip(cluster.chip).sheet.name == device.datasheet_name
        return Target(cluster=cluster, here=here, cores=0, assumed=assumed)
    cores = int(found[3] or 0)
    if cores and plan.device == "cuda":
        raise UsageError(f"{given!r} gives cores, and the anchor ran on GPUs", hint="Write 8xhere, or 2x8xhere.")
    if document is not None:
        counts = (document.get("nodes", 1), document.get("gpus_per_node", 1))
        links = {name: document.get(name) if value is None else value for name, value in links.items()}
    else:
        counts = (int(found[1]), int(found[2])) if found[2] else (1, int(found[1] or 1))
    if not all(isinstance(count, int) and count >= 1 for count in counts):
        raise UsageError(f"the cluster {given!r} has no rank", hint="For example: --cluster 4xhere.")
    if plan.device == "cuda" and device.datasheet_name is not None:
        cluster, assumed = parse_cluster(f"{counts[0]}x{counts[1]}x{device.datasheet_name}", **links)
        return Target(cluster=cluster, here=True, cores=0, assumed=assumed)
    cluster = Cluster(nodes=counts[0], gpus_per_node=counts[1], chip=device.name, **links)
    if cluster.nodes > 1 and cluster.inter_gbits_per_s_per_gpu is None:
        raise UsageError(
            f"{cluster.nodes} hosts like this one, and no link between them is given",
            hint="Give --inter-gbits-per-gpu: Gbit/s between hosts, per rank.",
        )
    if plan.device == "cpu":
        cores = cores or int(device.cores or plan.hardware.host.cores_usable)
    return Target(cluster=cluster, here=True, cores=cores, assumed=assumed)


def _read_cluster(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        document = None  # parse_cluster says what is wrong with it
    return document if isinstance(document, dict) else {}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured on one device: the probes' readings, and trials at a global batch.

    Attributes:
        hardware: As the probes measured it.
        kind: cuda or cpu: of its devices.
        trials: All of them; those that ran out of memory or were stopped early tell something too.
        global_batch: Samples per optimizer step.
    """

    hardware: HardwareProfile
    kind: str
    trials: Sequence[Trial]
    global_batch: int

    @classmethod
    def of(cls, plan: Plan) -> Measured:
        """What a search measured, by its plan."""
        return cls(
            hardware=plan.hardware, kind=plan.device, trials=plan.evidence, global_batch=plan.workload.global_batch
        )

    @property
    def device(self) -> Device:
        """The first of them."""
        return self.hardware.device(self.kind)

    @property
    def timed(self) -> list[Trial]:
        """The trials that say how long a step takes."""
        return [trial for trial in self.trials if trial.outcome is Outcome.OK and trial.step_time_s is not None]

    @property
    def ranks(self) -> int:
        """The most ranks that a timed trial had; 1 without trials."""
        return max((trial.config.world_size for trial in self.timed), default=1)

    def estimator(self, profile: ModelProfile, global_batch: int | None = None) -> Estimator:
        """The model of the device before any trial."""
        return Estimator(profile, self.hardware, device=self.kind, global_batch=global_batch or self.global_batch)


@dataclass(frozen=True, kw_only=True)
class Learned:
    """The anchor's machine as its search knew it at its end.

    Attributes:
        measured: What it is known by.
        estimator: Of its machine, corrected by its trials.
        profile: The operations that were traced for its device.
    """

    measured: Measured
    estimator: Estimator
    profile: ModelProfile

    @classmethod
    def of(cls, measured: Measured, profile: ModelProfile) -> Learned:
        """The model of the machine, told of all trials again.

        Of a profile for another kind of device nothing can be learnt by trials, and nothing is.
        """
        estimator = measured.estimator(profile)
        if profile.device == measured.kind:
            for trial in measured.trials:
                estimator.observe(trial)
        return cls(measured=measured, estimator=estimator, profile=profile)

    @cached_property
    def by_trials(self) -> frozenset[str]:
        """The factors that the trials measured."""
        fit = self.estimator.time_fit
        left = np.sqrt(np.diag(fit.covariance)) / fit.prior_sd
        return frozenset(name for name, share in zip(FACTORS, left, strict=True) if share < LEARNED)

    def parts(self, target: Estimator) -> tuple[Floats, Floats]:
        """Seconds by factor of all timed configurations: as they were measured, and by another estimator."""
        configs = [trial.config for trial in self.measured.timed]
        mine = self.estimator.table(configs).parts_s * np.exp(self.estimator.time_fit.theta)[:, None]
        return mine.sum(axis=1), target.table(configs).parts_s.sum(axis=1)


def carry(learned: Learned, target: Target, profile: ModelProfile, global_batch: int) -> Place:
    """The cluster with what was measured on the anchor's device.

    Args:
        learned: The anchor.
        target: The cluster.
        profile: The operations, traced for the cluster's kind of device.
        global_batch: Samples per optimizer step there.
    """
    if target.here:
        return _carry_to_same(learned, target, profile, global_batch)
    return _carry_to_other(learned, target, profile, global_batch)


def _carry_to_same(learned: Learned, target: Target, profile: ModelProfile, global_batch: int) -> Place:
    measured, cluster, device = learned.measured, target.cluster, learned.measured.device
    estimator = measured.estimator(profile, global_batch)
    estimator.time_fit = copy.deepcopy(learned.estimator.time_fit)
    estimator.memory_fit = copy.deepcopy(learned.estimator.memory_fit)
    wider = np.zeros(len(FACTORS))
    notes = [f"rates: measured on the {device.name} of the anchor, by probes and {len(measured.timed)} trials"]
    rates, share = estimator.rates, 1.0
    if measured.kind == "cpu":
        host = measured.hardware.host
        cores = int(device.cores or host.cores_usable)
        if target.cores != cores:
            rates = with_cores(rates, target.cores)
            wider[[FACTORS.index(name) for name in COMPUTED]] += MORE_CORES_SD * abs(math.log2(target.cores / cores))
            notes.append(f"{target.cores} cores in place of {cores}: taken in proportion where no probe ran on as many")
        rates.ranks_per_host = float(cluster.gpus_per_node)
        memory = (host.memory_total_bytes.value or 0.0) * MEMORY_SHARE / cluster.gpus_per_node
        peaks = [device.peak_flops_per_s.get(dtype) for dtype in DTYPES]
        share = target.cores / cores / cluster.gpus_per_node
    else:
        estimator.memory_fit.base_bytes += context_bytes(measured.hardware)
        memory = float(device.memory_total_bytes.value or 0.0)
        sheet = device.datasheet_peak_flops_per_s
        peaks = [sheet.get(dtype) or device.peak_flops_per_s.get(dtype) for dtype in DTYPES]
    doublings = max(math.log2(cluster.num_gpus / measured.ranks), 0.0)
    communication = FACTORS.index("communication")
    wider[communication] += MORE_RANKS_SD * doublings
    if cluster.nodes > 1:  # what was learnt of the links inside a node says nothing of those between nodes
        estimator.time_fit.theta[communication] = 0.0
        wider[communication] = PRIOR_SD["communication"]
    estimator.time_fit.covariance += np.diag(np.square(wider)) + (MORE_RANKS_ALL_SD[measured.kind] * doublings) ** 2
    estimator.rates = rates
    estimator.machine = replace(estimator.machine, rates=rates, links=_links(learned, target))
    return Place(
        estimator=estimator,
        memory_bytes=memory,
        peaks=np.array([peak.value * share if peak and peak.value else np.nan for peak in peaks]),
        notes=(*notes, *estimator.machine.links.assumed, *rates.assumed),
    )


def _carry_to_other(learned: Learned, target: Target, profile: ModelProfile, global_batch: int) -> Place:
    measured, chip = learned.measured, find_chip(target.cluster.chip)
    host = measured.hardware.host
    place = datasheet_place(profile, target.cluster, host, global_batch)
    estimator = place.estimator
    notes = [f"rates: of the datasheet of the {chip.sheet.name}"]
    name = measured.device.datasheet_name
    if measured.kind == "cuda" and name is not None:
        same = Cluster(nodes=1, gpus_per_node=len(measured.hardware.devices), chip=name)
        own = datasheet_place(learned.profile, same, host, measured.global_batch).estimator
        seconds, by_sheet = learned.parts(own)
        fit, before = estimator.time_fit, learned.estimator.time_fit
        for factor in COMPUTED:
            i = FACTORS.index(factor)
            if seconds[i] > 0 and by_sheet[i] > 0:
                fit.theta[i] = math.log(seconds[i] / by_sheet[i])
                fit.covariance[i, i] = before.covariance[i, i] + OTHER_CHIP_SD[factor] ** 2
        launch = FACTORS.index("dispatch")
        slower = learned.estimator.rates.dispatch_s / estimator.rates.dispatch_s
        fit.theta[launch] = math.log(slower) + before.theta[launch]
        fit.covariance[launch, launch] = before.covariance[launch, launch] + OTHER_CHIP_SD["dispatch"] ** 2
        fit.surprises = list(before.surprises)
        estimator.memory_fit.slack = learned.estimator.memory_fit.slack
        notes = [
            f"rates: measured on the {measured.device.name} of the anchor, times the ratio of its datasheet to that of "
            f"the {chip.sheet.name}, for each kind of operation"
        ]
    elif measured.kind == "cuda":
        notes.append(f"the {measured.device.name} of the anchor is in no catalogue, so its rates have no ratio")
    else:
        notes.append("the anchor ran on a CPU: of what it measured only the loader holds for a GPU")
    return replace(place, notes=(*notes, *estimator.rates.assumed))


def with_cores(rates: Rates, cores: int) -> Rates:
    """The rates of a CPU with another number of cores: by the measured speed of threads, beyond it in proportion.

    Bandwidth of memory grows as BANDWIDTH_BY_CORES has it.
    """
    known = sorted(rates.thread_speed) or [rates.threads or 1]
    speeds = [rates.thread_speed.get(count, float(count)) for count in known]

    def speed(count: int) -> float:
        return float(np.interp(count, known, speeds)) * max(count / known[-1], 1.0)

    faster = speed(cores) / speed(rates.threads or known[-1])
    matmul: dict[str, MatmulFit | DatasheetProducts] = {}
    for dtype, fit in rates.matmul.items():
        assert isinstance(fit, MatmulFit), "a CPU has no datasheet"
        matmul[dtype] = replace(fit, coefficients=fit.coefficients / np.array([faster] * 4 + [1.0]))
    return replace(
        rates,
        matmul=matmul,
        attention_flops_per_s={dtype: faster * rate for dtype, rate in rates.attention_flops_per_s.items()},
        memory_bytes_per_s=rates.memory_bytes_per_s * (cores / (rates.threads or known[-1])) ** BANDWIDTH_BY_CORES,
        first_touch_s_per_byte=rates.first_touch_s_per_byte / faster,
        thread_speed={count: speed(count) for count in {*known, cores}},
        threads=cores,
    )


def _links(learned: Learned, target: Target) -> Links:
    """Links inside a node as they were measured; between nodes, and if none was measured, as the cluster has them."""
    measured, cluster = learned.measured, target.cluster
    probed = any(one.busbw_bytes_per_s.value for one in measured.hardware.collectives)
    found = links_of(measured.hardware, measured.kind)
    if measured.kind == "cuda" and not probed:
        found = links_of(cluster_hardware(cluster, measured.hardware.host), "cuda")
    elif cluster.inter_gbits_per_s_per_gpu is not None:
        between = ASSUMED_LINK_EFFICIENCY * 1e9 / 8 * cluster.inter_gbits_per_s_per_gpu
        found = replace(found, inter_bytes_per_s=between)
    if cluster.intra_gbytes_per_s is not None and not probed:
        found = replace(found, intra_bytes_per_s=ASSUMED_LINK_EFFICIENCY * 1e9 * cluster.intra_gbytes_per_s)
    return replace(found, ranks_per_node=cluster.gpus_per_node)


@dataclass(frozen=True, kw_only=True)
class AnchoredQuestion(TracedQuestion):
    """The question for a workload that was searched somewhere.

    Attributes:
        plan: The anchor.
        learned: Its machine.
        target: The cluster; `cluster` is its own, or part of it.
    """

    plan: Plan
    learned: Learned
    target: Target

    @property
    def device(self) -> Any:
        """cuda or cpu: of the cluster."""
        return device_of(self.plan, self.target)

    def place(self) -> Place:
        """The cluster with what was measured on the anchor's device."""
        return carry(self.learned, replace(self.target, cluster=self.cluster), self.profile, self.global_batch)

    def space(self) -> Space:
        """The legal layouts; knobs that are not varied are the plan's."""
        known = known_knobs(self.plan, self.target)
        return legal_space(self.facts, self.cluster, self.fixed, device=self.device, known=known)

    def describe(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """The anchor, and where each part of the best layout comes from.

        Args:
            answer: The document of the estimate.
        """
        measured = self.learned.measured
        return {
            "study": self.plan.study,
            "device": measured.device.name,
            "trials": len(measured.timed),
            "ranks": measured.ranks,
            "same_kind": self.target.here,
            "sources": self._sources(answer["best"][0]),
        }

    def _sources(self, best: Mapping[str, Any]) -> dict[str, str]:
        """Where each part comes from."""
        learned, target = self.learned, self.target
        measured = learned.measured
        count, name = len(measured.timed), measured.device.name
        out = {}
        config = PLAIN.model_copy(update=dict(best["layout"]))
        seconds = dict(zip(FACTORS, self.place().estimator.table([config]).parts_s[:, 0], strict=True))
        for part, factors in FACTORS_OF.items():
            if part == "communication" or not any(seconds[factor] for factor in factors):
                continue
            factor = max(factors, key=lambda one: seconds[one])
            by_trials = factor in learned.by_trials
            if target.here:
                probed = "assumed" if factor == "fused_memory" else "measured here, by probes"
                out[part] = f"measured here, by {count} trials" if by_trials else probed
            elif measured.kind == "cuda" and measured.device.datasheet_name is not None:
                if factor == "dispatch":
                    out[part] = f"measured on the host of the {name}"
                else:
                    by = "trials" if by_trials else "probes"
                    out[part] = f"measured on the {name} by {by}, times the ratio of datasheets"
            else:
                out[part] = "assumed" if factor == "dispatch" else "datasheet"
        out["communication"] = self._source_of_links()
        rate = self.cluster.input_tokens_per_s
        out["input"] = "not known" if rate is None else "given, or measured here by the loader"
        out["peak_memory"] = "the trace" + (f", corrected by {count} trials here" if target.here else "")
        return out

    def _source_of_links(self) -> str:
        if self.cluster.num_gpus == 1:
            return "none: one rank"
        if not self.target.here:
            return "datasheet"
        readings = [one.group_size for one in self.learned.measured.hardware.collectives]
        inside = f"measured here over {max(readings)} ranks" if readings else "assumed"
        if self.device == "cuda" and not readings:
            inside = "datasheet"
        if "communication" in self.learned.by_trials and self.cluster.nodes == 1:
            inside += f", corrected by trials on {self.learned.measured.ranks} ranks"
        return inside if self.cluster.nodes == 1 else f"inside a node {inside}; between nodes as given or datasheet"


def device_of(plan: Plan, target: Target) -> Any:
    """cuda or cpu: what the ranks of a cluster run on."""
    return plan.device if target.here else "cuda"


def known_knobs(plan: Plan, target: Target) -> TrainingConfig | None:
    """The plan's knobs, which were the best where they were measured; None: they were on another kind of device."""
    if device_of(plan, target) != plan.device:
        return None
    return plan.config.model_copy(update={"threads": None})  # each rank has its share of the cores


def anchored_question(
    plan: Plan, spec: WorkloadSpec, target: Target, fixed: Mapping[str, str]
) -> tuple[AnchoredQuestion, tuple[str, ...]]:
    """Traces a workload for a cluster beside its anchor.

    Returns:
        The question, and what was assumed, in sentences.

    Raises:
        UsageError: sequences of another length than the anchor's.
        WorkloadError: the workload fails, or its trace does.
        ConfigError: nothing is legal on the cluster.
    """
    length = plan.workload.sequence_length
    if None not in (length, spec.sequence_length) and spec.sequence_length != length:
        raise UsageError(
            f"the anchor has samples of {length} tokens, not {spec.sequence_length}: its trials say nothing of others",
            hint=f"Leave out --seq-len, or search with --seq-len {spec.sequence_length}.",
        )
    read_fixed(fixed)
    device, cluster = device_of(plan, target), target.cluster
    hardware = plan.hardware if target.here else cluster_hardware(cluster, plan.hardware.host)
    measured = Measured.of(plan)
    searched = [trial.config for trial in measured.timed]
    known = known_knobs(plan, target)
    looked = look_and_trace(
        spec,
        hardware,
        ranks=cluster.num_gpus,
        device=device,
        wanted=lambda facts: [
            *legal_space(facts, cluster, fixed, device=device, known=known).candidates,
            *(searched if device == plan.device else ()),
        ],
    )
    cluster, assumed = with_loader(plan, cluster, looked["seq_len"])
    question = AnchoredQuestion(
        cluster=cluster,
        fixed=dict(fixed),
        host=plan.hardware.host,
        plan=plan,
        learned=Learned.of(measured, looked["profile"]),
        target=replace(target, cluster=cluster),
        **looked,
    )
    return question, (*target.assumed, *assumed)


def with_loader(plan: Plan, cluster: Cluster, seq_len: int) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster with the loader's rate where the search saw its limit, and what it saw, in sentences.

    Each data-parallel rank has a loader of its own, so that a node has as many as ranks.
    """
    loading = plan.loading
    if loading is None or loading.setting is None or loading.samples_per_s is None:
        return cluster, ()
    each = loading.samples_per_s / plan.config.dp
    said = f"{each:.4g} samples/s a rank with {loading.setting.describe()}"
    if cluster.input_tokens_per_s is not None:
        return cluster, (f"input: as given; the anchor's loader delivered {said}",)
    if (loading.waiting_share or 0.0) <= WAITS:
        return cluster, (f"input: the anchor's loader was never the limit; it delivered {said}, and may do more",)
    rate = each * seq_len * cluster.gpus_per_node
    cluster = cluster.model_copy(update={"input_tokens_per_s": rate})
    return cluster, (f"input: the anchor's loader at its limit, {said}, on each rank; needs as many cores a rank",)


def search_flags(layout: Mapping[str, Any], ranks: int, device: str) -> str:
    """The options with which `autoplan search` takes a layout."""
    always = ("micro_batch", "dp_replicate", "dp_shard", "tp", "pp", "checkpointing")
    shown = {k: v for k, v in layout.items() if k in always or v != getattr(PLAIN, k)}
    words = [f"--fix {knob}={value}" for knob, value in shown.items() if value is not None]
    return " ".join([*([f"--nproc {ranks}"] if device == "cpu" or ranks > 1 else []), *words])
