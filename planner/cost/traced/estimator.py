"""The estimator: predicts configurations of one workload on one machine, and learns from finished trials."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np

from autoplan.planner.cost.calibrate import FACTORS, NOISE_SD, PRIOR_SD, MemoryFit, TimeFit
from autoplan.planner.cost.columns import ConfigTable, Floats, Ints, first_of_each
from autoplan.planner.cost.communication import links_of
from autoplan.planner.cost.offload import host_link
from autoplan.planner.cost.prediction import ALLOCATOR_SLACK, BARE_CONTEXT_BYTES, Verdict, bound_of, spread, verdicts
from autoplan.planner.cost.traced.candidates import MICRO_STEP_KNOBS, Candidates, from_configs
from autoplan.planner.cost.traced.memory import MemoryParts, traced_memory, traced_offload
from autoplan.planner.cost.traced.rates import from_device
from autoplan.planner.cost.traced.step_time import (
    GIVEN_BACK,
    Machine,
    blended_times,
    discard_outlier_timings,
    first_touches,
    launch_over_work,
    model_flops,
    parts_of_step,
)
from autoplan.planner.records.trials import Outcome, Prediction, Trial
from autoplan.planner.trace.model_profile import VARIANT_KNOBS, LinearFit, ModelProfile, VariantKey, VariantProfile
from autoplan.planner.trace.rough_profile import rough_variant
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.config import ATTENTION_BACKENDS, CUDAGRAPH_MODES, KNOBS, TrainingConfig, knobs

# A CPU rank forked from the zygote: the interpreter, torch and the model library, resident (334 MiB with GPT-2's code,
# 355 after a step of one linear layer, measured).
BASE_BYTES = {"cpu": 3.7e8, "cuda": BARE_CONTEXT_BYTES}
# What is resident (CPU: freed pieces, packed weights) or reserved (CUDA) beyond live tensors, as a share of them;
# measured on four small models on a CPU: 0.2 to 0.35
SLACK = {"cpu": 0.22, "cuda": ALLOCATOR_SLACK}
# What is resident besides where the C library keeps freed memory: pieces that no later allocation fits (7.6 GB in place
# of 6.1 for a GPT-2 of 124M, measured)
KEPT_SHARE = 0.25
# Of what a compiled block keeps for its backward, from all (0) to what the selective policy keeps (1): 0.61 in fp32 and
# 0.78 in bf16 on a small GPT-2, measured; not fitted further.
COMPILED_KEEPS = 0.7
# Activations of a variant that was not traced may be so many times more or less: a transformer saves 2.8 times what is
# assumed of a model of unknown operations (planner/trace/rough_profile.py).
ROUGH_ACTIVATIONS = 3.0
PART = 1 << 15
"""Configurations of which an outlook is worked out at a time: their columns take some 50 MB."""

MEMORY_PARTS = ("parameters", "optimizer", "gradients", "activations", "gathered")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """Of predictions the columns by which a few of millions are chosen.

    `host_bytes` is what a rank keeps in the host's memory by offload.
    """

    step_time_s: Floats
    step_time_low_s: Floats
    peak_memory_bytes: Floats
    peak_memory_low_bytes: Floats
    peak_memory_high_bytes: Floats
    host_bytes: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class CostTable(Outlook):
    """Predictions as columns. `parts_s` has a row per calibration factor, uncalibrated.

    `input_s` is no part of the step: what one process takes to make the step's batch of one data-parallel rank, zero
    where make_batch was not timed.
    """

    step_time_high_s: Floats
    live_bytes: Floats
    model_flops: Floats
    hardware_flops: Floats
    parts_s: Floats
    bubble_s: Floats
    input_s: Floats
    memory: MemoryParts


@dataclass(frozen=True, kw_only=True, slots=True)
class Uncalibrated:
    """Predictions as columns before trials correct them: it takes long to make, and trials change nothing in it.

    `rough_bytes` are the activations of what was not traced, else zero.
    """

    candidates: Candidates
    parts_s: Floats
    bubble_s: Floats
    hardware_flops: Floats
    memory: MemoryParts
    rough_bytes: Floats
    host_bytes: Floats


class Estimator:
    """Memory and time of configurations before they run.

    Args:
        profile: The traced model.
        hardware: The probed machine.
        device: cpu or cuda.
        global_batch: Samples per optimizer step.
        memory_limit_bytes: What a trial may take; None: everything fits.
    """

    def __init__(
        self,
        profile: ModelProfile,
        hardware: HardwareProfile,
        *,
        device: str,
        global_batch: int,
        memory_limit_bytes: int | None = None,
    ) -> None:
        self.device = device
        self.global_batch = global_batch
        self.memory_limit_bytes = memory_limit_bytes
        self.rates = from_device(hardware.device(device))
        self.profile = discard_outlier_timings(profile, self.rates)
        self.machine = Machine(
            profile=self.profile,
            rates=self.rates,
            links=links_of(hardware, device),
            host=host_link(hardware, device),
        )
        doubts = np.square([self.rates.doubts.get(name, 0.0) for name in FACTORS])
        self.time_fit = TimeFit(prior_sd=np.sqrt(np.square(list(PRIOR_SD.values())) + doubts))
        self.memory_fit = MemoryFit(BASE_BYTES[device], SLACK[device])
        self._of_one: dict[TrainingConfig | None, Uncalibrated] = {}
        self._last: tuple[Sequence[TrainingConfig], Uncalibrated] | None = None

    # Predictions.

    def estimate(self, configs: Sequence[TrainingConfig]) -> list[Prediction]:
        """Predictions, in the order of the configurations."""
        if not configs:
            return []
        table = self.table(configs)
        return [self._prediction(table, i) for i in range(len(configs))]

    def table(self, configs: Sequence[TrainingConfig]) -> CostTable:
        """Predictions as columns, in the order of the configurations."""
        return self._calibrated(self._columns(configs))

    def _columns(self, configs: Sequence[TrainingConfig]) -> Uncalibrated:
        """What trials do not change. It is kept of each single configuration, and of the last tuple."""
        single = configs[0] if len(configs) == 1 else None
        if single in self._of_one:
            return self._of_one[single]
        if self._last is not None and configs is self._last[0]:
            return self._last[1]
        made = self._work_out(self._candidates(configs))
        if single is not None:
            self._of_one[single] = made
        elif isinstance(configs, tuple):
            self._last = configs, made
        return made

    def _candidates(self, configs: Sequence[TrainingConfig]) -> Candidates:
        profile = self.profile
        return from_configs(
            configs,
            self.global_batch,
            device=self.device,
            num_blocks=profile.num_blocks,
            own_step=profile.optimizer_form,
        )

    def outlook(self, configs: Sequence[TrainingConfig]) -> Outlook:
        """As much of `table` as it takes to choose among millions: what is priced alike is predicted once."""
        table = ConfigTable.of(configs)
        # variant by variant, since each costs some time however many candidates it has
        keys = table.alike([*VARIANT_KNOBS, *(knob for knob in KNOBS if knob not in VARIANT_KNOBS)], self._as_priced)
        first, kind = np.unique(keys, return_index=True, return_inverse=True)[1:]
        del keys
        kind = kind.astype(np.int32)
        names = [field.name for field in fields(Outlook)]
        columns = {name: np.empty(len(first)) for name in names}
        for start in range(0, len(first), PART):
            here = slice(start, start + PART)
            predicted = self.table(table.take(first[here]))
            for name in names:
                columns[name][here] = getattr(predicted, name)
        return Outlook(**{name: columns.pop(name)[kind] for name in names})

    def _as_priced(self, knob: str, value: Any) -> Any:
        """The knob's value as a prediction reads it."""
        if knob == "compile_mode":
            return value in CUDAGRAPH_MODES
        if knob == "attention":
            return "sdpa" if value in ATTENTION_BACKENDS else value
        if knob == "allocator":
            return value == "keep"
        return None if knobs()[knob].unpriced else value

    def predict(self, candidates: Candidates) -> CostTable:
        """Predictions of candidates as columns."""
        return self._calibrated(self._work_out(candidates))

    def _work_out(self, candidates: Candidates) -> Uncalibrated:
        """Variant by variant."""
        size = len(candidates)
        parts, memory = np.zeros((len(FACTORS), size)), np.zeros((len(MEMORY_PARTS), size))
        bubble, flops, host, rough = (np.zeros(size) for _ in range(4))
        for here, some, plain, full in self._by_variant(candidates):
            times, executed = blended_times(self.machine, plain, full, some)
            moved = traced_offload(plain, full, self.profile, some)
            parts[:, here], bubble[here], flops[here] = parts_of_step(self.machine, times, executed, some, moved)
            parts[FACTORS.index("first_touch"), here] = self._first_touch_s(plain, full, some)
            held = traced_memory(plain, full, self.profile, some)
            memory[:, here] = [getattr(held, name) for name in MEMORY_PARTS]
            if {plain.key.text(), full.key.text()} & {*self.profile.rough_variants}:
                rough[here] = held.activations
            host[here] = moved.host_bytes
        return Uncalibrated(
            candidates=candidates,
            parts_s=parts,
            bubble_s=bubble,
            hardware_flops=flops,
            memory=MemoryParts(**dict(zip(MEMORY_PARTS, memory, strict=True))),
            rough_bytes=rough,
            host_bytes=host,
        )

    def launch_over_work(self, configs: Sequence[TrainingConfig]) -> Floats:
        """Seconds in which the host launches a micro-step over those in which the device works at it."""
        first, kind = ConfigTable.of(configs).kinds(*MICRO_STEP_KNOBS)
        out = np.zeros(len(first))
        for here, some, plain, full in self._by_variant(self._candidates(ConfigTable.of(configs).take(first))):
            out[here] = launch_over_work(self.machine, plain, full, some)
        return out[kind]

    def _by_variant(self, candidates: Candidates) -> Iterator[tuple[Ints, Candidates, VariantProfile, VariantProfile]]:
        """The candidates of each variant: their places, themselves, the variant, and it with full checkpointing."""
        pairs = candidates.variant * len(candidates.variants) + candidates.full_variant
        for pair in np.unique(pairs):
            here = np.flatnonzero(pairs == pair)
            some = candidates.take(here)
            plain = self.variant(candidates.variants[int(some.variant[0])])
            full = self.variant(candidates.variants[int(some.full_variant[0])])
            yield here, some, plain, full

    def _calibrated(self, raw: Uncalibrated) -> CostTable:
        """The table of what finished trials make of the parts."""
        candidates, memory = raw.candidates, raw.memory
        step, sd = self.time_fit.predict(raw.parts_s)
        bubble = raw.bubble_s * step / np.maximum(raw.parts_s.sum(axis=0), 1e-30)
        step = step + bubble
        least, peak, most = (
            self.memory_fit.predict(held * np.where(candidates.keeps_memory, 1 + KEPT_SHARE, 1.0))
            for held in (
                memory.live - (1 - 1 / ROUGH_ACTIVATIONS) * raw.rough_bytes,
                memory.live,
                memory.live + (ROUGH_ACTIVATIONS - 1) * raw.rough_bytes,
            )
        )
        time_spread, memory_spread = spread(sd), spread(self.memory_fit.sd)
        return CostTable(
            step_time_s=step,
            step_time_low_s=step / time_spread,
            step_time_high_s=step * time_spread,
            peak_memory_bytes=peak,
            peak_memory_low_bytes=least / memory_spread,
            peak_memory_high_bytes=most * memory_spread,
            live_bytes=memory.live,
            host_bytes=raw.host_bytes,
            model_flops=np.full(len(candidates), model_flops(self.profile, self.global_batch)),
            hardware_flops=raw.hardware_flops,
            parts_s=raw.parts_s,
            bubble_s=bubble,
            input_s=(self.profile.input_s_per_sample or 0.0) * self.global_batch / candidates.dp,
            memory=memory,
        )

    def variant(self, key: VariantKey) -> VariantProfile:
        """The traced variant, or what is taken for one that was not traced.

        A compiled block keeps for its backward what the partitioner finds expensive to recompute: between what the
        selective policy keeps and all. Any other variant is estimated from the nearest one that was traced.
        """
        found = self.profile.variants.get(key.text())
        if found is None and key.compiled:
            plain = key.model_copy(update={"compiled": False})
            selective = self.profile.variants.get(plain.model_copy(update={"checkpointing": "selective"}).text())
            eager = self.variant(plain)
            if key.checkpointing != "none" or self.profile.num_blocks == 0 or selective is None:
                return eager
            return _between(eager, selective, COMPILED_KEEPS)
        return found or rough_variant(key, self.profile.variants, self.profile.num_blocks)

    def _first_touch_s(self, plain: VariantProfile, full: VariantProfile, c: Candidates) -> Floats:
        """Seconds per step of touching memory that the C library gave back since it was last held."""
        first, kind = first_of_each(c.micro_batch)
        sizes = c.take(first)
        of_plain, of_full = (first_touches(one, self.profile.num_blocks, sizes)[kind] for one in (plain, full))
        fresh = (1 - c.checkpointed) * of_plain + c.checkpointed * of_full
        # of a micro-step that keeps all: with checkpointing the same memory comes and goes, by blocks
        key = plain.key.model_copy(update={"checkpointing": "none"})
        whole = self.variant(key) if plain.key.checkpointing != "none" else plain
        block, rest = (fit.at(c.micro_batch) for fit in (whole.block_saved_bytes, whole.rest_saved_bytes))
        kept = np.asarray(self.profile.num_blocks * block + rest)
        fresh = (fresh + GIVEN_BACK * kept) * c.accumulation / c.tp / c.pp
        slow = self.rates.thread_slowdown(c.threads, c.num_ranks)
        return np.where(c.keeps_memory, 0.0, fresh) * self.rates.first_touch_s_per_byte * slow

    def _prediction(self, table: CostTable, i: int) -> Prediction:
        scaled = table.parts_s[:, i] * np.exp(self.time_fit.theta)
        shown = {name: float(value) for name, value in zip(FACTORS, scaled, strict=True) if value > 0}
        if table.bubble_s[i] > 0:
            shown["bubble"] = float(table.bubble_s[i])
        step_s, input_s = float(table.step_time_s[i]), float(table.input_s[i])
        bound = bound_of(shown, waits_for_input=input_s > step_s)
        if input_s > 0:
            shown["input"] = input_s
        memory = {name: float(getattr(table.memory, name)[i]) for name in MEMORY_PARTS}
        memory["process"] = float(table.peak_memory_bytes[i] - table.live_bytes[i])
        low, high = table.peak_memory_low_bytes[i], table.peak_memory_high_bytes[i]
        return Prediction(
            step_time_s=step_s,
            step_time_low_s=float(table.step_time_low_s[i]),
            step_time_high_s=float(table.step_time_high_s[i]),
            peak_memory_bytes=float(table.peak_memory_bytes[i]),
            peak_memory_low_bytes=float(low),
            peak_memory_high_bytes=float(high),
            verdict=cast(Verdict, str(verdicts(low, high, self.memory_limit_bytes))),
            bound=bound,
            memory_parts_bytes=memory,
            host_memory_bytes=float(table.host_bytes[i]),
            time_parts_s=shown,
            model_flops=float(table.model_flops[i]),
            hardware_flops=float(table.hardware_flops[i]),
        )

    # Learning.

    def observe(self, trial: Trial) -> None:
        """Takes in a finished trial: its time, or how long it takes at least; its peak where it fitted or ran out."""
        known = (Outcome.OK, Outcome.PRUNED, Outcome.OUT_OF_MEMORY)
        if trial.outcome not in known and trial.at_least_s is None:
            return
        table = self.table([trial.config])
        self._observe_time(trial, table)
        peak = trial.peak_memory_bytes
        if peak is None:
            return
        held = 1 + KEPT_SHARE if trial.config.allocator == "keep" else 1.0
        if trial.outcome is Outcome.OK or trial.outcome is Outcome.OUT_OF_MEMORY and peak > table.peak_memory_bytes[0]:
            self.memory_fit.observe(float(table.live_bytes[0]) * held, float(peak))

    def _observe_time(self, trial: Trial, table: CostTable) -> None:
        """The optimizer step apart from the micro-steps, where the trial timed them apart; or a lower bound of both."""
        parts, bubble_s = table.parts_s[:, 0], float(table.bubble_s[0])
        if trial.at_least_s is not None:
            self.time_fit.observe(parts, trial.at_least_s - bubble_s, at_least=True)
            return
        if trial.step_time_s is None or trial.outcome is not Outcome.OK:
            return
        noise = math.hypot(NOISE_SD, trial.disturbed_sd)
        optimizer = FACTORS.index("optimizer")
        apart = trial.parts_s.get("optimizer_step")
        seconds = trial.step_time_s.median
        if apart is not None and 0 < apart < seconds and trial.config.world_size == 1:
            alone = np.zeros(len(FACTORS))
            alone[optimizer] = parts[optimizer]
            self.time_fit.observe(alone, apart, noise=noise)
            without = parts.copy()
            without[optimizer] = 0.0
            self.time_fit.observe(without, seconds - apart, noise=noise)
            return
        self.time_fit.observe(parts, seconds - bubble_s, noise=noise)


def _between(eager: VariantProfile, selective: VariantProfile, share: float) -> VariantProfile:
    """A variant whose kept bytes lie between two others; operations are those of the first."""

    def mix(a: LinearFit, b: LinearFit) -> LinearFit:
        return (1 - share) * a + share * b

    other = {peak.part: peak for peak in selective.peaks}
    peaks = tuple(
        peak.model_copy(
            update={name: mix(getattr(peak, name), getattr(other[peak.part], name)) for name in ("first", "later")}
        )
        for peak in eager.peaks
        if peak.part in other
    )
    kept = mix(eager.block_saved_bytes, selective.block_saved_bytes)
    return eager.model_copy(update={"peaks": peaks, "block_saved_bytes": kept})
