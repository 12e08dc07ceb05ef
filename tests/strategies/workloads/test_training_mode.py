"""What a step leaves of the user's settings: modules in evaluation mode stay there, and the key-value cache is back."""

import pytest
import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.workloads.training_mode import (
    caching_configs,
    enter_training_mode,
    own_checkpointing,
    without_cache,
)
from autoplan.strategies.workloads.workload import LossSum, Workload


def build_t5() -> nn.Module:
    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def token_batch(count: int, index: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, 64, (count, 16), generator=torch.Generator().manual_seed(index))
    return {"input_ids": tokens, "labels": tokens.clone()}


def model_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> LossSum:
    items = batch["labels"].numel()
    return LossSum(model(**batch).loss * items, items)


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def make_workload(build_model=build_t5, make_batch=token_batch, loss=model_loss) -> Workload:
    return Workload(
        name="t5", build_model=build_model, make_batch=make_batch, loss=loss, build_optimizer=adamw, global_batch=4
    )


@pytest.mark.parametrize(("checkpointing", "precision"), [("full", "fp32"), ("selective", "bf16")])
def test_a_model_that_keeps_a_cache_can_be_recomputed(checkpointing: str, precision: str) -> None:
    """transformers' T5 fills a cache in training too; its recomputation appended to it and failed."""
    plain = prepare(make_workload(), TrainingConfig(micro_batch=2, precision=precision)).step(token_batch(4, 0))
    config = TrainingConfig(micro_batch=2, precision=precision, checkpointing=checkpointing)
    run = prepare(make_workload(), config)
    before = run.model.config.to_dict()
    result = run.step(token_batch(4, 0))
    assert float(result.loss) == pytest.approx(float(plain.loss), rel=1e-6)
    assert run.model.config.to_dict() == before, "a step leaves the config as it was, for save_pretrained()"
    assert run.model.config.use_cache and run.model.decoder.config.use_cache


def test_generation_is_as_before_after_a_step() -> None:
    run = prepare(make_workload(), TrainingConfig(micro_batch=2, checkpointing="full"))
    run.step(token_batch(4, 0))
    run.model.eval()
    inputs = token_batch(2, 1)["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    cached = run.model.generate(input_ids=inputs, **options)
    assert cached.past_key_values is not None, "generate() still uses its cache"
    assert torch.equal(cached.sequences, run.model.generate(input_ids=inputs, use_cache=False, **options).sequences)


def test_the_decoder_of_a_t5_has_a_config_of_its_own() -> None:
    model = build_t5()
    configs = caching_configs(model)
    assert any(config is model.config for config in configs)
    assert any(config is model.decoder.config for config in configs)
    with pytest.raises(ZeroDivisionError), without_cache(configs):
        assert not any(config.use_cache for config in configs)
        _ = 1 / 0
    assert model.config.use_cache and model.decoder.config.use_cache


class Frozen(nn.Module):
    """A classifier over a backbone with dropout and BatchNorm that the user froze in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.backbone.requires_grad_(False).eval()
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(inputs))


def build_frozen() -> nn.Module:
    torch.manual_seed(0)
    return Frozen()


def vectors(count: int, index: int) -> torch.Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(index)) + 3.0


def square_loss(model: nn.Module, batch: torch.Tensor) -> LossSum:
    return LossSum(model(batch).pow(2).sum(), len(batch))


def test_a_frozen_part_in_evaluation_mode_stays_there() -> None:
    run = prepare(make_workload(build_frozen, vectors, square_loss), TrainingConfig(micro_batch=2))
    plain = build_frozen()
    losses = [float(run.step(vectors(4, 0)).loss)]
    assert run.model.training and run.model.head.training and not run.model.backbone.training
    assert torch.equal(run.model.backbone[1].running_mean, torch.zeros(8)), "its statistics are not touched"
    expected = square_loss(plain, vectors(4, 0))
    assert losses[0] == pytest.approx(float(expected.total) / expected.count, rel=1e-6), "and its dropout is off"


def test_a_model_in_evaluation_mode_as_a_whole_trains_as_a_whole() -> None:
    """What from_pretrained returns."""
    model = Frozen().eval()
    assert "evaluation mode as a whole" in (enter_training_mode(model) or "")
    assert all(module.training for module in model.modules())
    assert enter_training_mode(Frozen()) is None


class Twice(nn.Module):
    """Two blocks that a forward goes through twice, as ALBERT does."""

    def __init__(self) -> None:
        super().__init__()
        make = lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))  # noqa: E731
        self.blocks = nn.ModuleList([make(), make()])
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            for block in self.blocks:
                inputs = inputs + block(inputs)
        return self.head(inputs)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_block_that_runs_twice_can_be_recomputed_under_autocast(precision: str) -> None:
    workload = make_workload(lambda: (torch.manual_seed(0), Twice())[1], vectors, square_loss)
    losses = [
        float(
            prepare(workload, TrainingConfig(micro_batch=2, precision=precision, checkpointing=value))
            .step(vectors(4, 0))
            .loss
        )
        for value in ("none", "selective", "full")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3) and losses[2] == pytest.approx(losses[0], rel=1e-3)


def test_the_cache_setting_is_left_alone_where_nothing_is_recomputed() -> None:
    """For packed sequences it decides what a token attends to: turning it off would train something else."""
    seen = []

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> LossSum:
        seen.append(model.config.use_cache)
        return model_loss(model, batch)

    for checkpointing in ("none", "full"):
        run = prepare(make_workload(loss=loss), TrainingConfig(micro_batch=4, checkpointing=checkpointing))
        run.step(token_batch(4, 0))
    assert seen == [True, False]


def recomputing_t5() -> nn.Module:
    model = build_t5()
    model.gradient_checkpointing_enable()
    return model


@pytest.mark.parametrize(("checkpointing", "runs"), [("none", 1), ("full", 2)])
def test_the_knob_governs_the_models_own_checkpointing(checkpointing: str, runs: int) -> None:
    """Off with none, and not twice with full; the user's setting is back after each step, and the loss is the same."""
    plain = prepare(make_workload(), TrainingConfig(micro_batch=4)).step(token_batch(4, 0))
    config = TrainingConfig.model_validate({"micro_batch": 4, "checkpointing": checkpointing})
    run = prepare(make_workload(build_model=recomputing_t5), config)
    calls = []
    for layer in (block for stack in (run.model.encoder, run.model.decoder) for block in stack.block):
        inner = getattr(layer, "_checkpoint_wrapped_module", layer)
        inner.layer[0].register_forward_hook(lambda *_: calls.append(1))
    flagged = own_checkpointing(run.model)
    assert flagged
    result = run.step(token_batch(4, 0))
    assert float(result.loss) == pytest.approx(float(plain.loss), rel=1e-6)
    assert len(calls) == runs * 4, "four blocks, each run once in the forward and perhaps once more in the backward"
    assert [(id(module), flag) for module, flag in own_checkpointing(run.model)] == [(id(m), f) for m, f in flagged]
    assert run.model.is_gradient_checkpointing
    assert run.said is not None and f"checkpointing={checkpointing} decides" in run.said


def test_a_model_without_checkpointing_of_its_own_is_told_nothing() -> None:
    assert prepare(make_workload(), TrainingConfig(micro_batch=4)).said is None
