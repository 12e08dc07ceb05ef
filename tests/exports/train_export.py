"""Runs exported files with the real tools, in processes of their own: `train_export.py TOOL FOLDER`, under a launcher.

FOLDER has plan.json and the files of an export named `export.*`; the first rank writes steps.pt, a SixSteps. Nothing
here says a setting of the plan: all come from the exported files.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from autoplan.planner.plan.plan import Plan
from tests.exports import workloads
from tests.exports.six_steps import SixSteps, function_of, global_batches, samples, tensors_of


def load_module(path: str | Path) -> Any:
    """An exported module."""
    spec = importlib.util.spec_from_file_location("exported", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_accelerate(plan: Plan, companion: Any, folder: Path) -> SixSteps | None:
    workload = function_of(plan)
    accelerator = companion.make_accelerator()
    inner = companion.prepare_module(workload.build_model())
    optimizer, schedule = companion.make_optimizers(inner)
    loader = torch.utils.data.DataLoader(samples(plan), **companion.loader_arguments())
    model, optimizer, loader = companion.prepare(accelerator, inner, optimizer, loader)
    losses, norms, rates = [], [], []
    for micro_batches in companion.steps(loader):
        rates.append(optimizer.param_groups[0]["lr"])
        loss, norm = companion.train_step(accelerator, model, optimizer, schedule, micro_batches, workload.loss)
        losses.append(float(loss))
        norms.append(float(norm))
    found = SixSteps(
        losses=losses, grad_norms=norms, learning_rates=rates, **tensors_of(accelerator.unwrap_model(model))
    )
    return found if accelerator.is_main_process else None


def with_deepspeed(plan: Plan, companion: Any, folder: Path) -> SixSteps | None:
    import deepspeed

    workload = function_of(plan)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(companion.SEED)
    engine = companion.initialize(companion.prepare_module(workload.build_model()))
    rank, share = torch.distributed.get_rank(), companion.MICRO_BATCH * companion.ACCUMULATION
    mine = [
        {key: value[number] for key, value in batch.items()}
        for batch in global_batches(plan)
        for number in range(rank * share, (rank + 1) * share)
    ]
    loader = torch.utils.data.DataLoader(mine, **companion.loader_arguments())
    losses, norms, rates = [], [], []
    for micro_batches in companion.steps(loader):
        rates.append(engine.get_lr()[0])
        loss, norm = companion.train_step(engine, micro_batches, workload.loss, workload.count)
        losses.append(float(loss))
        norms.append(float(norm))
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        tensors = tensors_of(engine.module)
    found = SixSteps(losses=losses, grad_norms=norms, learning_rates=rates, **tensors)
    torch.distributed.barrier()
    return found if rank == 0 else None


class ImageModel(workloads.Classifier):
    """The classifier as the Trainer wants models: it computes its loss, the mean of a micro-batch."""

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        logits = super().forward(pixels)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def recording(kind: Any) -> Any:
    """A Trainer class that keeps what each of its own steps returns; nothing is computed otherwise."""
    from transformers import TrainerCallback

    class Recording(kind):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            self.returned.append(float(loss))
            return loss

    class Rates(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    rates: list[float] = []
    Recording.returned, Recording.rates, Recording.callback = [], rates, Rates
    return Recording


def with_trainer(plan: Plan, companion: Any, folder: Path, kind: Any, dataset: Any, **given: Any) -> SixSteps | None:
    """A real Trainer, with the arguments of the file and what the companion makes."""
    workload = function_of(plan)
    model = workload.build_model() if workload.sequence_length else _image_model()
    model = companion.prepare_model(model)
    arguments = companion.load_arguments()
    arguments.num_train_epochs, arguments.save_strategy, arguments.logging_steps = 1, "no", 1
    arguments.output_dir, arguments.report_to, arguments.disable_tqdm = str(folder / "output"), [], True
    arguments.train_sampling_strategy = "sequential"
    made = {"optimizers": companion.make_optimizers(model)} if hasattr(companion, "make_optimizers") else {}
    recorder = recording(kind)
    trainer = recorder(
        model=model, args=arguments, train_dataset=dataset, callbacks=[recorder.callback], **made, **given
    )
    trainer.train()
    count = plan.accumulation
    local = torch.tensor([sum(recorder.returned[i : i + count]) for i in range(0, len(recorder.returned), count)])
    losses = trainer.accelerator.reduce(local, reduction="mean")
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    inner = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    found = SixSteps(losses=losses.tolist(), grad_norms=norms, learning_rates=recorder.rates, **tensors_of(inner))
    return found if trainer.is_world_process_zero() else None


def _image_model() -> torch.nn.Module:
    model = ImageModel()
    model.load_state_dict(workloads.build_classifier().state_dict())
    return model


def with_transformers(plan: Plan, companion: Any, folder: Path) -> SixSteps | None:
    from transformers import Trainer

    return with_trainer(plan, companion, folder, Trainer, samples(plan))


def with_trl(plan: Plan, companion: Any, folder: Path) -> SixSteps | None:
    """The same sequences as a data set of SFTTrainer: without their padding, which its collator puts there."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTTrainer

    words = {str(number): number for number in range(workloads.VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="1")), pad_token="0", eos_token="2"
    )
    rows = []
    for sample in samples(plan):
        length = int(sample["attention_mask"].sum())
        rows.append({key: sample[key][:length].tolist() for key in ("input_ids", "labels")})
    return with_trainer(plan, companion, folder, SFTTrainer, Dataset.from_list(rows), processing_class=tokenizer)


TOOLS = {
    "accelerate": with_accelerate,
    "deepspeed": with_deepspeed,
    "transformers": with_transformers,
    "trl": with_trl,
}


def pretend_gpus() -> None:
    """Has accelerate take a gloo group on the CPU for one of GPUs: it leaves FSDP off on CPUs. All else is its own."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)


def main(tool: str, folder: Path) -> None:
    if "PRETEND_GPUS" in os.environ:
        pretend_gpus()
    plan = Plan.model_validate_json((folder / "plan.json").read_text())
    found = TOOLS[tool](plan, load_module(folder / "export_companion.py"), folder)
    if found is not None:
        found.save(folder / "steps.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
