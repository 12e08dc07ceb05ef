"""Every way to share the work over ranks, against one plain fp32 process at the same global batch.

Batches count differently many tokens per sample; the optimizer is SGD, so that a change is as large as its gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

import pytest
import torch

from autoplan.processes import Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.run import TrainingRun
from tests.strategies.parallel.world import (
    LLAMA_PLAN,
    MODELS,
    Case,
    Plant,
    Steps,
    build_asking_gpt2,
    build_frozen_gpt2,
    differences,
    fsdp_groups,
)

# Largest relative difference that passes: of the norm per parameter, and of the tensor itself.
NORM, TENSOR = 2e-5, 1e-4
LOW_NORM, LOW_TENSOR = 2e-2, 5e-2  # bf16 and fp16: 8 and 11 bits of mantissa

DATA = {
    "ddp": {"dp_replicate": 2},
    "fsdp": {"dp_shard": 2},
    "fsdp_kept": {"dp_shard": 2, "reshard_after_forward": False},
    "fsdp_every": {"dp_shard": 2, "gradient_sync": "every"},
    "fsdp_kept_every": {"dp_shard": 2, "reshard_after_forward": False, "gradient_sync": "every"},
}
TENSOR_PARALLEL = {"tp": {"tp": 2, "micro_batch": 4}}
PIPELINE = {
    "gpipe": {"pp": 2, "pp_microbatches": 4, "pp_schedule": "gpipe"},
    "1f1b": {"pp": 2, "pp_microbatches": 4},
    "1f1b_two_passes": {"pp": 2, "pp_microbatches": 2},
    "interleaved": {"pp": 2, "pp_microbatches": 4, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2},
    "zero_bubble": {"pp": 2, "pp_microbatches": 4, "pp_schedule": "zero_bubble", "virtual_stages": 2},
}
FOUR_RANKS = {
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "hsdp_every": {"dp_replicate": 2, "dp_shard": 2, "gradient_sync": "every", "micro_batch": 1},
    "tp_fsdp": {"tp": 2, "dp_shard": 2},
    "tp_fsdp_every": {"tp": 2, "dp_shard": 2, "gradient_sync": "every"},
    "tp_replicas": {"tp": 2, "dp_replicate": 2},
    "pp_ddp": {"pp": 2, "pp_microbatches": 2, "dp_replicate": 2},
    "pp_fsdp": {"pp": 2, "pp_microbatches": 2, "dp_shard": 2, "reshard_after_forward": False},
    "pp_tp": {"pp": 2, "pp_microbatches": 4, "tp": 2},
    "interleaved_fsdp": {
        "pp": 2,
        "pp_microbatches": 2,
        "dp_shard": 2,
        "pp_schedule": "interleaved_1f1b",
        "virtual_stages": 2,
        "reshard_after_forward": False,
    },
}
WITH_OTHERS = {
    "fsdp_checkpointing": {"dp_shard": 2, "checkpointing": "selective"},
    "tp_checkpointing": {"tp": 2, "checkpointing": "full"},
    "tp_fused_loss": {"tp": 2, "loss": "fused"},
    "pp_fused_loss": {"pp": 2, "pp_microbatches": 4, "loss": "fused"},
    "pp_checkpointing": {"pp": 2, "pp_microbatches": 4, "checkpointing": "every_2"},
    "fsdp_parameters_on_host": {"dp_shard": 2, "offload": "parameters"},
    "fsdp_every_activations_on_host": {"dp_shard": 2, "gradient_sync": "every", "offload": "activations"},
    "fsdp_fused_step": {"dp_shard": 2, "optimizer_step": "foreach"},
}
LOW_PRECISION = {
    f"{name}_{precision}": knobs | {"precision": precision}
    for precision in ("bf16", "fp16")
    for name, knobs in {
        "fsdp": {"dp_shard": 2},
        "fsdp_every": {"dp_shard": 2, "gradient_sync": "every"},
        "tp": {"tp": 2},
        "pp": {"pp": 2, "pp_microbatches": 4},
    }.items()
}
COMPILED = {
    "ddp_compile_model": {"dp_replicate": 2, "compile": "model"},
    "fsdp_compile_block": {"dp_shard": 2, "compile": "block"},
    "fsdp_every_compile_block": {"dp_shard": 2, "compile": "block", "gradient_sync": "every"},
    "tp_compile_block": {"tp": 2, "compile": "block"},
    "pp_compile_block": {"pp": 2, "pp_microbatches": 4, "compile": "block"},
}


def config_of(knobs: dict[str, Any]) -> TrainingConfig:
    return TrainingConfig(**({"micro_batch": 2} | knobs))


def cases(
    table: Mapping[str, dict[str, Any]],
    in_make_test: Collection[str],
    model: str = "gpt2",
    plant: Plant | None = None,
    alone: bool = False,
    **options: Any,
) -> list[Any]:
    """A case of each row; those that `make test` leaves out are marked `exhaustive`."""
    assert set(in_make_test) <= set(table), "no such case"
    return [
        pytest.param(
            Case(model=model, config=config_of(knobs), plant=plant, alone=alone, options=options),
            id=f"{model}-{name}",
            marks=[pytest.mark.exhaustive] * (name not in in_make_test),
        )
        for name, knobs in table.items()
    ]


VARIANTS: dict[str, dict[str, Any]] = {
    "frozen": {"build_model": build_frozen_gpt2},
    "not_counted_ahead": {"count": None},
}
ALONE = {model: Case(model=model, config=TrainingConfig(micro_batch=8)) for model in MODELS}
ALONE |= {
    name: Case(model="gpt2", config=TrainingConfig(micro_batch=8), options=options)
    for name, options in VARIANTS.items()
}
"""One step of one plain process."""


@pytest.fixture(scope="module")
def steps(request: pytest.FixtureRequest, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """Those of all cases that are run; their ranks start once."""
    given = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    wanted = [one.params["case"] for one in given if one is not None and "case" in one.params]
    return Steps(zygote, tmp_path_factory.mktemp("steps"), [*wanted, *ALONE.values()])


def check(steps: Steps, case: Case, norm: float, tensor: float) -> None:
    expected, reference = steps.of(ALONE[case.model])
    result, candidate = steps.of(case)
    found = differences(reference, candidate)
    assert found["gradients_norm"] < norm and found["changes_norm"] < norm, found
    assert found["gradients"] < tensor and found["changes"] < tensor, found
    assert result["loss"] == pytest.approx(expected["loss"], rel=norm)
    assert result["norm"] == pytest.approx(expected["norm"], rel=norm)


TWO_RANKS = DATA | TENSOR_PARALLEL | PIPELINE
LIKE_OTHERS = {"fsdp_kept_every", "1f1b_two_passes"}


@pytest.mark.parametrize(
    "case",
    [
        *cases(TWO_RANKS, set(TWO_RANKS) - LIKE_OTHERS),
        *cases(TWO_RANKS, ("fsdp_every", "tp", "1f1b"), model="llama"),
        # a stage of a model that reads its embedding; a tied model with norms on heads
        *cases({name: PIPELINE[name] for name in ("1f1b", "interleaved")}, ("1f1b", "interleaved"), model="vit"),
        *cases({name: TWO_RANKS[name] for name in ("tp", "1f1b")}, ("tp", "1f1b"), model="qwen3"),
        *cases({"tp": TWO_RANKS["tp"]}, ("tp",), model="gemma3"),  # its embedding multiplies
    ],
)
def test_two_ranks_train_the_same(steps: Steps, case: Case) -> None:
    check(steps, case, NORM, TENSOR)
    whole, held = (steps.of(one)[0]["elements"] for one in (ALONE[case.model], case))
    if case.config.dp_shard == 2 and case.config.reshard_after_forward:
        assert held == pytest.approx(whole / 2, rel=0.01)
    if case.config.tp == 2:  # norms, positions and some biases stay whole
        assert held == pytest.approx(whole / 2, rel=0.06)


@pytest.mark.parametrize(
    "case",
    [
        *cases({"own_plan": TENSOR_PARALLEL["tp"]}, ("own_plan",), model="llama", tensor_plan=LLAMA_PLAN),
        *cases({"whole_head": TENSOR_PARALLEL["tp"]}, ("whole_head",), head=None),
        *cases({"whole_head": TENSOR_PARALLEL["tp"]}, ("whole_head",), model="gemma3", head=None),
    ],
)
def test_a_users_own_plan_and_a_head_that_nobody_describes(steps: Steps, case: Case) -> None:
    assert differences(steps.of(ALONE[case.model])[1], steps.of(case)[1])["gradients"] < TENSOR


@pytest.mark.parametrize("case", cases(FOUR_RANKS, ("hsdp_every", "tp_fsdp", "pp_fsdp", "pp_tp")))
def test_four_ranks_train_the_same(steps: Steps, case: Case) -> None:
    check(steps, case, NORM, TENSOR)


@pytest.mark.parametrize(
    "case",
    cases(WITH_OTHERS, ("fsdp_checkpointing", "tp_fused_loss", "pp_checkpointing", "fsdp_every_activations_on_host")),
)
def test_with_the_techniques_of_one_device(steps: Steps, case: Case) -> None:
    check(steps, case, NORM, TENSOR)


@pytest.mark.parametrize("case", cases(LOW_PRECISION, ("fsdp_bf16", "fsdp_every_fp16", "tp_fp16", "pp_bf16")))
def test_low_precision_stays_within_its_tolerance(steps: Steps, case: Case) -> None:
    check(steps, case, LOW_NORM, LOW_TENSOR)


EACH = DATA | TENSOR_PARALLEL | {"1f1b": PIPELINE["1f1b"]}
FEW = ("ddp", "fsdp_every", "tp", "1f1b")


@pytest.mark.parametrize("case", cases(EACH, FEW, **VARIANTS["frozen"]))
def test_parameters_that_do_not_train(steps: Steps, case: Case) -> None:
    expected, reference = steps.of(ALONE["frozen"])
    result, candidate = steps.of(case)
    found = differences(reference, candidate)
    assert max(found["gradients"], found["changes"]) < TENSOR and found["changes_norm"] < NORM, found
    assert not candidate["changes"]["transformer.wte.weight"].any()
    assert result["loss"] == pytest.approx(expected["loss"], rel=NORM)


@pytest.mark.parametrize("case", cases(EACH, FEW, **VARIANTS["not_counted_ahead"]))
def test_a_workload_that_cannot_count_before_its_loss_has_run(steps: Steps, case: Case) -> None:
    """Gradients are scaled to the real count after this test reads them."""
    expected, reference = steps.of(ALONE["not_counted_ahead"])
    result, candidate = steps.of(case)
    found = differences(reference, candidate)
    assert found["changes"] < TENSOR and found["changes_norm"] < NORM, found
    assert result["loss"] == pytest.approx(expected["loss"], rel=NORM)


ASKING = {name: PIPELINE[name] for name in ("1f1b", "interleaved")}


@pytest.mark.parametrize("case", cases(ASKING, ASKING, build_model=build_asking_gpt2))
def test_a_model_that_asks_its_blocks(steps: Steps, case: Case) -> None:
    check(steps, case, NORM, TENSOR)


DEFERRED = {name: EACH[name] | {"loss": "fused"} for name in ("ddp", "fsdp", "tp", "1f1b")}


@pytest.mark.parametrize("case", cases(DEFERRED, DEFERRED, model="llama", head=None))
def test_deferred_logits_over_ranks(steps: Steps, case: Case) -> None:
    """The fused loss of the user's own loss function, whether the ranks share the head or not."""
    _, reference = steps.of(ALONE["llama"])
    _, candidate = steps.of(case)
    assert max(differences(reference, candidate).values()) < TENSOR


def graphs_alone(run: TrainingRun | None) -> None:
    """Blocks are compiled to their graphs, and no code is generated for these: that takes half a minute each."""
    if run is None:
        torch.compile = functools.partial(torch.compile, backend="aot_eager")


GRAPHS = {f"{name}_graphs": COMPILED[name] for name in ("fsdp_every_compile_block", "tp_compile_block")}


@pytest.mark.parametrize(
    "case",
    [*cases(GRAPHS, GRAPHS, plant=graphs_alone, alone=True), *cases(COMPILED, (), alone=True)],
)
def test_compiled_blocks_train_the_same(steps: Steps, case: Case) -> None:
    check(steps, case, NORM, TENSOR)


# Planted bugs: each must be seen.


def no_gradient_sync(run: TrainingRun | None) -> None:
    """The all-reduce of DDP (or FSDP2's reduce-scatter) never happens."""
    if run is not None:
        set_sync = run._build.hooks.set_sync
        run._build.hooks.set_sync = lambda sync: set_sync(False)


def wrong_scale(run: TrainingRun | None) -> None:
    """The average over ranks is taken for a sum."""
    if run is not None:
        run._build.gradients.ranks = 1


def micro_steps_averaged(run: TrainingRun | None) -> None:
    """Gradients that were scattered before are averaged with the new ones, where they should be added to."""
    if run is not None:
        run._build.gradients.ranks /= run.accumulation


def replicas_apart(run: TrainingRun | None) -> None:
    """Replicas of shards (HSDP) share the last micro-step's gradients alone: what was scattered before is dropped."""
    if run is not None:
        set_sync = run._build.hooks.set_sync
        module = run._build.module

        def forget(sync: bool) -> None:
            set_sync(sync)
            for group in fsdp_groups(module):
                group._partial_reduce_output = None

        run._build.hooks.set_sync = forget


def embedding_not_summed(run: TrainingRun | None) -> None:
    """Each rank keeps the rows that it found, and zeros for the others'."""
    from autoplan.strategies.techniques import tensor_parallel

    tensor_parallel.sum_whole = lambda mesh, partial: partial


def norm_gradients_not_summed(run: TrainingRun | None) -> None:
    """Gradients of norms are those of this rank's part of the sequence."""
    from torch.distributed.tensor import Replicate

    from autoplan.strategies.techniques import tensor_parallel

    original = tensor_parallel.local
    tensor_parallel.local = lambda parameter, *gradient: original(parameter, *[Replicate() for _ in gradient])


def untied_over_stages(run: TrainingRun | None) -> None:
    """The two stages that hold the tied embedding keep their gradients to themselves."""
    if run is not None:
        run._build.gradients.finish.clear()


def head_untied(run: TrainingRun | None) -> None:
    """Head and embedding become two parameters when they are split."""
    from torch import nn

    from autoplan.strategies.techniques.tensor_parallel import _Splitter

    original = _Splitter.split_head

    def split_head(self: Any, linear: nn.Module) -> None:
        linear.weight = nn.Parameter(linear.weight.detach().clone())
        original(self, linear)

    _Splitter.split_head = split_head  # type: ignore[method-assign]


def plain_shard_of_fused_weight(run: TrainingRun | None) -> None:
    """Query, key and value are cut as if they were one matrix."""
    from torch.distributed.tensor import Shard

    from autoplan.strategies.techniques import tensor_parallel

    tensor_parallel._StridedShard = lambda dim, split_factor: Shard(dim)  # type: ignore[assignment]


OF_THE_RUN = [
    (no_gradient_sync, {"ddp": DATA["ddp"]}),
    (wrong_scale, {name: DATA[name] for name in ("ddp", "fsdp", "fsdp_every")}),
    (wrong_scale, {"pp_ddp": FOUR_RANKS["pp_ddp"]}),
    (micro_steps_averaged, {"fsdp_every": DATA["fsdp_every"]}),
    (replicas_apart, {"hsdp_every": FOUR_RANKS["hsdp_every"]}),
]
OF_THE_RANK = [
    (embedding_not_summed, TENSOR_PARALLEL),
    (norm_gradients_not_summed, TENSOR_PARALLEL),
    (head_untied, TENSOR_PARALLEL),
    (plain_shard_of_fused_weight, TENSOR_PARALLEL),
    (untied_over_stages, {"1f1b": PIPELINE["1f1b"]}),
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(*given.values, id=f"{plant.__name__}-{given.id}")
        for planted, alone in ((OF_THE_RUN, False), (OF_THE_RANK, True))
        for plant, table in planted
        for given in cases(table, table, plant=plant, alone=alone)
    ],
)
def test_a_planted_bug_is_seen(steps: Steps, case: Case) -> None:
    _, reference = steps.of(ALONE["gpt2"])
    try:
        _, candidate = steps.of(case)
        found = differences(reference, candidate)
    except AssertionError as error:  # the copies of a tied weight differ, or a parameter too many
        assert case.alone and ("differ" in str(error) or "lm_head" in str(error))
        return
    assert max(found["gradients_norm"], found["changes_norm"]) > 5 * LOW_NORM, found  # seen at any precision
