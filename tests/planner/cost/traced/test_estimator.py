"""The estimator: orders, verdicts, what it learns from trials."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from autoplan.planner.cost.calibrate import FACTORS, TimeFit
from autoplan.planner.cost.columns import checkpointed_share
from autoplan.planner.cost.communication import Links, exchange
from autoplan.planner.cost.prediction import bound_of
from autoplan.planner.cost.states import ModelSize, state_widths
from autoplan.planner.cost.traced import estimator as estimator_module
from autoplan.planner.cost.traced.candidates import from_configs
from autoplan.planner.cost.traced.estimator import Estimator, Outlook
from autoplan.planner.cost.traced.rates import fit_matmul
from autoplan.planner.records.trials import Interval, Outcome, PeakMemory, Trial
from autoplan.planner.trace.model_profile import (
    IN_RNN,
    PLAIN,
    ModelProfile,
    TraceRequest,
    VariantKey,
    VariantProfile,
)
from autoplan.planner.trace.trace import trace_workload
from autoplan.probes.profile import HardwareProfile
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import make_spec
from tests.planner.cost.test_one_core import machine, model_of_eight_blocks

MIB = 2**20


@pytest.fixture
def hardware() -> HardwareProfile:
    return machine()


@pytest.fixture
def profile() -> ModelProfile:
    return model_of_eight_blocks()


def estimator(profile: ModelProfile, hardware: HardwareProfile, limit: int | None = None) -> Estimator:
    return Estimator(profile, hardware, device="cpu", global_batch=16, memory_limit_bytes=limit)


def test_predictions_keep_the_order_and_know_what_is_faster(profile: ModelProfile, hardware: HardwareProfile) -> None:
    configs = [
        TrainingConfig(micro_batch=4),
        TrainingConfig(micro_batch=4, checkpointing="full"),
        TrainingConfig(micro_batch=4, precision="bf16"),
        TrainingConfig(micro_batch=4, compile="block"),
    ]
    plain, full, half, compiled = estimator(profile, hardware).estimate(configs)
    assert full.step_time_s > plain.step_time_s > half.step_time_s
    assert compiled.step_time_s < plain.step_time_s
    assert full.peak_memory_bytes < plain.peak_memory_bytes
    assert full.hardware_flops == pytest.approx(4 / 3 * (plain.hardware_flops or 0))
    assert plain.step_time_low_s < plain.step_time_s < plain.step_time_high_s


def test_a_compilation_saves_nothing_of_the_operations_of_an_rnn(
    profile: ModelProfile, hardware: HardwareProfile
) -> None:
    def operations_s(of: ModelProfile) -> list[float]:
        configs = [TrainingConfig(micro_batch=4), TrainingConfig(micro_batch=4, compile="model")]
        parts = ("matmul/full", "memory", "fused_memory", "dispatch")
        return [sum(p.time_parts_s.get(part, 0.0) for part in parts) for p in estimator(of, hardware).estimate(configs)]

    def as_rnn(variant: VariantProfile) -> VariantProfile:
        groups = tuple(group.model_copy(update={"name": IN_RNN + group.name}) for group in variant.groups)
        return variant.model_copy(update={"groups": groups})

    recurrent = profile.model_copy(update={"variants": {key: as_rnn(v) for key, v in profile.variants.items()}})
    eager_s, compiled_s = operations_s(recurrent)
    assert compiled_s == pytest.approx(eager_s)
    eager_s, compiled_s = operations_s(profile)
    assert compiled_s < 0.97 * eager_s


def test_the_activations_of_what_was_not_traced_are_less_certain(
    profile: ModelProfile, hardware: HardwareProfile
) -> None:
    """The same figures, once traced and once estimated: what is known of the states stays known."""
    configs = [TrainingConfig(micro_batch=4), TrainingConfig(micro_batch=4, precision="bf16", compile="block")]
    half = VariantKey(precision="half").text()
    rough = profile.model_copy(update={"rough_variants": (half,)})
    (plain, traced), (same, guessed) = (estimator(one, hardware).estimate(configs) for one in (profile, rough))
    assert same == plain and guessed.peak_memory_bytes == traced.peak_memory_bytes
    assert guessed.peak_memory_low_bytes < traced.peak_memory_low_bytes
    assert traced.peak_memory_high_bytes < guessed.peak_memory_high_bytes < 3 * traced.peak_memory_high_bytes


def test_one_by_one_and_all_at_once_are_the_same(profile: ModelProfile, hardware: HardwareProfile) -> None:
    configs = [
        TrainingConfig.model_validate({"micro_batch": m, "precision": p, "checkpointing": c})
        for m in (1, 2, 8)
        for p in ("fp32", "bf16")
        for c in ("none", "selective", "every_2", "full")
    ]
    model = estimator(profile, hardware)
    for together, config in zip(model.estimate(configs), configs, strict=True):
        alone = model.estimate([config])[0]
        assert alone.step_time_s == pytest.approx(together.step_time_s, rel=1e-9)
        assert alone.peak_memory_bytes == pytest.approx(together.peak_memory_bytes, rel=1e-9)
        assert alone.verdict == together.verdict and alone.bound == together.bound


def test_a_blend_lies_between_its_ends(profile: ModelProfile, hardware: HardwareProfile) -> None:
    names = ("none", "every_4", "every_2", "full")
    configs = [TrainingConfig.model_validate({"micro_batch": 4, "checkpointing": name}) for name in names]
    found = estimator(profile, hardware).estimate(configs)
    times = [p.step_time_s for p in found]
    memory = [p.peak_memory_bytes for p in found]
    assert times == sorted(times) and memory == sorted(memory, reverse=True)


@pytest.mark.parametrize(
    "policy, blocks, share", [("none", 5, 0), ("full", 5, 1), ("every_2", 5, 3 / 5), ("every_4", 12, 1 / 4)]
)
def test_checkpointed_blocks_start_with_the_first(policy: str, blocks: int, share: float) -> None:
    assert checkpointed_share(policy, blocks) == pytest.approx(share)


def test_verdicts_follow_the_limit(profile: ModelProfile, hardware: HardwareProfile) -> None:
    config = TrainingConfig(micro_batch=8)
    peak = estimator(profile, hardware).estimate([config])[0].peak_memory_bytes
    verdicts = [
        estimator(profile, hardware, int(factor * peak)).estimate([config])[0].verdict for factor in (2.0, 1.0, 0.5)
    ]
    assert verdicts == ["fits", "too_close", "does_not_fit"]


def trial(config: TrainingConfig, seconds: float, peak: int, optimizer_s: float | None = None) -> Trial:
    return Trial(
        number=0,
        purpose="search",
        config=config,
        outcome=Outcome.OK,
        phase="done",
        step_time_s=Interval(median=seconds, low=seconds, high=seconds, samples=5),
        parts_s={} if optimizer_s is None else {"optimizer_step": optimizer_s},
        peak_memory=PeakMemory(resident_bytes=peak),
        seconds_spent=1.0,
    )


def test_trials_teach_factors_that_carry_over(profile: ModelProfile, hardware: HardwareProfile) -> None:
    """A machine whose products take twice as long: after two trials the untried configurations are right too."""
    model = estimator(profile, hardware)
    configs = [TrainingConfig(micro_batch=m) for m in (1, 2, 4, 8)]
    table = model.table(configs)
    matmul = FACTORS.index("matmul/full")
    real = table.parts_s.sum(axis=0) + table.parts_s[matmul]
    before = np.abs(np.log(table.step_time_s / real))
    wide = model.estimate(configs)[3]
    for i in (0, 1):
        model.observe(trial(configs[i], float(real[i]), int(table.peak_memory_bytes[i])))
    after = model.table(configs)
    assert np.all(np.abs(np.log(after.step_time_s / real))[2:] < 0.45 * before[2:])
    narrow = model.estimate(configs)[3]
    assert narrow.step_time_high_s / narrow.step_time_low_s < wide.step_time_high_s / wide.step_time_low_s


def test_a_measurement_that_is_far_off_widens_every_interval_until_others_are_as_expected() -> None:
    """Ten times the expected: the factors follow, and what they say is not believed to the percent."""
    parts = np.zeros(len(FACTORS))
    parts[:4] = 0.25
    fit = TimeFit()
    _, before = fit.predict(parts[:, None])
    fit.observe(parts, 10.0)
    follows, wide = fit.predict(parts[:, None])
    assert follows[0] == pytest.approx(10.0, rel=0.3)
    assert wide[0] > 2 * before[0]
    for _ in range(8):
        fit.observe(parts, 10.0)
    settled, narrow = fit.predict(parts[:, None])
    assert settled[0] == pytest.approx(10.0, rel=0.05)
    assert narrow[0] < 0.6 * wide[0]


def test_the_optimizer_step_is_learnt_apart(profile: ModelProfile, hardware: HardwareProfile) -> None:
    model = estimator(profile, hardware)
    config = TrainingConfig(micro_batch=4)
    table = model.table([config])
    optimizer = float(table.parts_s[FACTORS.index("optimizer"), 0])
    rest = float(table.step_time_s[0]) - optimizer
    model.observe(trial(config, rest + 3 * optimizer, int(table.peak_memory_bytes[0]), optimizer_s=3 * optimizer))
    factors = dict(zip(FACTORS, model.time_fit.theta, strict=True))
    assert factors["optimizer"] > 0.8 and abs(factors["matmul/full"]) < 0.05


def test_memory_is_learnt_from_peaks(profile: ModelProfile, hardware: HardwareProfile) -> None:
    model = estimator(profile, hardware)
    configs = [TrainingConfig(micro_batch=m) for m in (1, 4, 8)]
    table = model.table(configs)
    real = 4e8 + 1.1 * table.live_bytes
    for i in (0, 1):
        model.observe(trial(configs[i], 1.0, int(real[i])))
    assert model.table(configs).peak_memory_bytes[2] == pytest.approx(real[2], rel=0.06)


def test_an_out_of_memory_raises_the_prediction(profile: ModelProfile, hardware: HardwareProfile) -> None:
    model = estimator(profile, hardware)
    config = TrainingConfig(micro_batch=8)
    before = model.estimate([config])[0].peak_memory_bytes
    failed = trial(config, 1.0, int(1.5 * before)).model_copy(update={"outcome": Outcome.OUT_OF_MEMORY})
    model.observe(failed)
    assert model.estimate([config])[0].peak_memory_bytes > before


def test_degrees_divide_memory_and_add_communication(profile: ModelProfile, hardware: HardwareProfile) -> None:
    configs = [
        TrainingConfig(micro_batch=2),
        TrainingConfig(micro_batch=2, dp_replicate=2),
        TrainingConfig(micro_batch=2, dp_shard=2),
        TrainingConfig(micro_batch=2, tp=2),
    ]
    one, ddp, fsdp, tp = estimator(profile, hardware).estimate(configs)
    assert ddp.memory_parts_bytes["parameters"] == one.memory_parts_bytes["parameters"]
    assert fsdp.memory_parts_bytes["optimizer"] == one.memory_parts_bytes["optimizer"] / 2
    assert tp.memory_parts_bytes["parameters"] == one.memory_parts_bytes["parameters"] / 2
    assert all(p.time_parts_s["communication"] > 0 for p in (ddp, fsdp, tp))


def test_gradients_scattered_at_every_micro_step_take_less_memory_and_more_time(
    profile: ModelProfile, hardware: HardwareProfile
) -> None:
    def config(**knobs: object) -> TrainingConfig:
        return TrainingConfig.model_validate({"micro_batch": 1, "dp_shard": 2} | knobs)

    model = estimator(
        profile.model_copy(update={"num_blocks": 16, "parameters": 16 * 512 * 512, "trainable": 16 * 512 * 512}),
        hardware,
    )
    pairs = [
        model.table([config(**knobs), config(gradient_sync="every", **knobs)]) for knobs in ({}, {"dp_replicate": 2})
    ]
    for table in pairs:
        last, every = table.memory.gradients
        assert last == 4 * 16 * 512 * 512 and every == last / 2
        # on their way: a copy of one block's, and with every those of a block whose backward runs as well
        assert table.live_bytes[0] - table.live_bytes[1] == pytest.approx(last / 2 - 4 * 512 * 512)
    communication = FACTORS.index("communication")
    assert all(table.parts_s[communication, 1] > table.parts_s[communication, 0] for table in pairs)
    whole = model.table([config(micro_batch=8)])  # one micro-step: scattered as its backward goes
    assert whole.memory.gradients[0] == every


def test_replicas_of_shards_reduce_once_per_step_all_the_same() -> None:
    knobs = ({}, {"dp_replicate": 2}, {"dp_replicate": 2, "gradient_sync": "every"})
    configs = [TrainingConfig.model_validate({"micro_batch": 1, "dp_shard": 2} | more) for more in knobs]
    columns = from_configs(configs, 16, device="cuda")
    size = ModelSize(parameters=1e9, trainable=1e9, num_blocks=16, block_parameters=6e7, largest_parameter=4e7)
    widths = state_widths(columns, device="cuda", optimizer_bytes=8.0, temporary_bytes=4.0)
    links = Links(intra_bytes_per_s=1e11, inter_bytes_per_s=1e10)
    scattered, last, every = exchange(columns, links, size, widths, np.zeros(3)).gradient_s
    assert last > scattered
    assert every - last == pytest.approx((columns.accumulation[2] - 1) * scattered)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_millions_are_predicted_as_each_by_itself(
    profile: ModelProfile, hardware: HardwareProfile, device: Literal["cpu", "cuda"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimator_module, "PART", 100)
    values = {
        "micro_batch": (1, 4),
        "precision": ("fp32", "bf16", "fp16"),
        "attention": ("own", "sdpa", "sdpa_flash"),
        "compile": ("off", "model"),
        "compile_mode": ("default", "reduce-overhead", "max-autotune"),
        "checkpointing": ("none", "selective", "every_2", "full"),
        "allocator": ("own", "keep", "expandable"),
        "dp_shard": (1, 2),
    }
    rows = list(itertools.product(*values.values()))[::7]
    configs = [TrainingConfig.model_validate(dict(zip(values, row, strict=True))) for row in rows]
    model = Estimator(
        profile.model_copy(update={"device": device}),
        hardware.model_copy(update={"devices": (hardware.devices[0].model_copy(update={"type": device}),)}),
        device=device,
        global_batch=16,
        memory_limit_bytes=None,
    )
    whole, outlook = model.table(configs), model.outlook(configs)
    for field in dataclasses.fields(Outlook):
        np.testing.assert_allclose(getattr(outlook, field.name), getattr(whole, field.name), rtol=1e-12)


def test_the_matmul_fit_is_found_from_its_own_times() -> None:
    sizes = np.array(
        [(64, 64, 64), (512, 512, 512), (64, 4096, 512), (2048, 256, 64), (1024, 1024, 2048), (32, 32, 9e4)]
    )
    m, n, k = sizes.T
    seconds = 2 * m * n * k / 2e11 + m * n * 1e-10 + 3e-6
    law = fit_matmul(np.column_stack([sizes, seconds]))
    assert 1 / law[0] == pytest.approx(2e11, rel=0.02)
    assert law[1] == pytest.approx(1e-10, rel=0.1) and np.all(law >= 0)


def test_what_binds_is_the_largest_kind() -> None:
    assert (
        bound_of({"matmul/full": 1.0, "attention": 0.5, "memory": 1.2, "optimizer": 0.1}, waits_for_input=False)
        == "compute"
    )
    assert (
        bound_of({"matmul/full": 1.0, "fused_memory": 1.2, "optimizer": 0.1}, waits_for_input=False)
        == "memory_bandwidth"
    )
    assert bound_of({"matmul/fp8": 1.0, "matmul/half": 0.5, "memory": 1.2}, waits_for_input=False) == "compute"


def test_accumulation_is_the_global_batch_over_the_ranks() -> None:
    columns = from_configs([TrainingConfig(micro_batch=2, dp_shard=2)], 16, device="cpu")
    assert columns.accumulation[0] == 4


SLOW_DATA = """
import time
import torch
from torch import nn
from autoplan.strategies.workloads.workload import LossSum, Workload

def make_batch(count, index):
    time.sleep(0.02 * count)
    return {"x": torch.rand(count, 8)}

def slow_data():
    return Workload(
        name="slow data", build_model=lambda: nn.Linear(8, 8), make_batch=make_batch, global_batch=16,
        loss=lambda model, batch: LossSum(model(batch["x"]).square().sum(), len(batch["x"])),
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
"""


def test_data_that_comes_too_slowly_binds_and_leaves_the_step_as_it_is(tmp_path: Path, hardware: HardwareProfile):
    """A real make_batch that sleeps 20 ms a sample, for a model of one small product."""
    path = tmp_path / "slow.py"
    path.write_text(SLOW_DATA)
    traced = trace_workload(make_spec(model=f"{path}:slow_data"), "cpu", TraceRequest(variants=(PLAIN,)))
    assert traced.input_s_per_sample is not None and traced.input_s_per_sample >= 0.02
    configs = [TrainingConfig(micro_batch=4), TrainingConfig(micro_batch=4, dp_replicate=2)]
    alone, two = estimator(traced, hardware).estimate(configs)
    assert alone.bound == two.bound == "input"
    assert alone.time_parts_s["input"] == pytest.approx(16 * traced.input_s_per_sample)
    assert two.time_parts_s["input"] == pytest.approx(8 * traced.input_s_per_sample)
    untimed = estimator(traced.model_copy(update={"input_s_per_sample": None}), hardware).estimate(configs)[0]
    assert untimed.step_time_s == alone.step_time_s and untimed.bound != "input"
    assert "input" not in untimed.time_parts_s


def test_data_binds_from_where_it_takes_longer_than_the_step(profile: ModelProfile, hardware: HardwareProfile) -> None:
    config = TrainingConfig(micro_batch=4)
    plain = estimator(profile, hardware).estimate([config])[0]
    for factor, bound in ((0.9, plain.bound), (1.1, "input")):
        data = profile.model_copy(update={"input_s_per_sample": factor * plain.step_time_s / 16})
        found = estimator(data, hardware).estimate([config])[0]
        assert found.bound == bound and found.step_time_s == plain.step_time_s
