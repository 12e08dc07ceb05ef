"""The setting that a training has now is read of its parts: it is the baseline of its search."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import autoplan
from autoplan.frameworks.lightning.read import read_setting as read_lightning
from autoplan.frameworks.transformers.read import read_setting
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.loops.loop import LoopParts
from autoplan.strategies.workloads.own_setting import UNKNOWN, compile_mode_of, fp32_format, own_setting
from autoplan.strategies.workloads.sources import load_workload, spec_from_objects
from tests.strategies.loops import Points, Regressor, Sentences, loader_of, pad, tiny_gpt2
from tests.strategies.tiny_trainers import llama_trainer


@pytest.mark.parametrize(
    ("arguments", "knobs"),
    [
        ({}, {}),
        ({"bf16": True, "gradient_checkpointing": True}, {"precision": "bf16", "checkpointing": "full"}),
        (
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 2}},
            {"checkpointing": "every_2"},
        ),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 7}}, None),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}}, None),
        ({"torch_compile": True}, {"compile": "model"}),
        (
            {"torch_compile": True, "torch_compile_mode": "reduce-overhead"},
            {"compile": "model", "compile_mode": "reduce-overhead"},
        ),
        ({"torch_compile": True, "torch_compile_backend": "aot_eager"}, None),
        ({"auto_find_batch_size": True}, None),
    ],
)
def test_of_a_trainer(arguments: dict[str, Any], knobs: dict[str, Any] | None, tmp_path: Path) -> None:
    found = read_setting(llama_trainer(tmp_path, per_device_train_batch_size=2, **arguments))
    assert found == (None if knobs is None else TrainingConfig(micro_batch=2, **knobs))


@pytest.mark.parametrize(
    ("changes", "knobs"),
    [
        ({"fp16": True}, {"precision": "fp16"}),
        ({"tf32": True}, {"precision": "tf32"}),
        ({"tf32": True, "bf16": True}, {"precision": "bf16"}),
        ({"torch_compile": True}, {"precision": "tf32", "compile": "model"}),
        ({"torch_compile": True, "tf32": False}, {"compile": "model"}),
        ({"mixed_precision": "bf16"}, {"precision": "bf16"}),  # of the environment, where accelerate launch says it
        ({"mixed_precision": "fp8"}, None),
        ({"deepspeed": "stage3.json"}, None),
        ({"fsdp": "full_shard"}, None),
        ({"use_liger_kernel": True}, None),
        ({"n_gpu": 2}, None),
        ({"world_size": 2}, None),
    ],
)
def test_of_arguments_that_a_cpu_does_not_take(
    changes: dict[str, Any], knobs: dict[str, Any] | None, tmp_path: Path
) -> None:
    names = ("bf16", "fp16", "tf32", "torch_compile", "torch_compile_backend", "torch_compile_mode")
    names += ("gradient_checkpointing", "n_gpu", "world_size")
    trainer = llama_trainer(tmp_path)
    known = {name: getattr(trainer.args, name, None) for name in names} | {"mixed_precision": "no"}
    args = SimpleNamespace(**known | {"device": torch.device("cuda")} | changes)
    of_a_gpu = SimpleNamespace(args=args, model=trainer.model, _train_batch_size=4)
    assert read_setting(of_a_gpu) == (None if knobs is None else TrainingConfig(micro_batch=4, **knobs))


def test_it_travels_with_the_workload_and_is_no_part_of_what_is_trained(tmp_path: Path) -> None:
    workload = autoplan.from_trainer(llama_trainer(tmp_path, gradient_checkpointing=True))
    spec = spec_from_objects(workload)
    assert spec.own_setting == TrainingConfig(micro_batch=4, checkpointing="full")
    assert load_workload(spec).own_setting == spec.own_setting
    unknown = spec_from_objects(dataclasses.replace(workload, own_setting=None))
    assert unknown.identity == spec.identity and unknown.own_setting is None


def test_the_models_own_checkpointing_is_part_of_it() -> None:
    model = tiny_gpt2()
    model.gradient_checkpointing_enable()
    assert own_setting(model, micro_batch=3, precision="fp32") == TrainingConfig(micro_batch=3, checkpointing="full")


def lightning_trainer(**changes: Any) -> Any:
    """The facts of a lightning.Trainer on one device."""
    strategy = type(changes.pop("strategy", "SingleDeviceStrategy"), (), {})()
    return SimpleNamespace(**{"num_devices": 1, "num_nodes": 1, "precision": "32-true", "strategy": strategy} | changes)


@pytest.mark.parametrize(
    ("changes", "precision"),
    [
        ({}, "fp32"),
        ({"precision": "bf16-mixed"}, "bf16"),
        ({"precision": "16-mixed"}, "fp16"),
        ({"precision": "bf16-true"}, None),
        ({"precision": "transformer-engine"}, None),
        ({"num_devices": 2}, None),
        ({"num_nodes": 2}, None),
        ({"strategy": "DeepSpeedStrategy"}, None),
    ],
)
def test_of_a_lightning_trainer(changes: dict[str, Any], precision: Any) -> None:
    found = read_lightning(Regressor(), lightning_trainer(**changes), 8)
    assert found == (None if precision is None else TrainingConfig(micro_batch=8, precision=precision))


def test_without_a_lightning_trainer_it_is_not_known() -> None:
    assert read_lightning(Regressor(), None, 8) is None


def loop(model: nn.Module, accelerator: Any = None, **more: Any) -> autoplan.Workload:
    """A loop over batches of 8, prepared where there is an Accelerator."""
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader: Any = loader_of(Points(), 8)
    if accelerator is not None:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    return autoplan.from_loop(model, optimizer, loader, nn.CrossEntropyLoss(), **more)


def test_of_a_loop() -> None:
    plain = loop(Regressor(), global_batch=16)
    assert plain.own_setting == TrainingConfig(micro_batch=8)
    assert any("Autocast around a step cannot be seen: baseline={'precision': 'bf16'}" in note for note in plain.notes)
    compiled = loop(torch.compile(Regressor()))  # type: ignore[arg-type]
    assert compiled.own_setting == TrainingConfig(micro_batch=8, compile="model")
    assert loop(nn.DataParallel(Regressor())).own_setting is None
    in_parts = Regressor()
    next(part for part in in_parts.children()).compile()
    assert loop(in_parts).own_setting is None


@pytest.fixture
def in_tf32() -> Iterator[None]:
    """As a program that asks for it has torch set."""
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("in_tf32")
def test_a_process_that_computes_in_tf32() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert (fp32_format(cuda), fp32_format(cuda, asked=False), fp32_format(cpu)) == ("tf32", "fp32", "fp32")
    trainer = lightning_trainer()
    assert read_lightning(Regressor(), trainer, 8) == TrainingConfig(micro_batch=8)
    trainer.strategy.root_device = cuda
    assert read_lightning(Regressor(), trainer, 8) == TrainingConfig(micro_batch=8, precision="tf32")


class OnGpu(Regressor):
    """Says that it is on a GPU."""

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        return iter([SimpleNamespace(device=torch.device("cuda"))])


@pytest.mark.usefixtures("in_tf32")
def test_of_a_loop_in_tf32() -> None:
    parts = {"optimizer": None, "loader": None, "accumulation": 1, "known_accumulation": False, "spread": False}
    given: Any = {"mixed_precision": None, "compile_mode": None} | parts
    assert LoopParts(model=OnGpu(), **given).own_setting(8) == TrainingConfig(micro_batch=8, precision="tf32")
    assert LoopParts(model=Regressor(), **given).own_setting(8) == TrainingConfig(micro_batch=8)


def test_of_a_loop_whose_model_recomputes() -> None:
    model = tiny_gpt2()
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = autoplan.from_loop(model, optimizer, loader_of(Sentences(), 4, collate_fn=pad))
    assert found.own_setting == TrainingConfig(micro_batch=4, checkpointing="full")


@pytest.mark.parametrize(("mixed", "precision"), [("no", "fp32"), ("bf16", "bf16")])
def test_of_a_loop_with_accelerate(mixed: str, precision: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    try:
        found = loop(Regressor(), accelerate.Accelerator(cpu=True, mixed_precision=mixed))
    finally:
        accelerate.state.AcceleratorState._reset_state(True)
    assert found.own_setting == TrainingConfig(micro_batch=8, precision=precision)
    assert any("your setting has mixed_precision=bf16" in note for note in found.notes) == (mixed == "bf16")


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"])
def test_the_mode_of_a_compiled_model(mode: str) -> None:
    around = nn.Linear(2, 2)
    around.compile(mode=mode)
    assert compile_mode_of(around) == mode
    assert compile_mode_of(torch.compile(nn.Linear(2, 2), mode=mode)) == mode  # type: ignore[arg-type]


def test_a_compiler_that_is_no_knob() -> None:
    other = torch.compile(nn.Linear(2, 2), backend="eager")
    assert compile_mode_of(other) == UNKNOWN  # type: ignore[arg-type]
    assert own_setting(nn.Linear(2, 2), micro_batch=1, precision="fp32", compile_mode=UNKNOWN) is None
    assert compile_mode_of(nn.Linear(2, 2)) is None
