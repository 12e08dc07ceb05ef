"""Every way to share the work over ranks, against one plain fp32 process at the same global batch.

Batches count differently many tokens per sample; the optimizer is SGD, so that a change is as large as its gradient.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autoplan.processes import Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.run import TrainingRun
from tests.cases import some
from tests.strategies.parallel.world import build_frozen_gpt2, differences, fsdp_groups, run_step

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


def check(
    zygote: Zygote, plain: Any, folder: Path, model: str, knobs: dict[str, Any], norm: float, tensor: float
) -> None:
    expected, reference = plain(model)
    result, candidate = run_step(zygote, model, config_of(knobs), folder, deadline_s=240.0)
    found = differences(reference, candidate)
    assert found["gradients_norm"] < norm and found["changes_norm"] < norm, found
    assert found["gradients"] < tensor and found["changes"] < tensor, found
    assert result["loss"] == pytest.approx(expected["loss"], rel=norm)
    assert result["norm"] == pytest.approx(expected["norm"], rel=norm)


TWO_RANKS = [(model, name) for model in ("gpt2", "llama") for name in [*DATA, *TENSOR_PARALLEL, *PIPELINE]]
LIKE_OTHERS = {("gpt2", name) for name in ("fsdp_kept_every", "1f1b_two_passes")}
RUN = [case for case in TWO_RANKS if case[0] == "gpt2" or case[1] in ("fsdp_every", "tp", "1f1b")]


@pytest.mark.parametrize(("model", "name"), some(TWO_RANKS, set(RUN) - LIKE_OTHERS))
def test_two_ranks_train_the_same(zygote: Zygote, plain: Any, tmp_path: Path, model: str, name: str) -> None:
    knobs = (DATA | TENSOR_PARALLEL | PIPELINE)[name]
    check(zygote, plain, tmp_path, model, knobs, NORM, TENSOR)


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_a_stage_of_a_model_that_reads_its_embedding(zygote: Zygote, plain: Any, tmp_path: Path, name: str) -> None:
    check(zygote, plain, tmp_path, "vit", PIPELINE[name], NORM, TENSOR)


@pytest.mark.parametrize("name", ["tp", "1f1b"])
def test_a_tied_model_with_norms_on_heads(zygote: Zygote, plain: Any, tmp_path: Path, name: str) -> None:
    check(zygote, plain, tmp_path, "qwen3", (TENSOR_PARALLEL | PIPELINE)[name], NORM, TENSOR)


@pytest.mark.parametrize("name", some(FOUR_RANKS, ("hsdp_every", "tp_fsdp", "pp_fsdp", "pp_tp")))
def test_four_ranks_train_the_same(zygote: Zygote, plain: Any, tmp_path: Path, name: str) -> None:
    check(zygote, plain, tmp_path, "gpt2", FOUR_RANKS[name], NORM, TENSOR)


@pytest.mark.parametrize(
    "name",
    some(WITH_OTHERS, ("fsdp_checkpointing", "tp_fused_loss", "pp_checkpointing", "fsdp_every_activations_on_host")),
)
def test_with_the_techniques_of_one_device(zygote: Zygote, plain: Any, tmp_path: Path, name: str) -> None:
    check(zygote, plain, tmp_path, "gpt2", WITH_OTHERS[name], NORM, TENSOR)


@pytest.mark.parametrize("name", some(LOW_PRECISION, ("fsdp_bf16", "fsdp_every_fp16", "tp_fp16", "pp_bf16")))
def test_low_precision_stays_within_its_tolerance(zygote: Zygote, plain: Any, tmp_path: Path, name: str) -> None:
    check(zygote, plain, tmp_path, "gpt2", LOW_PRECISION[name], LOW_NORM, LOW_TENSOR)


@pytest.fixture(scope="module")
def plain_variants(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One step of one plain process for each variant of the workload."""
    folder, config = tmp_path_factory.mktemp("variants"), TrainingConfig(micro_batch=8)
    return {case: run_step(zygote, "gpt2", config, folder, **options) for case, options in VARIANTS.items()}


VARIANTS: dict[str, dict[str, Any]] = {
    "frozen": {"build_model": build_frozen_gpt2},
    "not_counted_ahead": {"count": None},
}
EACH = DATA | TENSOR_PARALLEL | {"1f1b": PIPELINE["1f1b"]}


@pytest.mark.parametrize("name", some(EACH, ("ddp", "fsdp_every", "tp", "1f1b")))
@pytest.mark.parametrize("case", VARIANTS)
def test_frozen_parameters_and_late_counts(
    zygote: Zygote, plain_variants: dict[str, Any], tmp_path: Path, name: str, case: str
) -> None:
    """Parameters that do not train; a workload that cannot count before its loss has run."""
    expected, reference = plain_variants[case]
    result, candidate = run_step(zygote, "gpt2", config_of(EACH[name]), tmp_path, **VARIANTS[case])
    found = differences(reference, candidate)
    if case == "frozen":  # gradients are scaled to the real count after this test reads them
        assert found["gradients"] < TENSOR, found
        assert not candidate["changes"]["transformer.wte.weight"].any()
    assert found["changes"] < TENSOR and found["changes_norm"] < NORM, found
    assert result["loss"] == pytest.approx(expected["loss"], rel=NORM)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp", "tp", "1f1b"])
def test_deferred_logits_over_ranks(zygote: Zygote, plain: Any, tmp_path: Path, name: str) -> None:
    """The fused loss of the user's own loss function, whether the ranks share the head or not."""
    _, reference = plain("llama")
    _, candidate = run_step(zygote, "llama", config_of(EACH[name] | {"loss": "fused"}), tmp_path, head=None)
    assert max(differences(reference, candidate).values()) < TENSOR


@pytest.mark.slow
@pytest.mark.parametrize("name", some(COMPILED, ("fsdp_every_compile_block",)))  # each compiles for half a minute
def test_compiled_blocks_train_the_same(zygote: Zygote, plain: Any, tmp_path: Path, name: str) -> None:
    check(zygote, plain, tmp_path, "gpt2", COMPILED[name], NORM, TENSOR)


def test_shards_are_a_share_of_the_model(zygote: Zygote, plain: Any, tmp_path: Path) -> None:
    whole = plain("gpt2")[0]["elements"]
    sharded, _ = run_step(zygote, "gpt2", config_of({"dp_shard": 2}), tmp_path)
    split, _ = run_step(zygote, "gpt2", config_of({"tp": 2}), tmp_path)
    assert sharded["elements"] == pytest.approx(whole / 2, rel=0.01)
    assert split["elements"] == pytest.approx(whole / 2, rel=0.06)  # norms, positions and some biases stay whole


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


PLANTED = [
    (no_gradient_sync, DATA["ddp"]),
    (wrong_scale, DATA["ddp"]),
    (wrong_scale, DATA["fsdp"]),
    (wrong_scale, DATA["fsdp_every"]),
    (micro_steps_averaged, DATA["fsdp_every"]),
    (replicas_apart, FOUR_RANKS["hsdp_every"]),
    (wrong_scale, FOUR_RANKS["pp_ddp"]),
    (embedding_not_summed, TENSOR_PARALLEL["tp"]),
    (norm_gradients_not_summed, TENSOR_PARALLEL["tp"]),
    (head_untied, TENSOR_PARALLEL["tp"]),
    (plain_shard_of_fused_weight, TENSOR_PARALLEL["tp"]),
    (untied_over_stages, PIPELINE["1f1b"]),
]


@pytest.mark.parametrize(
    ("plant", "knobs"), PLANTED, ids=[f"{plant.__name__}-{'-'.join(knobs)}" for plant, knobs in PLANTED]
)
def test_a_planted_bug_is_seen(zygote: Zygote, plain: Any, tmp_path: Path, plant: Any, knobs: dict[str, Any]) -> None:
    _, reference = plain("gpt2")
    try:
        _, candidate = run_step(zygote, "gpt2", config_of(knobs), tmp_path, plant=plant)
        found = differences(reference, candidate)
    except AssertionError as error:  # the copies of a tied weight differ, or a parameter too many
        assert "differ" in str(error) or "lm_head" in str(error)
        return
    assert max(found["gradients_norm"], found["changes_norm"]) > 5 * LOW_NORM, found  # seen at any precision
