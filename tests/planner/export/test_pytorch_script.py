"""The exported script runs without autoplan, and its losses are those of the plan's own run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autoplan.errors import ExportError
from autoplan.planner.export.pytorch import PytorchTarget
from autoplan.planner.export.run import export_plan, load_target
from autoplan.planner.plan.plan import Plan
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import load_workload, make_spec
from tests.cases import some
from tests.recorded import make_plan, named

STEPS = 3
TINY = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 320,
    "n_positions": 32,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
USER_FILE = """
import torch
from torch import nn

import autoplan
from autoplan.strategies.workloads.workload import LossSum


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def classifier(global_batch: int = 8) -> autoplan.Workload:
    def make_batch(count, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(count, 12, generator=generator)
        return {"image": image, "label": (image.sum(1) > 0).long()}

    def loss(model, batch):
        logits = model(batch["image"])
        return LossSum(nn.functional.cross_entropy(logits, batch["label"], reduction="sum"), len(batch["label"]))

    return autoplan.Workload(
        name="classifier",
        build_model=lambda: nn.Sequential(*(Block() for _ in range(4)), nn.Linear(12, 2)),
        make_batch=make_batch,
        loss=loss,
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        global_batch=global_batch,
        max_grad_norm=0.5,
        build_schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    )
"""


def tiny_plan(folder: Path, config: TrainingConfig, fields: dict | None = None, **spec) -> Plan:
    path = folder / "config.json"
    path.write_text(json.dumps(fields or TINY))
    workload = make_spec(model=str(path), global_batch=8, sequence_length=16, options={"learning_rate": 0.01}, **spec)
    return make_plan(config, workload=workload, accumulation=config.accumulation(8))


def guard_against_autoplan(folder: Path) -> None:
    """Writes what makes an interpreter refuse to import autoplan, with folder/guard on its path."""
    (folder / "guard").mkdir(exist_ok=True)
    (folder / "guard" / "sitecustomize.py").write_text(
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'autoplan':\n"
        "            raise ImportError('autoplan cannot be imported here')\n"
        "sys.meta_path.insert(0, Refuse())\n"
    )


def run_script(path: Path, folder: Path) -> list[float]:
    """The losses that the script prints, in an interpreter that refuses to import autoplan."""
    guard_against_autoplan(folder)
    environment = {**os.environ, "PYTHONPATH": str(folder / "guard"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(path), "--steps", str(STEPS)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]


def run_plan(plan: Plan) -> list[float]:
    """The losses of the plan's own run."""
    from autoplan.strategies.prepare import prepare

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        workload = load_workload(plan.workload)
        run = prepare(workload, plan.config, device="cpu")
        return [float(run.step(workload.make_batch(run.local_batch, number)).loss) for number in range(STEPS)]
    finally:
        torch.set_num_threads(threads)


INTERPRETER = """
import json, os, runpy, sys, traceback
import torch, transformers.models.gpt2.modeling_gpt2
for line in sys.stdin:
    script, output, steps = json.loads(line)
    child = os.fork()
    if child == 0:
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.chdir(os.path.dirname(script))
        sys.argv = [script, "--steps", str(steps)]
        status = 1
        try:
            runpy.run_path(script, run_name="__main__")
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Imports torch and transformers once, and runs each script in a fork: some seconds less for each."""


@pytest.fixture(scope="module")
def run_forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], list[float]]]:
    """The losses that a script prints, in a fork of an interpreter that refuses to import autoplan."""
    folder = tmp_path_factory.mktemp("interpreter")
    guard_against_autoplan(folder)
    environment = {**os.environ, "PYTHONPATH": str(folder / "guard"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", INTERPRETER]
    running = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert running.stdin is not None and running.stdout is not None

    def run(path: Path) -> list[float]:
        assert running.stdin is not None and running.stdout is not None
        output = path.with_suffix(".out")
        print(json.dumps([str(path), str(output), STEPS]), file=running.stdin, flush=True)
        status = running.stdout.readline().strip()
        text = output.read_text()
        assert status == "0", text[-3000:]
        return [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]

    yield run
    running.stdin.close()
    running.wait()
    running.stdout.close()


CONFIGS = {
    "plain": TrainingConfig(micro_batch=2),
    "selective": TrainingConfig(
        micro_batch=4, checkpointing="selective", attention="eager", threads=1, allocator="keep"
    ),
    "every_2": TrainingConfig(micro_batch=8, checkpointing="every_2", optimizer_step="foreach", attention="sdpa"),
    "fused": TrainingConfig(micro_batch=1, loss="fused", optimizer_step="fused", checkpointing="full"),
    "states_on_host": TrainingConfig(micro_batch=4, offload="optimizer", precision="fp16"),
    "activations_on_host": TrainingConfig(micro_batch=4, offload="activations", checkpointing="full", precision="bf16"),
    "bf16": TrainingConfig(micro_batch=4, loss="fused", precision="bf16"),
    "fp16": TrainingConfig(micro_batch=4, loss="fused", precision="fp16"),
    "masters": TrainingConfig(micro_batch=4, precision="bf16", parameters="bf16", optimizer_state="bf16"),
    "by_chance": TrainingConfig(
        micro_batch=8, precision="bf16", parameters="bf16_stochastic", optimizer_step="foreach"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some(CONFIGS, set(CONFIGS) - {"plain", "bf16", "fp16"}))
def test_the_script_trains_as_the_plan_does(
    name: str, run_forked: Callable[[Path], list[float]], tmp_path: Path
) -> None:
    plan = tiny_plan(tmp_path, CONFIGS[name])
    (path,) = export_plan(plan, "pytorch", tmp_path / "train.py").paths
    wanted = run_plan(plan)
    assert run_forked(path) == pytest.approx(wanted, rel=1e-5)
    assert wanted[0] != wanted[-1], "nothing was trained"


@pytest.mark.exhaustive
def test_compiled_blocks(tmp_path: Path) -> None:
    plan = tiny_plan(tmp_path, TrainingConfig(micro_batch=4, compile="block", checkpointing="every_2"))
    (path,) = export_plan(plan, "pytorch", tmp_path / "train.py").paths
    assert run_script(path, tmp_path) == pytest.approx(run_plan(plan), rel=1e-4)


T5 = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "vocab_size": 320,
    "d_model": 32,
    "d_ff": 64,
    "d_kv": 16,
    "num_layers": 2,
    "num_heads": 2,
    "n_positions": 32,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "is_encoder_decoder": True,
}


@pytest.mark.slow
def test_another_family(run_forked: Callable[[Path], list[float]], tmp_path: Path) -> None:
    plan = tiny_plan(tmp_path, TrainingConfig(micro_batch=4, checkpointing="full"), T5)
    (path,) = export_plan(plan, "pytorch", tmp_path / "train.py").paths
    assert run_forked(path) == pytest.approx(run_plan(plan), rel=1e-5)


@pytest.mark.slow
def test_a_users_own_file(run_forked: Callable[[Path], list[float]], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(USER_FILE)
    spec = make_spec(model=f"{tmp_path / 'mine.py'}:classifier", global_batch=8)
    config = TrainingConfig(micro_batch=2, optimizer_step="foreach", checkpointing="full")
    plan = make_plan(config, workload=spec, accumulation=4)
    (path,) = export_plan(plan, "pytorch", tmp_path / "train.py", workload=named(plan)).paths
    assert run_forked(path) == pytest.approx(run_plan(plan), rel=1e-6)


def test_a_name_that_is_defined_twice_is_refused(tmp_path: Path) -> None:
    plan = tiny_plan(tmp_path, TrainingConfig(micro_batch=4))
    export = PytorchTarget().render(plan, "train")
    export.files["train.py"] += "\n\ndef shifted_labels():\n    pass\n"
    with pytest.raises(ExportError, match="defines shifted_labels twice"):
        PytorchTarget().check(plan, export)


def test_what_the_script_cannot_carry_is_refused(tmp_path: Path) -> None:
    for plan in (
        make_plan(TrainingConfig(micro_batch=2, pp=2, pp_microbatches=2)),
        make_plan(workload=make_plan().workload.model_copy(update={"kind": "object"})),
    ):
        with pytest.raises(ExportError) as error:
            export_plan(plan, "pytorch", tmp_path / "train.py")
        assert error.value.exit_code == 6 and "plan.prepare" in str(error.value.hint)
    assert not list(tmp_path.iterdir())


def test_the_check_sees_a_wrong_setting(tmp_path: Path) -> None:
    plan = tiny_plan(tmp_path, TrainingConfig(micro_batch=4))
    export = PytorchTarget().render(plan, "train")
    text = export.files["train.py"].replace("MICRO_BATCH = 4", "MICRO_BATCH = 2")
    export.files["train.py"] = text
    with pytest.raises(ExportError, match="MICRO_BATCH reads back as 2"):
        PytorchTarget().check(plan, export)


DEFERRED_FILE = """
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import autoplan

SIZES = dict(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    bos_token_id=1, eos_token_id=2,
)


def build():
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.gradient_checkpointing_enable()
    return model


def make_batch(count, index):
    ids = torch.randint(0, 64, (count, 12), generator=torch.Generator().manual_seed(index))
    return {"input_ids": ids, "labels": ids.clone()}


def loss(model, batch):
    return autoplan.LossSum(model(**batch).loss * 11 * len(batch["labels"]), 11 * len(batch["labels"]))


def mine() -> autoplan.Workload:
    return autoplan.Workload(
        name="mine", build_model=build, make_batch=make_batch, loss=loss, global_batch=8,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    )
"""


@pytest.mark.slow
def test_a_users_language_model_with_a_fused_loss_and_checkpointing_of_its_own(
    run_forked: Callable[[Path], list[float]], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(DEFERRED_FILE)
    spec = make_spec(model=f"{tmp_path / 'mine.py'}:mine", global_batch=8)
    config = TrainingConfig(micro_batch=4, loss="fused", attention="eager")
    plan = make_plan(config, workload=spec, accumulation=2)
    (path,) = export_plan(plan, "pytorch", tmp_path / "train.py", workload=named(plan)).paths
    text = path.read_text()
    assert "HEAD = 'lm_head'" in text and "DeferredLoss(workload.loss, linear, kernel)" in text
    assert "without_own_checkpointing(self._own_checkpointing)" in text
    assert run_forked(path) == pytest.approx(run_plan(plan), rel=1e-6)


ON_CUDA: dict[str, dict[str, Any]] = {
    "plain": {},
    "fused": {"loss": "fused", "precision": "bf16"},
    "compiled": {"loss": "fused", "compile": "model"},
    "states": {"offload": "optimizer"},
    "activations": {"offload": "activations", "precision": "bf16"},
    "shards": {"offload": "parameters", "dp_shard": 2},
    "states_of_shards": {"offload": "optimizer", "dp_shard": 2},
    "liger": {"kernels": "liger"},
}


@pytest.mark.parametrize("name", ON_CUDA)
def test_a_script_for_a_gpu_defines_every_name_that_it_uses(name: str, tmp_path: Path) -> None:
    plan = make_plan(TrainingConfig(micro_batch=1, **ON_CUDA[name]), device="cuda")
    target = load_target("pytorch")
    export = target.render(plan, "train")
    target.check(plan, export)
    (tmp_path / "train.py").write_text(next(iter(export.files.values())))
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,F811,E9", "train.py"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
