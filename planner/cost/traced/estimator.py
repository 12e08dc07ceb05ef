"""The estimator: prices configurations of one workload on one machine, and learns from finished trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autoplan.errors import WorkloadError
from autoplan.planner.cost.calibrate import FACTORS, NOISE_SD, Z_90, Calibration, MemoryFit, TimeFit
from autoplan.planner.cost.candidates import Candidates, Floats, from_configs
from autoplan.planner.cost.communication import exchange, links_of
from autoplan.planner.cost.pipeline import pass_seconds
from autoplan.planner.cost.traced.compute import (
    CHECKPOINT_DISPATCH_S,
    FAULTS_APART,
    GIVEN_BACK,
    PARTS,
    SegmentTimes,
    discard_outlier_timings,
    executed_flops,
    first_touches,
    optimizer_seconds,
    segment_times,
)
from autoplan.planner.cost.traced.memory import MemoryParts, traced_memory
from autoplan.planner.cost.traced.rates import from_device
from autoplan.planner.records import Outcome, Prediction, Trial
from autoplan.planner.trace.model_profile import LinearFit, ModelProfile, VariantKey, VariantProfile
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.config import TrainingConfig

# A CPU rank forked from the zygote: the interpreter, torch and the model library, resident. On CUDA the driver's
# figure holds context and libraries of the process (some 0.5 GB on recent drivers).
BASE_BYTES = {"cpu": 3.3e8, "cuda": 6.0e8}
# What is resident (CPU: freed pieces, packed weights) or reserved (CUDA) beyond live tensors, as a share of them;
# measured on four small models on a CPU: 0.2 to 0.35
SLACK = {"cpu": 0.22, "cuda": 0.06}
# What is resident besides where the C library keeps freed memory: pieces that no later allocation fits (7.6 GB in place
# of 6.1 for a GPT-2 of 124M, measured)
KEPT_SHARE = 0.25
# What a backward hides of an exchange that could overlap with it: torch's own DDP paper (Li et al. 2020, section 5.2)
# and FSDP's report near-complete overlap where the backward is longer; gloo shares the cores that compute.
OVERLAP = {"cpu": 0.3, "cuda": 0.9}
_BOUNDS = ("compute", "memory_bandwidth", "launch", "communication", "bubble")


@dataclass(frozen=True, kw_only=True, slots=True)
class CostTable:
    """Predictions as columns. `parts_s` has a row per calibration factor, uncalibrated.

    `input_s` is no part of the step: what one process takes to make the step's batch of one data-parallel rank, zero
    where make_batch was not timed.
    """

    step_time_s: Floats
    step_time_low_s: Floats
    step_time_high_s: Floats
    peak_memory_bytes: Floats
    peak_memory_low_bytes: Floats
    peak_memory_high_bytes: Floats
    live_bytes: Floats
    model_flops: Floats
    hardware_flops: Floats
    parts_s: Floats
    bubble_s: Floats
    input_s: Floats
    memory: MemoryParts


class Estimator:
    """Memory and time of configurations before they run.

    Args:
        profile: The traced model.
        hardware: The probed machine.
        device: cpu or cuda.
        global_batch: Samples per optimizer step.
        memory_limit_bytes: What a trial may take; None: everything fits.
        calibration: What earlier trials on the same device taught.
    """

    def __init__(
        self,
        profile: ModelProfile,
        hardware: HardwareProfile,
        *,
        device: str,
        global_batch: int,
        memory_limit_bytes: int | None,
        calibration: Calibration | None = None,
    ) -> None:
        self.device = device
        self.global_batch = global_batch
        self.memory_limit_bytes = memory_limit_bytes
        self.rates = from_device(hardware.device(device))
        self.profile = discard_outlier_timings(profile, self.rates)
        self.links = links_of(hardware, device)
        self.time_fit = TimeFit()
        self.memory_fit = MemoryFit(BASE_BYTES[device], SLACK[device])
        self.trials_seen = 0
        if calibration is not None:
            self.time_fit.theta = np.array([calibration.factors.get(name, 0.0) for name in FACTORS])
            self.time_fit.covariance = np.array(calibration.covariance)
            self.memory_fit = MemoryFit(calibration.memory_base_bytes, calibration.memory_slack)

    # Prices.

    def estimate(self, configs: Sequence[TrainingConfig]) -> list[Prediction]:
        """Predictions, in the order of the configurations."""
        if not configs:
            return []
        table = self.table(configs)
        return [self._prediction(table, i) for i in range(len(configs))]

    def table(self, configs: Sequence[TrainingConfig]) -> CostTable:
        """Predictions as columns, in the order of the configurations."""
        blocks = self.profile.num_blocks
        return self.price(from_configs(configs, self.global_batch, device=self.device, num_blocks=blocks))

    def price(self, candidates: Candidates) -> CostTable:
        """Prices candidates, variant by variant."""
        size = len(candidates)
        parts = np.zeros((len(FACTORS), size))
        bubble, flops = np.zeros(size), np.zeros(size)
        memory = np.zeros((5, size))
        pairs = candidates.variant * len(candidates.variants) + candidates.full_variant
        for pair in np.unique(pairs):
            here = np.flatnonzero(pairs == pair)
            some = candidates.take(here)
            plain, full = (
                self.variant(candidates.variants[int(codes[here[0]])])
                for codes in (candidates.variant, candidates.full_variant)
            )
            parts[:, here], bubble[here], flops[here] = self._time(plain, full, some)
            held = traced_memory(plain, full, self.profile, some)
            fresh = (1 - some.checkpointed) * first_touches(plain, self.profile.num_blocks, some)
            fresh = fresh + some.checkpointed * first_touches(full, self.profile.num_blocks, some)
            fresh = fresh + GIVEN_BACK * self._unchecked_bytes(plain, some)
            fresh = fresh * some.accumulation / some.tp / some.pp
            faulting = np.where(some.keeps_memory, 0.0, FAULTS_APART * fresh)
            parts[FACTORS.index("first_touch"), here] = faulting * self.rates.first_touch_s_per_byte
            for row, name in enumerate(("parameters", "optimizer", "gradients", "activations", "gathered")):
                memory[row, here] = getattr(held, name)
        step, sd = self.time_fit.predict(parts)
        scale = step / np.maximum(parts.sum(axis=0), 1e-30)
        bubble = bubble * scale
        step = step + bubble
        kept = MemoryParts(
            parameters=memory[0], optimizer=memory[1], gradients=memory[2], activations=memory[3], gathered=memory[4]
        )
        peak = self.memory_fit.predict(kept.live * np.where(candidates.keeps_memory, 1 + KEPT_SHARE, 1.0))
        spread = np.exp(Z_90 * self.memory_fit.sd)
        return CostTable(
            step_time_s=step,
            step_time_low_s=step * np.exp(-Z_90 * sd),
            step_time_high_s=step * np.exp(Z_90 * sd),
            peak_memory_bytes=peak,
            peak_memory_low_bytes=peak / spread,
            peak_memory_high_bytes=peak * spread,
            live_bytes=kept.live,
            model_flops=np.full(size, self._model_flops()),
            hardware_flops=flops,
            parts_s=parts,
            bubble_s=bubble,
            input_s=(self.profile.input_s_per_sample or 0.0)
            * self.global_batch
            / (candidates.dp_replicate * candidates.dp_shard),
            memory=kept,
        )

    def variant(self, key: VariantKey) -> VariantProfile:
        """The traced variant, or what stands in for a compiled one that was not traced.

        A compiled block keeps for its backward what the partitioner finds dear to recompute: between what the
        selective policy keeps and all.

        Raises:
            WorkloadError: this variant was not offered when the workload was traced.
        """
        found = self.profile.variants.get(key.text())
        if found is None and key.compiled:
            eager = self.variant(key.model_copy(update={"compiled": False}))
            if key.checkpointing != "none" or self.profile.num_blocks == 0:
                return eager
            selective = self.variant(key.model_copy(update={"compiled": False, "checkpointing": "selective"}))
            return _between(eager, selective, 0.7)
        if found is None:
            raise WorkloadError(
                f"{key.text()} was not traced for {self.profile.identity}",
                hint=f"Traced were: {', '.join(self.profile.variants)}.",
            )
        return found

    def _time(self, plain: VariantProfile, full: VariantProfile, c: Candidates) -> tuple[Floats, Floats, Floats]:
        """Uncalibrated seconds per factor (bubble left out), the bubble, and executed FLOPs, for one variant."""
        times = segment_times(plain, self.profile, self.rates, c)
        flops = executed_flops(plain, self.profile.num_blocks, c.micro_batch)
        if plain is not full:
            other = segment_times(full, self.profile, self.rates, c)
            share = c.checkpointed
            times = SegmentTimes(
                block=(1 - share) * times.block + share * other.block,
                rest=(1 - share) * times.rest + share * other.rest,
                block_forward=(1 - share) * times.block_forward + share * other.block_forward,
                rest_forward=(1 - share) * times.rest_forward + share * other.rest_forward,
            )
            full_flops = executed_flops(full, self.profile.num_blocks, c.micro_batch)
            flops = (1 - share) * flops + share * full_flops
            times.block[-1] += share * CHECKPOINT_DISPATCH_S
        blocks = np.ceil(self.profile.num_blocks / c.pp)
        stage = times.block * blocks + times.rest  # the fullest stage: its blocks and the head
        if self.device == "cuda":
            work = stage[:-1].sum(axis=0)
            stage[-1] = np.maximum(stage[-1] - work, 0.0)  # launches hide behind the GPU's work
        every = times.block.sum(axis=0) * self.profile.num_blocks + times.rest.sum(axis=0)
        boundary = self.profile.boundary_bytes.fixed + self.profile.boundary_bytes.per_sample * c.micro_batch
        half = np.array([c.dtypes[int(code)] in ("bfloat16", "float16", "float8") for code in c.matmul_dtype])
        moved = exchange(
            c,
            self.links,
            parameters=np.full(len(c), self.profile.parameters) / (c.tp * c.pp),
            boundary_bytes=np.asarray(boundary),
            num_blocks=self.profile.num_blocks,
            block_all_reduces=4.0 + 2.0 * c.checkpointed,
            # FSDP2 gathers the blocks in 16 bits under autocast on CUDA (strategies/techniques/data_parallel.py)
            gather_bytes=np.where(half & (self.device == "cuda"), 2.0, 4.0),
            gradient_bytes=np.full(len(c), 4.0),
            reduce_every_micro_step=c.scatters_each,
            replicas_once=True,  # strategies/techniques/data_parallel.py, fsdp_gradient_sync
        )
        one = stage.sum(axis=0) + moved.tensor_s + moved.send_s
        micro = c.accumulation / c.passes
        total = c.passes * pass_seconds(c, one, np.maximum(every + c.pp * moved.send_s, one), micro)
        bubble = np.maximum(total - c.accumulation * one, 0.0)
        hidden = OVERLAP[self.device] * one
        gather = np.maximum(moved.gather_s - hidden, 0.0) * c.accumulation
        reducing = np.where(c.scatters_each, c.accumulation, 1.0)  # micro-steps whose backward hides some of it
        gradient = np.maximum(moved.gradient_s - 0.6 * hidden * reducing, 0.1 * moved.gradient_s)
        communication = (moved.tensor_s + moved.send_s) * c.accumulation + gather + gradient + moved.after_s
        shards = np.where(c.sharding > 0, c.dp_shard, 1.0)
        optimizer = optimizer_seconds(self.profile, self.rates, c, 1 / (c.tp * c.pp * shards))
        rows = {
            "matmul/full": np.where(half, 0.0, stage[PARTS.index("matmul")]) * c.accumulation,
            "matmul/half": np.where(half, stage[PARTS.index("matmul")], 0.0) * c.accumulation,
            "attention": stage[PARTS.index("attention")] * c.accumulation,
            "memory": stage[PARTS.index("memory")] * c.accumulation + self._adding_gradients_s(c),
            "fused_memory": stage[PARTS.index("fused_memory")] * c.accumulation,
            "dispatch": stage[PARTS.index("dispatch")] * c.accumulation,
            "first_touch": np.zeros(len(c)),
            "optimizer": optimizer,
            "communication": communication,
        }
        return np.stack([rows[name] for name in FACTORS]), bubble, flops * c.accumulation * c.dp_replicate * c.dp_shard

    def _unchecked_bytes(self, plain: VariantProfile, c: Candidates) -> Floats:
        """Activations of a micro-step that keeps all: with checkpointing the same memory comes and goes, by blocks."""
        key = plain.key.model_copy(update={"checkpointing": "none"})
        whole = self.variant(key) if plain.key.checkpointing != "none" else plain
        kept = whole.block_saved_bytes, whole.rest_saved_bytes
        block, rest = (law.fixed + law.per_sample * c.micro_batch for law in kept)
        return np.asarray(self.profile.num_blocks * block + rest)

    def _adding_gradients_s(self, c: Candidates) -> Floats:
        """Seconds per step of adding the later micro-steps' gradients to the first's: two read, one written."""
        moved = 12.0 * self.profile.trainable / (c.tp * c.pp) * np.maximum(c.accumulation - 1, 0.0)
        return np.asarray(moved / self.rates.memory_bytes_per_s)

    def _model_flops(self) -> float:
        """FLOPs of a step without recomputation, of the plainest variant."""
        keys = [VariantKey(precision=p) for p in ("fp32", "half")]
        variant = next((self.profile.variants[k.text()] for k in keys if k.text() in self.profile.variants), None)
        if variant is None:
            return 0.0
        one = executed_flops(variant, self.profile.num_blocks, np.array([1.0]))[0]
        return float(one * self.global_batch)

    # Predictions.

    def _prediction(self, table: CostTable, i: int) -> Prediction:
        scaled = table.parts_s[:, i] * np.exp(self.time_fit.theta)
        shown = {name: float(value) for name, value in zip(FACTORS, scaled, strict=True) if value > 0}
        if table.bubble_s[i] > 0:
            shown["bubble"] = float(table.bubble_s[i])
        step_s, input_s = float(table.step_time_s[i]), float(table.input_s[i])
        bound = "input" if input_s > step_s else binding(shown)
        if input_s > 0:
            shown["input"] = input_s
        memory = {
            name: float(getattr(table.memory, name)[i])
            for name in ("parameters", "optimizer", "gradients", "activations", "gathered")
        }
        memory["process"] = float(table.peak_memory_bytes[i] - table.live_bytes[i])
        return Prediction(
            step_time_s=step_s,
            step_time_low_s=float(table.step_time_low_s[i]),
            step_time_high_s=float(table.step_time_high_s[i]),
            peak_memory_bytes=float(table.peak_memory_bytes[i]),
            peak_memory_low_bytes=float(table.peak_memory_low_bytes[i]),
            peak_memory_high_bytes=float(table.peak_memory_high_bytes[i]),
            verdict=self._verdict(table.peak_memory_low_bytes[i], table.peak_memory_high_bytes[i]),
            bound=bound,
            memory_parts_bytes=memory,
            time_parts_s=shown,
            model_flops=float(table.model_flops[i]),
            hardware_flops=float(table.hardware_flops[i]),
        )

    def _verdict(self, low: float, high: float) -> Literal["fits", "too_close", "does_not_fit"]:
        limit = self.memory_limit_bytes
        if limit is None or high <= limit:
            return "fits"
        return "does_not_fit" if low > limit else "too_close"

    # Learning.

    def observe(self, trial: Trial) -> None:
        """Takes in a finished trial: its time where it has one, its peak where it fitted or ran out."""
        if trial.outcome not in (Outcome.OK, Outcome.PRUNED, Outcome.OUT_OF_MEMORY):
            return
        try:
            table = self.table([trial.config])
        except WorkloadError:
            return
        self.trials_seen += 1
        if trial.step_time_s is not None and trial.outcome is not Outcome.OUT_OF_MEMORY:
            self._observe_time(trial, table)
        peak = trial.peak_memory_bytes
        if peak is None:
            return
        held = 1 + KEPT_SHARE if trial.config.allocator == "keep" else 1.0
        if trial.outcome is Outcome.OK or trial.outcome is Outcome.OUT_OF_MEMORY and peak > table.peak_memory_bytes[0]:
            self.memory_fit.observe(float(table.live_bytes[0]) * held, float(peak))

    def _observe_time(self, trial: Trial, table: CostTable) -> None:
        """The optimizer step apart from the micro-steps, where the trial timed them apart."""
        assert trial.step_time_s is not None
        parts = table.parts_s[:, 0]
        optimizer = FACTORS.index("optimizer")
        apart = trial.parts_s.get("optimizer_step")
        seconds = trial.step_time_s.median
        if apart is not None and 0 < apart < seconds and trial.config.world_size == 1:
            alone = np.zeros(len(FACTORS))
            alone[optimizer] = parts[optimizer]
            self.time_fit.observe(alone, apart)
            without = parts.copy()
            without[optimizer] = 0.0
            self.time_fit.observe(without, seconds - apart)
            return
        # a trial that was given up has seen a few steps only
        noise = NOISE_SD if trial.outcome is Outcome.OK else 2 * NOISE_SD
        self.time_fit.observe(parts, seconds - float(table.bubble_s[0]), noise=noise)

    def calibration(self) -> Calibration:
        """What has been learnt, to be saved for this device."""
        fit = self.time_fit
        return Calibration(
            factors=dict(zip(FACTORS, map(float, fit.theta), strict=True)),
            covariance=tuple(tuple(map(float, row)) for row in fit.covariance),
            memory_base_bytes=self.memory_fit.base_bytes,
            memory_slack=self.memory_fit.slack,
            memory_sd=self.memory_fit.sd,
            trials=self.trials_seen,
        )


def binding(parts_s: dict[str, float]) -> str:
    """What binds within a step: the kind of work that takes the most of it."""
    kinds = {"matmul/full": "compute", "matmul/half": "compute", "attention": "compute", "memory": "memory_bandwidth"}
    kinds |= {"fused_memory": "memory_bandwidth", "optimizer": "memory_bandwidth", "dispatch": "launch"}
    kinds |= {"first_touch": "memory_bandwidth"}
    sums = dict.fromkeys(_BOUNDS, 0.0)
    for name, seconds in parts_s.items():
        sums[kinds.get(name, name)] += seconds
    return max(sums, key=lambda name: sums[name])


def _between(eager: VariantProfile, selective: VariantProfile, share: float) -> VariantProfile:
    """A variant whose kept bytes lie between two others; operations are those of the first."""

    def mix(a: LinearFit, b: LinearFit) -> LinearFit:
        return LinearFit(
            fixed=(1 - share) * a.fixed + share * b.fixed, per_sample=(1 - share) * a.per_sample + share * b.per_sample
        )

    other = {peak.part: peak for peak in selective.peaks}
    return eager.model_copy(
        update={
            "peaks": tuple(
                peak.model_copy(
                    update={
                        "first": mix(peak.first, other[peak.part].first),
                        "later": mix(peak.later, other[peak.part].later),
                    }
                )
                for peak in eager.peaks
                if peak.part in other
            ),
            "block_saved_bytes": mix(eager.block_saved_bytes, selective.block_saved_bytes),
        }
    )
