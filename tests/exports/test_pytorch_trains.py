"""The exported PyTorch script trains as a plain loop does, and as the run that the plan was found by."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autoplan.planner.export.run import export_plan, load_target
from autoplan.planner.plan.plan import Plan
from autoplan.processes import Zygote
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.techniques import fp8
from autoplan.strategies.workloads.sources import load_workload, make_spec
from tests.cases import some
from tests.exports import script_runner
from tests.exports.six_steps import BATCH_NORM, WORKLOAD, SixSteps, compare, make_plan, plain_loop, prepared
from tests.exports.workloads import STEPS
from tests.recorded import make_hardware, named
from tests.recorded import make_plan as make_recorded_plan
from tests.strategies.tiny import GPT2, LLAMA, T5

Run = Callable[..., SixSteps]


@pytest.fixture(scope="module")
def run_script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Exports a plan, perhaps changes the text, and runs six steps of it where autoplan cannot be imported."""
    folder = tmp_path_factory.mktemp("scripts")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, script_runner.__file__]
    running = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert running.stdin is not None and running.stdout is not None
    number = 0

    def run(plan: Plan, change: tuple[str, str] | None = None, ranks: int | None = None) -> SixSteps:
        nonlocal number
        assert running.stdin is not None and running.stdout is not None
        number += 1
        (path,) = export_plan(plan, "pytorch", folder / f"train{number}.py", workload=named(plan)).paths
        if change is not None:
            text = path.read_text()
            assert text.count(change[0]) == 1, f"{change[0]} is there {text.count(change[0])} times"
            path.write_text(text.replace(*change))
        record, ranks = folder / f"record{number}.pt", ranks or plan.config.world_size
        print(json.dumps([str(path), str(record), ranks, STEPS]), file=running.stdin, flush=True)
        codes = json.loads(running.stdout.readline())
        said = "\n".join(Path(f"{record}.{rank}.txt").read_text()[-1500:] for rank in range(ranks))
        assert codes == [0] * ranks, said
        return SixSteps.load(record)

    yield run
    running.stdin.close()
    running.wait()
    running.stdout.close()


CASES: dict[str, dict[str, Any]] = {
    "one": {},
    "one_full": {"checkpointing": "full", "optimizer_step": "foreach", "micro_batch": 4},
    "ddp": {"dp_replicate": 2},
    "fsdp": {"dp_shard": 2, "checkpointing": "full"},
    "fsdp_every": {"dp_shard": 2, "gradient_sync": "every", "reshard_after_forward": False, "micro_batch": 1},
    "tp": {"tp": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "tp_dp": {"tp": 2, "dp_replicate": 2},
}


@pytest.fixture(scope="module")
def steps_of(run_script: Run) -> Callable[[str], SixSteps]:
    """Six steps of the script of a case, run once."""
    return functools.cache(lambda case: run_script(make_plan(WORKLOAD, **CASES[case])))


@pytest.mark.slow
@pytest.mark.parametrize("case", some(CASES, ("one", "ddp", "fsdp", "tp")))
def test_a_language_model_trains_as_a_plain_loop_does(case: str, steps_of: Callable[[str], SixSteps]) -> None:
    plan = make_plan(WORKLOAD, **CASES[case])
    wanted = plain_loop(plan)
    assert min(wanted.grad_norms) > 2 * 0.1, "clipping would change nothing"
    assert compare(steps_of(case), wanted) == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", some(("one", "dp_replicate", "dp_shard"), ("dp_replicate",)))
def test_running_statistics_are_those_of_a_plain_loop(ranks: str, run_script: Run) -> None:
    plan = make_plan(BATCH_NORM, **({} if ranks == "one" else {ranks: 2}))
    got = run_script(plan)
    assert compare(got, plain_loop(plan)) == []
    assert any("running_var" in name for name in got.buffers)


@pytest.mark.slow
@pytest.mark.parametrize("case", some(("one", "ddp", "fsdp"), ("ddp",)))
def test_the_script_is_the_plans_own_run(
    case: str, steps_of: Callable[[str], SixSteps], training_zygote: Zygote
) -> None:
    """Against plan.prepare the code is the same, and so are the numbers, but for the last bit of a loss's division."""
    plan = make_plan(WORKLOAD, **CASES[case])
    wanted, scale = prepared(plan, training_zygote), plain_loop(plan)
    wanted.start.update(scale.start)
    assert compare(steps_of(case), wanted, relative=2e-6) == []


@pytest.mark.slow
def test_a_script_for_cuda_has_what_it_calls(run_script: Run) -> None:
    """Its own code for batches and masks, run on a CPU: no two of the copied functions have one name."""
    plan = make_plan(WORKLOAD)
    on_cuda = plan.model_copy(update={"device": "cuda", "hardware": make_hardware(gpu=True)})
    assert compare(run_script(on_cuda), plain_loop(plan)) == []


PLANTED = {
    "gradients of one rank of two": ("return self._gradients.ranks / divisor", "return 1 / divisor"),
    "the same samples on both ranks": ("rank * LOCAL_BATCH, (rank + 1) * LOCAL_BATCH", "0, LOCAL_BATCH"),
    "the count of one rank": ("return self._gradients.sum_over_ranks(divisor)", "return divisor"),
    "no exchange of gradients": ("self._hooks.set_sync(sync)", "self._hooks.set_sync(False)"),
    "no clipping": ("norm = self._gradients.clip(self._parameters, self._max_grad_norm)", "norm = torch.ones(())"),
    "no schedule": ("None if workload.build_schedule is None else workload.build_schedule(optimizer),", "None,"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", some(PLANTED, ("gradients of one rank of two", "the same samples on both ranks")))
def test_a_planted_mistake_is_seen(what: str, run_script: Run) -> None:
    plan = make_plan(WORKLOAD, dp_replicate=2)
    assert compare(run_script(plan, PLANTED[what]), plain_loop(plan))


@pytest.mark.slow
def test_torchrun_starts_the_script(tmp_path: Path) -> None:
    """As a person would start it."""
    plan = make_plan(WORKLOAD, dp_shard=2)
    (path,) = export_plan(plan, "pytorch", tmp_path / "train.py", workload=named(plan)).paths
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, path, "--steps", str(STEPS)], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    wanted = plain_loop(plan)
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in done.stdout.splitlines() if "loss " in line]
    assert losses == pytest.approx(wanted.losses, rel=1e-5)


def test_without_torchrun_the_script_says_the_command(run_script: Run) -> None:
    with pytest.raises(AssertionError, match="torchrun --nproc-per-node 2"):
        run_script(make_plan(WORKLOAD, dp_shard=2), ranks=1)


def tiny_plan(folder: Path, config: TrainingConfig, fields: dict[str, Any]) -> Plan:
    """A plan of a model that a config.json describes, with its dropout."""
    (folder / "config.json").write_text(json.dumps(fields))
    options = {"learning_rate": 0.01}
    spec = make_spec(model=str(folder / "config.json"), global_batch=8, sequence_length=16, options=options)
    return make_recorded_plan(config, workload=spec, accumulation=config.accumulation(8))


def own_losses(plan: Plan) -> list[float]:
    """Of the run that a trial of the plan makes, with the masks that it draws."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        workload = load_workload(plan.workload)
        run = prepare(workload, plan.config, device="cpu")
        return [float(run.step(workload.make_batch(run.local_batch, number)).loss) for number in range(STEPS)]
    finally:
        torch.set_num_threads(threads)


OF_ONE_DEVICE: dict[str, dict[str, Any]] = {
    "plain": {"micro_batch": 2},
    "full": {"checkpointing": "full"},
    "selective": {"checkpointing": "selective", "attention": "eager", "threads": 1, "allocator": "keep"},
    "every_2": {"micro_batch": 8, "checkpointing": "every_2", "optimizer_step": "foreach", "attention": "sdpa"},
    "fused": {"micro_batch": 1, "loss": "fused", "optimizer_step": "fused", "checkpointing": "full"},
    "states_on_host": {"offload": "optimizer", "precision": "fp16"},
    "activations_on_host": {"offload": "activations", "checkpointing": "full", "precision": "bf16"},
    "bf16": {"loss": "fused", "precision": "bf16"},
    "fp16": {"loss": "fused", "precision": "fp16"},
    "masters": {"precision": "bf16", "parameters": "bf16", "optimizer_state": "bf16"},
    "by_chance": {"micro_batch": 8, "precision": "bf16", "parameters": "bf16_stochastic", "optimizer_step": "foreach"},
    "compiled_blocks": {"compile": "block", "checkpointing": "every_2"},
}
OTHERS_HAVE_IT = ("plain", "full", "bf16", "fp16")
SCRIPTS = [*((name, "gpt2") for name in OF_ONE_DEVICE), ("full", "t5")]
IN_MAKE_TEST = [one for one in SCRIPTS[:-1] if one[0] not in (*OTHERS_HAVE_IT, "compiled_blocks")] + SCRIPTS[-1:]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "model"), some(SCRIPTS, IN_MAKE_TEST))
def test_the_techniques_of_one_device(name: str, model: str, run_script: Run, tmp_path: Path) -> None:
    config = TrainingConfig(**({"micro_batch": 4} | OF_ONE_DEVICE[name]))
    plan = tiny_plan(tmp_path, config, {"gpt2": GPT2, "t5": T5}[model])
    wanted = own_losses(plan)
    relative = 1e-4 if plan.config.compile != "off" else 1e-5
    assert run_script(plan).losses == pytest.approx(wanted, rel=relative)
    assert wanted[0] != wanted[-1], "nothing was trained"


@pytest.mark.slow
@pytest.mark.torchao
@pytest.mark.parametrize("micro_batch", [4, 1])
def test_products_in_fp8(monkeypatch: pytest.MonkeyPatch, micro_batch: int, run_script: Run, tmp_path: Path) -> None:
    """In torch's slow kernel for a CPU."""
    monkeypatch.setattr(fp8, "_reason_against_chip", lambda *_: None)  # all else is as on a GPU
    config = TrainingConfig(micro_batch=micro_batch, precision="bf16", fp8="tensorwise")
    plan = tiny_plan(tmp_path, config, LLAMA | {"intermediate_size": 2064})  # which is large enough for the recipe
    wanted = own_losses(plan)
    assert run_script(plan).losses == pytest.approx(wanted, rel=1e-5)
    plain = own_losses(plan.model_copy(update={"config": plan.config.model_copy(update={"fp8": "off"})}))
    assert wanted != pytest.approx(plain, rel=1e-6), "something ran in fp8"


USERS_FILE = """
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import autoplan
from autoplan.strategies.workloads.workload import LossSum

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
    return LossSum(model(**batch).loss * 11 * len(batch["labels"]), 11 * len(batch["labels"]))


def mine() -> autoplan.Workload:
    return autoplan.Workload(
        name="mine", build_model=build, make_batch=make_batch, loss=loss, global_batch=8,
        build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    )
"""


@pytest.mark.slow
def test_a_users_model_with_a_fused_loss_and_checkpointing_of_its_own(run_script: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(USERS_FILE)
    spec = make_spec(model=f"{tmp_path / 'mine.py'}:mine", global_batch=8)
    config = TrainingConfig(micro_batch=4, loss="fused", attention="eager")
    plan = make_recorded_plan(config, workload=spec, accumulation=2)
    assert run_script(plan).losses == pytest.approx(own_losses(plan), rel=1e-6)
    (text,) = load_target("pytorch").render(plan, "train").files.values()
    assert "HEAD = 'lm_head'" in text and "DeferredLoss(workload.loss, linear, kernel)" in text
    assert "without_own_checkpointing(self._own_checkpointing)" in text


NET = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
"""
IN_A_PACKAGE = """
import torch
from torch.nn import functional as F

from autoplan import LossSum, SampleBatch, Workload, batches_from_dataset

from .net import Net


def collate(samples):
    points, labels = zip(*samples)
    return {"points": torch.stack(points), "labels": torch.tensor(labels)}


def loss(model, batch):
    total = F.cross_entropy(model(batch["points"]), batch["labels"], reduction="sum")
    return LossSum(total, len(batch["labels"]))


def mine():
    generator = torch.Generator().manual_seed(0)
    rows = [(torch.randn(4, generator=generator), number % 3) for number in range(64)]
    samples = batches_from_dataset(rows, collate=list)
    return Workload(
        name="mine", build_model=Net, loss=loss, global_batch=8,
        make_batch=lambda count, index: SampleBatch(samples(count, index), collate, rows_are_samples=True),
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
"""


@pytest.mark.slow
def test_a_workload_of_a_package_with_batches_of_samples(run_script: Run, tmp_path: Path) -> None:
    folder = tmp_path / "package_of_the_users"
    folder.mkdir()
    for name, text in {"__init__": "", "net": NET, "train": IN_A_PACKAGE}.items():
        (folder / f"{name}.py").write_text(text)
    spec = make_spec(model=f"{folder / 'train.py'}:mine", global_batch=8)
    plan = make_recorded_plan(TrainingConfig(micro_batch=4), workload=spec, accumulation=2)
    wanted = own_losses(plan)
    assert run_script(plan).losses == pytest.approx(wanted, rel=1e-6) and wanted[0] != wanted[-1]
