"""The space: legal candidates only, and the reasons for the rest."""

import dataclasses
import itertools
import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autoplan.errors import ConfigError, WorkloadError
from autoplan.planner.cost.columns import ConfigTable
from autoplan.planner.cost.traced.estimator import CostTable
from autoplan.planner.search.answer import nothing_fits
from autoplan.planner.search.references import needed_offload
from autoplan.planner.space import prune as prune_module
from autoplan.planner.space.bounds import Bound, parse_bound
from autoplan.planner.space.generate import Space, generate
from autoplan.planner.space.prune import (
    held_back,
    keep_what_may_win,
    needless_last_resorts,
    without_failed_variants,
    without_last_resorts,
    without_twins,
)
from autoplan.probes.profile import Device, OperationReading
from autoplan.record import Reading
from autoplan.strategies.analysis.facts import Choices, LeftOut, ParallelFacts, offer
from autoplan.strategies.config import DEGREES, KNOBS, PLAIN, TrainingConfig, knob_values, micro_batches
from autoplan.strategies.config import knobs as knob_facts
from autoplan.strategies.knob_text import parse_knob
from autoplan.strategies.techniques.degrees import legal_degrees
from autoplan.strategies.techniques.rules import incompatible
from tests.cases import some


def device(spread: float = 0.05, **rates: float) -> Device:
    """A CPU with measured rates of linear_train per dtype."""
    operations = tuple(
        OperationReading(
            kind="linear_train",
            dtype=dtype,
            shape=(1024, 1024, 1024),
            seconds=Reading(value=1.0, unit="s", provenance="measured"),
            rate=Reading(value=rate, unit="flop/s", provenance="measured", spread=spread),
        )
        for dtype, rate in rates.items()
    )
    memory = Reading(value=1e10, unit="bytes", provenance="driver")
    return Device(
        index=0,
        type="cpu",
        name="test",
        memory_total_bytes=memory,
        memory_available_bytes=memory,
        operations=operations,
    )


CHOICES = (
    Choices(knob="micro_batch", values=(1, 2, 3, 4, 6, 12)),
    Choices(knob="checkpointing", values=("none", "full")),
    Choices(
        knob="precision",
        values=("fp32", "bf16"),
        left_out=(LeftOut(knob="precision", value="tf32", reason="TF32 is a format of NVIDIA GPUs"),),
    ),
    Choices(knob="compile", values=("off", "block", "model")),
    Choices(knob="compile_mode", values=("default", "max-autotune")),
    Choices(knob="dp_replicate", values=(1,)),
)


def test_candidates_are_legal_and_told_once():
    space = generate(CHOICES, global_batch=12)
    assert len(set(space.candidates)) == len(space.candidates)
    # 6 micro-batches x 2 checkpointing x 2 precisions x (off, block, model, model + max-autotune)
    assert len(space.candidates) == 6 * 2 * 2 * 4
    for config in space.candidates:
        assert config == TrainingConfig.model_validate(config.model_dump())
        assert 12 % config.micro_batch == 0
        assert config.compile_mode == "default" or config.compile == "model"


def test_what_a_technique_does_not_offer_is_kept_with_its_reason():
    space = generate(CHOICES, global_batch=12)
    family = next(family for family in space.left_out if family.family == "precision=tf32")
    assert family.limit == "TF32 is a format of NVIDIA GPUs"
    assert family.configurations == len(space.candidates) // 2


def test_a_variant_that_failed_is_left_out_by_the_knobs_that_are_not_plain():
    lossy = {"precision": "bf16", "parameters": "bf16", "checkpointing": "full"}
    configs = [TrainingConfig.model_validate({"micro_batch": 1} | knobs) for knobs in ({}, lossy)]
    failed = {"half/own/full/full/eager/bf16": "x"}
    space = without_failed_variants(Space(candidates=ConfigTable.of(configs), left_out=(), values={}), failed)
    assert list(space.candidates) == configs[:1]
    text = "precision=bf16 or fp16 checkpointing=full parameters=bf16 or bf16_stochastic"
    assert [(one.family, one.limit) for one in space.left_out] == [(text, "it does not run with this model: x")]
    with pytest.raises(ConfigError, match=f"{text}: x"):
        without_failed_variants(Space(candidates=ConfigTable.of(configs[1:]), left_out=(), values={}), failed)


def test_fixed_knobs():
    space = generate(CHOICES, global_batch=12, fixed={"precision": "bf16", "micro_batch": 3})
    assert {(config.precision, config.micro_batch) for config in space.candidates} == {("bf16", 3)}


@pytest.mark.parametrize(
    ("fixed", "text"),
    [
        ({"precision": "tf32"}, "format of NVIDIA"),
        ({"micro_batch": 5}, "does not divide the global batch"),
        ({"dp_shard": 2}, "no combination of degrees"),
        ({"compile": "off", "compile_mode": "max-autotune"}, "no legal configuration"),
        ({"colour": "blue"}, "not a knob"),
        ({"micro_batch": "many"}, "not a value"),
    ],
)
def test_a_fix_that_cannot_be_says_why(fixed: dict[str, object], text: str):
    with pytest.raises(ConfigError, match=text):
        generate(CHOICES, global_batch=12, fixed=fixed)


def test_bounds():
    space = generate(
        CHOICES,
        global_batch=12,
        bounds={"micro_batch": Bound(low=2, high=4), "compile": Bound(values=("off", "block"))},
    )
    assert {config.micro_batch for config in space.candidates} == {2, 3, 4}
    assert {config.compile for config in space.candidates} == {"off", "block"}
    with pytest.raises(ConfigError, match="within 7..9"):
        generate(CHOICES, global_batch=12, bounds={"micro_batch": Bound(low=7, high=9)})


def test_a_micro_batch_that_only_the_user_may_choose():
    reason = "bn1 (BatchNorm2d) normalises over the micro-batch"
    choices = (offer("micro_batch", (), dict.fromkeys((1, 2, 4), reason)),)
    with pytest.raises(WorkloadError, match="BatchNorm2d"):
        generate(choices, global_batch=4)
    space = generate(choices, global_batch=4, fixed={"micro_batch": 2})
    assert [config.micro_batch for config in space.candidates] == [2]


def test_ranks_share_the_global_batch_exactly():
    ways = ({}, {"dp_replicate": 2}, {"dp_shard": 2}, {"dp_replicate": 8})
    space = generate(CHOICES, global_batch=12, degrees=ways)
    assert {config.world_size for config in space.candidates} == {1, 2}  # 8 does not divide 12
    for config in space.candidates:
        assert config.micro_batch * config.dp * config.accumulation(12) == 12


def one_by_one(choices, degrees, global_batch):
    """The legal configurations, each made and judged by itself."""
    values = {choice.knob: choice.values for choice in choices if choice.knob not in DEGREES and choice.values}
    unpriced = [knob for knob in values if knob_facts()[knob].unpriced]
    values |= {"micro_batch": micro_batches(global_batch)} | {knob: (getattr(PLAIN, knob),) for knob in unpriced}
    for degree, sync in itertools.product(degrees, ("last", "every")):
        for row in itertools.product(*values.values()):
            knobs = degree | {"gradient_sync": sync} | dict(zip(values, row, strict=True))
            config = PLAIN.model_copy(update=knobs)
            if global_batch % (config.micro_batch * config.dp) or incompatible(config, global_batch) is not None:
                continue
            if config.pp == 1 or config.accumulation(global_batch) == config.pp_microbatches:
                yield config


@pytest.mark.parametrize("seed", some(range(40), range(16)))
def test_the_space_in_columns_is_that_of_each_configuration_by_itself(seed: int):
    draw = random.Random(seed)
    offered = [
        Choices(knob=knob, values=tuple(value for value in values if value == values[0] or draw.random() < 0.4))
        for knob in draw.sample([knob for knob in KNOBS if knob not in DEGREES and knob_values(knob)], 7)
        if (values := tuple(dict.fromkeys((getattr(PLAIN, knob), *(knob_values(knob) or ())))))
    ]
    global_batch, unit, blocks = draw.choice((4, 6, 16)), draw.choice((None, 2, 6)), draw.choice((1, 2, 4))
    parallel = ParallelFacts(num_blocks=blocks, tp_unit=unit)
    spec = SimpleNamespace(global_batch=global_batch, sequence_length=12)
    facts: Any = SimpleNamespace(spec=spec, parallel=parallel)
    degrees, left_out = legal_degrees(facts, draw.choice((2, 3, 4)), device=draw.choice(("cpu", "cuda")))
    ways = [{}, *degrees]
    space = generate(offered, global_batch=global_batch, degrees=ways, degrees_left_out=left_out)
    apart = list(one_by_one(offered, ways, global_batch))
    assert len(space.candidates) == len(set(space.candidates)) == len(apart) and set(space.candidates) == set(apart)
    for knob, values in space.values.items():
        assert set(values) == {getattr(config, knob) for config in apart}
    assert [family.family for family in space.left_out] == [found.family for found in left_out]


@pytest.mark.parametrize(("gpus", "batch", "used"), [(8, 100, 5), (8, 64, 8), (6, 64, 4), (3, 64, 2), (2, 3, None)])
def test_where_not_all_gpus_divide_the_batch_as_many_are_used_as_can_be(gpus: int, batch: int, used: int | None):
    spec, parallel = SimpleNamespace(global_batch=batch, sequence_length=None), ParallelFacts(num_blocks=0)
    facts: Any = SimpleNamespace(spec=spec, parallel=parallel)
    degrees, left_out = legal_degrees(facts, gpus, device="cuda")
    worlds = {math.prod(one.get(knob, 1) for knob in ("dp_replicate", "dp_shard", "tp", "pp")) for one in degrees}
    assert worlds == ({used} if used else set())
    assert any(one.knob == "dp" for one in left_out) is (used != gpus)
    heads: Any = SimpleNamespace(spec=spec, parallel=ParallelFacts(num_blocks=12, tp_unit=12))
    assert (used is None) or any(one == {"dp_replicate": used} for one in legal_degrees(heads, gpus, device="cuda")[0])
    over_nodes, _ = legal_degrees(facts, gpus, device="cuda", ranks_per_node=max(1, gpus // 2))
    assert bool(over_nodes) is (used == gpus), "each node has as many ranks"


PIPELINE = {"dp_replicate": 2, "pp": 2, "pp_microbatches": 2}
WAYS = ({}, {"dp_replicate": 2}, {"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2}, PIPELINE)


def test_gradients_are_scattered_at_every_micro_step_wherever_that_means_something():
    space = generate(CHOICES, global_batch=12, degrees=(*WAYS, {"dp_shard": 2, "pp": 2, "pp_microbatches": 2}))
    assert len(set(space.candidates)) == len(space.candidates)
    assert space.values["gradient_sync"] == ("last", "every")
    several = {c for c in space.candidates if c.dp_shard > 1 and c.pp == 1 and c.accumulation(12) > 1}
    every = {c for c in space.candidates if c.gradient_sync == "every"}
    assert every and several == every | {c.model_copy(update={"gradient_sync": "last"}) for c in every}
    asked = generate(CHOICES, global_batch=12, degrees=WAYS, bounds={"gradient_sync": Bound(values=("last",))})
    assert {c.gradient_sync for c in asked.candidates} == {"last"}
    for named in ({"fixed": {"gradient_sync": "every"}}, {"bounds": {"gradient_sync": Bound(values=("every",))}}):
        asked = generate(CHOICES, global_batch=12, degrees=WAYS, **named)  # type: ignore[arg-type]
        assert set(asked.candidates) == {c for c in every if (c.dp_shard, c.pp) == (2, 1)}


@pytest.mark.parametrize(
    ("fixed", "text"),
    [
        ({"gradient_sync": "every", "dp_replicate": 2, "dp_shard": 1}, "needs dp_shard >= 2"),
        ({"gradient_sync": "every", "pp": 2}, "needs dp_shard >= 2"),
        (
            {"gradient_sync": "every", "dp_shard": 2, "dp_replicate": 1, "micro_batch": 6},
            "several micro-batches per step",
        ),
    ],
)
def test_a_knob_of_data_parallelism_in_the_wrong_place_says_why(fixed: dict[str, object], text: str):
    with pytest.raises(ConfigError) as caught:
        generate(CHOICES, global_batch=12, degrees=WAYS, fixed=fixed)
    assert caught.value.hint is not None and text in caught.value.hint


def columns(*peaks: float, times: tuple[float, ...] = ()) -> CostTable:
    """The columns that matter here."""
    peak = np.array(peaks)
    step = np.array(times or [1.0] * len(peaks))
    rest = dict.fromkeys(CostTable.__dataclass_fields__, step)
    bounds = {
        "peak_memory_bytes": peak,
        "peak_memory_low_bytes": 0.8 * peak,
        "peak_memory_high_bytes": 1.2 * peak,
        "step_time_low_s": 0.9 * step,
    }
    return CostTable(**(rest | bounds))  # type: ignore[arg-type]


def test_what_cannot_fit_is_dropped_by_family_with_by_how_much():
    configs = [TrainingConfig(micro_batch=m, precision=p) for m in (1, 8) for p in ("fp32", "bf16")]
    table = columns(2**30, 2.4 * 2**30, 4 * 2**30, 5 * 2**30)
    kept, families = keep_what_may_win(configs, table, 2 * 2**30, "cpu")
    assert kept == [0, 1]  # the second may be too big, and may not
    assert [(family.configurations, "2.00 GiB too much" in family.by) for family in families] == [(2, True)]


def test_gradients_are_scattered_at_every_micro_step_only_where_memory_asks_for_it():
    configs = [
        TrainingConfig.model_validate({"micro_batch": m, "dp_shard": 2, "gradient_sync": sync})
        for m in (1, 2, 4)
        for sync in ("last", "every")
    ]
    # of 10 GiB: last fits at 1, may fit at 2, cannot at 4
    table = columns(*(g * 2**30 for g in (8, 5, 9, 6, 14, 8)), times=(1.0, 1.2, 1.0, 1.1, 1.0, 1.05))
    kept, families = keep_what_may_win(configs, table, 10 * 2**30, "cuda")
    assert kept == [0, 2, 3, 5]
    needless = next(family for family in families if family.family == "gradient_sync=every")
    assert needless.configurations == 1 and "16.7%" in needless.by and "sends less" in needless.limit
    fixed = keep_what_may_win(configs[1::2], columns(5.0, 6.0, 8.0), 10 * 2**30, "cuda")
    assert fixed == ([0, 1, 2], [])


def test_growing_segments_are_tried_on_cuda_only_where_memory_asks_for_them():
    configs = [
        TrainingConfig.model_validate({"micro_batch": m, "allocator": allocator})
        for m in (1, 2, 4)
        for allocator in ("own", "expandable")
    ]
    table = columns(*(g * 2**30 for g in (6, 6, 9, 9, 14, 14)), times=(1.0, 1.0, 0.9, 0.9, 0.8, 0.8))
    kept, families = keep_what_may_win(configs, table, 10 * 2**30, "cuda")
    assert kept == [0, 2, 3], "at 2 the plain one may not fit"
    assert any(family.family == "allocator=expandable" for family in families)
    kept_on_cpu = [config.model_copy(update={"allocator": "keep"}) for config in configs[1::2]]
    table = columns(*(g * 2**30 for g in (6, 6, 6)), times=(1.0, 1.0, 1.0))
    assert keep_what_may_win([*kept_on_cpu], table, 10 * 2**30, "cpu")[0] == [0, 1, 2], "there it saves time"


def test_fp8_is_tried_only_where_it_is_predicted_to_gain_unless_it_was_named():
    configs = [
        TrainingConfig.model_validate({"micro_batch": m, "precision": "bf16", "compile": c, "fp8": fp8})
        for m, c in ((1, "off"), (1, "block"), (2, "block"))
        for fp8 in ("off", "tensorwise")
    ]
    table = columns(*[2**30] * 6, times=(1.0, 1.3, 0.8, 0.8, 0.7, 0.6))
    kept, families = keep_what_may_win(configs, table, 2 * 2**30, "cuda")
    assert kept == [0, 2, 4, 5]
    said = {family.family: (family.limit, family.by, family.configurations) for family in families}
    assert set(said) == {"fp8=tensorwise, not compiled", "fp8=tensorwise, compiled"}
    limit, by, count = said["fp8=tensorwise, not compiled"]
    assert limit.startswith("no gain: the same with fp8=off") and "23.1% slower" in by and count == 1
    assert keep_what_may_win(configs, table, 2 * 2**30, "cuda", named={"fp8"}) == ([0, 1, 2, 3, 4, 5], [])
    alone = [config for config in configs if config.fp8 != "off"]
    assert keep_what_may_win(alone, columns(*[2**30] * 3), 2 * 2**30, "cuda")[0] == [0, 1, 2], "nothing to compare with"


def test_fp8_is_no_value_of_precision():
    with pytest.raises(ConfigError, match="a knob beside precision=bf16") as caught:
        parse_knob("precision=fp8")
    assert "--fix fp8=tensorwise" in (caught.value.hint or "") + (caught.value.flag_hint or "")


def test_on_cpu_the_ranks_share_the_memory_and_on_cuda_each_has_its_own():
    configs = [TrainingConfig(micro_batch=1), TrainingConfig(micro_batch=1, dp_replicate=2)]
    table = columns(1.9 * 2**30, 1.9 * 2**30)
    assert keep_what_may_win(configs, table, 2 * 2**30, "cpu")[0] == [0]
    assert keep_what_may_win(configs, table, 2 * 2**30, "cuda")[0] == [0, 1]


def test_a_very_large_space_keeps_the_fastest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prune_module, "MAX_CANDIDATES", 2)
    configs = [TrainingConfig(micro_batch=m) for m in (1, 2, 4, 8)]
    table = columns(1.0, 1.0, 1.0, 1.0, times=(3.0, 1.0, 4.0, 2.0))
    kept, families = keep_what_may_win(configs, table, 2**30, "cpu")
    assert kept == [1, 3]
    assert families[0].configurations == 2
    assert "2.70 times" in families[0].by


GPU_CONFIGS = tuple(
    TrainingConfig.model_validate({"micro_batch": size, "precision": precision, "compile": scope, "compile_mode": mode})
    for size in (1, 32)
    for precision in ("fp32", "tf32", "bf16", "fp16")
    for scope, mode in (("off", "default"), ("model", "default"), ("model", "reduce-overhead"))
)


def twins(
    rates: dict[str, float], *, named: tuple[str, ...] = (), stored_in_fp32: bool = True, spread: float = 0.05
) -> Space:
    """The rest of GPU_CONFIGS on a device of those rates, where micro-batches of 32 hide the launches."""
    values = {"precision": ("fp32", "tf32", "bf16", "fp16"), "compile_mode": ("default", "reduce-overhead")}
    return without_twins(
        Space(candidates=ConfigTable.of(GPU_CONFIGS), left_out=(), values=values),
        device(spread, **rates).model_copy(update={"type": "cuda"}),
        named=named,
        stored_in_fp32=stored_in_fp32,
        sequence_length=1024,
        launch_over_work=lambda configs: np.array([2.0 if config.micro_batch == 1 else 0.1 for config in configs]),
    )


def test_a_precision_that_was_measured_to_lose_is_left_out_with_the_numbers():
    space = twins({"float32": 100e9, "bfloat16": 10e9})
    assert {config.precision for config in space.candidates} == {"fp32", "tf32", "fp16"}
    family = next(family for family in space.left_out if family.family == "precision=bf16")
    assert "90% slower" in family.by and family.configurations == 6


def test_a_slow_precision_that_the_user_named_is_obeyed():
    space = twins({"float32": 100e9, "bfloat16": 10e9}, named=("precision",))
    assert "bf16" in {config.precision for config in space.candidates}


@pytest.mark.parametrize(("rate", "stays"), [(40e9, True), (10e9, False)])
def test_a_precision_is_left_out_by_uncertain_rates_only_where_they_are_far_apart(rate: float, stays: bool):
    """What a brief look or a busy machine says: the same rates lose where they were measured well."""
    rates = {"float32": 100e9, "bfloat16": rate}
    assert ("bf16" in {config.precision for config in twins(rates, spread=0.5).candidates}) == stays
    assert "bf16" not in {config.precision for config in twins(rates).candidates}


def test_fp16_and_compiled_fp32_are_left_out_where_bf16_is_as_fast():
    space = twins({"float32": 50e12, "bfloat16": 600e12, "float16": 610e12})
    assert {config.precision for config in space.candidates} == {"fp32", "tf32", "bf16"}
    assert {config.compile for config in space.candidates if config.precision == "fp32"} == {"off"}
    assert {config.compile for config in space.candidates if config.precision == "tf32"} == {"off", "model"}
    assert space.values["precision"] == ("fp32", "tf32", "bf16")
    families = {family.family: family for family in space.left_out}
    assert families["precision=fp16"].configurations == 6
    assert "600 TFLOP/s in bf16, 610 in fp16" in families["precision=fp16"].by


@pytest.mark.parametrize(
    ("rates", "options"),
    [
        ({"float32": 8e12, "float16": 50e12}, {}),  # bf16 was not measured
        ({"float32": 8e12, "bfloat16": 8e12, "float16": 50e12}, {}),  # a GPU that emulates bf16
        ({"float32": 50e12, "bfloat16": 600e12, "float16": 610e12}, {"named": ("precision",)}),
    ],
)
def test_fp16_and_compiled_fp32_stay_where_bf16_is_slow_or_the_user_named_them(rates, options):
    space = twins(rates, **options)
    assert {config.precision for config in space.candidates} == {"fp32", "tf32", "bf16", "fp16"}
    assert {config.compile for config in space.candidates if config.precision == "fp32"} == {"off", "model"}


def test_in_doubt_bf16_is_tried_and_fp16_is_not():
    """The first rates of a GPU whose clock has not risen yet: fp16 comes later and looks faster."""
    rates = {"float32": 50e12, "bfloat16": 500e12, "float16": 610e12}
    assert "fp16" in {config.precision for config in twins(rates).candidates}
    assert "fp16" not in {config.precision for config in twins(rates, spread=0.4).candidates}


def attention(share: float, *, length: int, named: tuple[str, ...] = ()) -> set[str]:
    """The kinds of attention that are left where the single operations reach a share of the fused kernel's rate."""
    configs = [
        TrainingConfig.model_validate({"micro_batch": 8, "attention": kind}) for kind in ("own", "eager", "sdpa")
    ]
    readings = tuple(
        OperationReading.model_validate(
            {
                "kind": kind,
                "dtype": dtype,
                "shape": (8, 12, 1024, 64),
                "seconds": {"value": 1 / rate, "unit": "s", "provenance": "measured"},
                "rate": {"value": rate, "unit": "flop/s", "provenance": "measured", "spread": 0.01},
            }
        )
        for dtype in ("float32", "bfloat16")
        for kind, rate in (("sdpa_train", 2e13), ("eager_attention_train", share * 2e13))
    )
    space = without_twins(
        Space(candidates=ConfigTable.of(configs), left_out=(), values={"attention": ("own", "eager", "sdpa")}),
        device(0.05).model_copy(update={"type": "cuda", "operations": readings}),
        named=named,
        stored_in_fp32=True,
        sequence_length=length,
        launch_over_work=lambda configs: np.ones(len(configs)),
    )
    return {config.attention for config in space.candidates}


def test_attention_in_single_operations_is_left_out_where_it_was_measured_to_lose():
    assert attention(0.45, length=1024) == {"own", "sdpa"}
    assert attention(0.6, length=1024) == {"own", "sdpa", "eager"}
    assert attention(0.45, length=128) == {"own", "sdpa", "eager"}, "shorter than what was measured"
    assert attention(0.45, length=1024, named=("attention",)) == {"own", "sdpa", "eager"}


def test_a_model_that_is_stored_in_bf16_keeps_its_plain_precision_compiled():
    space = twins({"float32": 50e12, "bfloat16": 600e12, "float16": 610e12}, stored_in_fp32=False)
    assert {config.compile for config in space.candidates if config.precision == "fp32"} == {"off", "model"}


def test_cuda_graphs_are_left_out_where_launches_hide_behind_the_work():
    space = twins({})
    graphs = [config for config in space.candidates if config.compile_mode == "reduce-overhead"]
    assert {config.micro_batch for config in graphs} == {1}
    (family,) = space.left_out
    assert family.configurations == 4 and "10% to 10% of the work" in family.by
    assert tuple(twins({}, named=("compile_mode",)).candidates) == GPU_CONFIGS


def test_reading_bounds():
    assert parse_bound("micro_batch=1..8") == ("micro_batch", Bound(low=1, high=8))
    assert parse_bound("micro-batch=..8") == ("micro_batch", Bound(low=None, high=8))
    assert parse_knob("gradient-sync=every") == ("gradient_sync", "every")
    assert parse_bound("gradient_sync=last,every") == ("gradient_sync", Bound(values=("last", "every")))
    assert parse_bound("precision=fp32,bf16") == ("precision", Bound(values=("fp32", "bf16")))
    for text in (
        "micro_batch",
        "micro_batch=8..1",
        "precision=fp32..bf16",
        "gradient_sync=first",
        "colour=1..2",
        "precision=fp99",
    ):
        with pytest.raises(ConfigError):
            parse_bound(text)


OFFLOAD = Choices(knob="offload", values=("none", "optimizer", "activations"))


def test_offload_is_held_back_until_nothing_else_is_sure_to_fit():
    choices = (Choices(knob="micro_batch", values=(1, 2)), OFFLOAD)
    held = held_back(choices, ())
    assert held == (("offload", "optimizer"), ("offload", "activations")) and held_back(choices, ("offload",)) == ()
    narrow = generate(without_last_resorts(choices, ()), global_batch=2)
    assert {config.offload for config in narrow.candidates} == {"none"}
    fixed = generate(without_last_resorts(choices, {"offload"}), global_batch=2, fixed={"offload": "optimizer"})
    assert {config.offload for config in fixed.candidates} == {"optimizer"}
    fits, barely = columns(6 * 2**30, 14 * 2**30), columns(9 * 2**30, 14 * 2**30)  # the high end is 1.2 times that
    families = needless_last_resorts(held, narrow.candidates, fits, 10 * 2**30, "cuda")
    assert families is not None and [family.family for family in families] == [
        "offload=optimizer",
        "offload=activations",
    ]
    assert "1 of 2 are predicted to fit, the smallest in 7.20 GiB of 10.0 GiB" in families[0].by
    assert needless_last_resorts(held, narrow.candidates, barely, 10 * 2**30, "cuda") is None
    wide = generate(choices, global_batch=2)
    assert len(wide.candidates) == 3 * len(narrow.candidates)


def test_what_the_host_cannot_hold_is_left_out_with_both_numbers():
    configs = [
        TrainingConfig.model_validate({"micro_batch": 1, "dp_shard": 2, "offload": value})
        for value in ("none", "optimizer", "parameters")
    ]
    table = dataclasses.replace(columns(*[12 * 2**30] * 3), host_bytes=np.array([0.0, 20.0, 40.0]) * 2**30)
    kept, families = keep_what_may_win(configs, table, 10 * 2**30, "cuda", host_limit_bytes=48 * 2**30)
    assert kept == [0, 1]
    assert [family.family for family in families] == ["offload=parameters on 2 ranks"]
    assert "48.0 GiB" in families[0].limit and "80.0 GiB, 32.0 GiB too much" in families[0].by
    assert keep_what_may_win(configs, table, 10 * 2**30, "cuda")[0] == [0, 1, 2]


def test_a_search_in_which_nothing_fits_says_what_the_host_lacks():
    configs = (TrainingConfig(micro_batch=1, offload="optimizer"),)
    parts = SimpleNamespace(activations=[2.0**31], gradients=[2.0**30], optimizer=[2.0**31])
    table = dataclasses.replace(columns(6 * 2**30), host_bytes=np.array([20.0]) * 2**30, memory=parts)
    kept, families = keep_what_may_win(configs, table, 10 * 2**30, "cuda", host_limit_bytes=8 * 2**30)
    context = SimpleNamespace(
        left_out=families,
        space=SimpleNamespace(candidates=ConfigTable.of(configs)),
        estimator=SimpleNamespace(outlook=lambda _: table, table=lambda _: table),
        device="cuda",
        memory_limit_bytes=10 * 2**30,
        spec=SimpleNamespace(sequence_length=None),
        profile=SimpleNamespace(parameters=1e6, trainable=1e6),
    )
    _, reason, hint = nothing_fits(SimpleNamespace(finish=lambda *said: said), context)
    assert kept == [] and "8.00 GiB for all ranks" in reason and "20.0 GiB, 12.0 GiB too much" in reason
    assert "more of it" in hint and "LoRA" in hint and "--seq-len" not in hint


def test_the_baseline_is_offloaded_only_where_nothing_else_may_fit():
    def needed(*configs: TrainingConfig) -> str:
        def predict(config: TrainingConfig) -> SimpleNamespace:
            return SimpleNamespace(peak_memory_bytes={"optimizer": 4.0, "activations": 5.0}[config.offload])

        return needed_offload(SimpleNamespace(context=SimpleNamespace(candidates=configs), predict=predict))

    plain, states, activations, shards = (
        TrainingConfig(micro_batch=2, offload=value) for value in ("none", "optimizer", "activations", "parameters")
    )
    shards = shards.model_copy(update={"dp_shard": 2})
    assert needed(plain, states) == needed(shards) == needed(plain) == needed() == "none"
    assert needed(activations, states, shards) == "optimizer"
