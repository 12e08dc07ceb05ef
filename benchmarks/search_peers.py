"""The finders of batch sizes of other libraries, each as it stands, on a workload; one in a process of its own.

    python -m benchmarks.search_peers accelerate --case vision --memory-limit 1.5GiB --out FILE

benchmarks/search_live.py starts it. On a CPU none of them ever runs out of memory by itself, so the process gets a
limit on its data (RLIMIT_DATA): what torch then raises is the real "DefaultCPUAllocator: can't allocate memory", which
all three know. FILE gets a line of JSON: the size that was found, the seconds from the call to the answer (imports not
counted) and the sizes that were run.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from autoplan.strategies.workloads.sources import load_workload
from autoplan.strategies.workloads.workload import Workload
from autoplan.units import parse_memory_bytes
from benchmarks.search_cases import CASES, case_spec

STEPS = 3
"""Optimizer steps of a try; Lightning's own default."""

SAMPLES = 4096
"""Of the dataset: a finder that meets no limit goes on to this."""


class WithLoss(nn.Module):
    """A model that returns its loss, as a Trainer wants it."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.model = workload.build_model()
        self.workload = workload

    def forward(self, **batch: Any) -> dict[str, torch.Tensor]:
        batch.pop("num_items_in_batch", None)
        loss = self.workload.loss(self.model, batch)
        return {"loss": loss.total / loss.count}


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The workload's samples, one by one, made when they are asked for."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= SAMPLES:
            raise IndexError(index)
        return {name: rows[0] for name, rows in self.workload.make_batch(1, index).items()}


@dataclass
class Collate:
    """Makes batches, and keeps which sizes were asked for: where memory runs out, that may be before the model."""

    tried: list[int] = field(default_factory=list)

    def __call__(self, samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        if len(samples) not in self.tried:
            self.tried.append(len(samples))
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def limit_memory(limit_bytes: int) -> None:
    """Lets this process hold so much resident memory in all, by what it may still allocate."""
    data = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    now = int(data.split()[1]) * 1024
    more = limit_bytes - psutil.Process().memory_info().rss
    resource.setrlimit(resource.RLIMIT_DATA, (now + max(0, more), resource.RLIM_INFINITY))


def accelerate(workload: Workload, folder: str) -> tuple[Callable[[], int], list[int]]:
    """`find_executable_batch_size`, from the global batch downwards, around a plain loop of a few steps."""
    from accelerate.utils import find_executable_batch_size

    tried: list[int] = []

    def train(batch_size: int) -> int:
        tried.append(batch_size)
        model = WithLoss(workload)
        optimizer = workload.build_optimizer([p for p in model.parameters() if p.requires_grad])
        for index in range(STEPS):
            model(**workload.make_batch(batch_size, index))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        return batch_size

    found = find_executable_batch_size(train, starting_batch_size=workload.global_batch)
    return found, tried


def trainer(workload: Workload, folder: str) -> tuple[Callable[[], int], list[int]]:
    """The Trainer's `auto_find_batch_size`, from the global batch downwards, in a training of a few steps."""
    import transformers

    model = WithLoss(workload)
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=not torch.cuda.is_available(),
        auto_find_batch_size=True,
        per_device_train_batch_size=workload.global_batch,
        max_steps=STEPS,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    collate = Collate()
    made = transformers.Trainer(model=model, args=arguments, train_dataset=Samples(workload), data_collator=collate)

    def find() -> int:
        made.train()
        return int(made._train_batch_size)

    return find, collate.tried


def lightning(workload: Workload, folder: str) -> tuple[Callable[[], int], list[int]]:
    """Lightning's `BatchSizeFinder` in its default mode: from 2 upwards, doubling, three steps each."""
    import lightning.pytorch as pl
    from lightning.pytorch.tuner import Tuner

    model, collate = WithLoss(workload), Collate()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model
            self.batch_size = 2

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            return self.inner(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return workload.build_optimizer([p for p in self.parameters() if p.requires_grad])

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(Samples(workload), batch_size=self.batch_size, collate_fn=collate)

    made = pl.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )

    def find() -> int:
        found = Tuner(made).scale_batch_size(Module(), steps_per_trial=STEPS)
        assert found is not None, "Lightning gives None only in a fast_dev_run"
        return int(found)

    return find, collate.tried


PEERS: dict[str, Callable[[Workload, str], tuple[Callable[[], int], list[int]]]] = {
    "accelerate": accelerate,
    "lightning": lightning,
    "trainer": trainer,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one finder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=list(PEERS))
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--memory-limit", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="search-peers-") as folder:
        workload = load_workload(case_spec(options.case, Path(folder)))
        find, tried = PEERS[options.peer](workload, folder)
        limit_memory(int(parse_memory_bytes(options.memory_limit)))
        began = time.monotonic()
        found = find()
        seconds = time.monotonic() - began
        options.out.write_text(json.dumps({"batch_size": found, "seconds": round(seconds, 2), "tried": tried}))


if __name__ == "__main__":
    main()
