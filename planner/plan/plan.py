"""Plan: the result of a search. Data only: JSON, readable and diffable; loading one never runs code.

Its fields and its arithmetic are in plan_record.py, what is read of a file in plan_file.py, whose code it names in
trust.py.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from autoplan.errors import PlanError
from autoplan.files import replace_file
from autoplan.planner.plan.loader import check_split, position_of, setting_of
from autoplan.planner.plan.parts import AS_SEARCHED, Parts, refuse_unverified
from autoplan.planner.plan.prepare import draws_kept, prepare_plan
from autoplan.planner.records.plan import SCHEMA_VERSION, PlanRecord, broken_rules
from autoplan.planner.records.plan_file import (
    digests_of_document,
    edited_sections,
    first_problem,
    load_notes,
    one_line,
    read_document,
    with_shown_texts,
)
from autoplan.processes.script import note_asked
from autoplan.strategies.workloads.loading.settings import LoaderSetting

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    from autoplan.strategies.run import TrainingRun
    from autoplan.strategies.workloads.workload import LossSum, OutputHead, Workload


def _report(name: str) -> Any:
    """A module of the reports, which are above this package and found by name."""
    return importlib.import_module(f"autoplan.report.{name}")


class Plan(PlanRecord):
    """The result of a search: a verified plan, or the best so far of one that ended before (`unverified`)."""

    def show(self, *, trials: bool = False) -> None:
        """Prints the plan as `autoplan show` does; with `trials` every trial of the search too."""
        terminal = _report("terminal")
        console = _report("screen").make_console(sys.stdout)
        terminal.show_plan(console, self)
        if trials:
            terminal.show_trials(console, self.evidence, self.workload.unit)

    def __repr__(self) -> str:
        return f"<{_report('facts').plan_line(self)}; plan.show() has the rest>"

    def __str__(self) -> str:  # a field's name in the API reference, if it were an alias
        return repr(self)

    def _repr_html_(self) -> str:
        """How a notebook shows it: the figures beside the baseline's, and the knobs with their reasons."""
        return str(_report("html").render_part(self))

    def sealed(self) -> Plan:
        """The plan with the digests of its measured part as it is now."""
        return self.model_copy(update={"seal": digests_of_document(json.loads(self.model_dump_json()))})

    def save(self, path: str | Path, *, private: bool = False) -> Path:
        """Writes the plan as indented JSON, atomically; returns the path.

        Args:
            path: The file.
            private: For the user alone (0600); else as the umask has it.

        Raises:
            PlanError: the file cannot be written.
        """
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, self.file_text(), private=private)
        except OSError as error:
            raise PlanError(
                f"the plan cannot be written to {path}: {error.strerror}", hint="Give another place with --out."
            ) from error
        return path

    def file_text(self) -> str:
        """The plan as its file has it: indented JSON, with the digests of its measured part."""
        plan = self if self.edited else self.sealed()  # what was edited stays so
        return plan.model_dump_json(indent=2) + "\n"

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan file; runs no code. `edited` and `load_notes` of the plan say what is to be known of the file.

        Raises:
            PlanError: no such file, not JSON (truncated), not a plan, of a newer schema, or its own figures do not
                add up.
        """
        path = Path(path)
        note_asked()
        document = read_document(path)
        version = document.get("schema_version")
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise PlanError(
                f"{path} has plan schema {version}; this autoplan reads up to {SCHEMA_VERSION}",
                hint="Update autoplan, or make the plan again with this version.",
            )
        try:
            plan = cls.model_validate(with_shown_texts(document))
        except ValidationError as error:
            raise PlanError(
                f"{path} is not a plan: {first_problem(error)} ({error.error_count()} problem(s) in all)",
                hint="Write plans with autoplan search; autoplan schema prints what a plan contains.",
            ) from None
        broken = broken_rules(plan)
        if broken:
            raise PlanError(
                f"{path} does not add up: {one_line('; '.join(broken[:3]))[:1000]} ({len(broken)} problem(s) in all)",
                hint="The file was edited. The search's store keeps its record: run the same autoplan search again, "
                "and it writes the plan without repeating a trial.",
            )
        edited = edited_sections(document)
        plan._edited, plan._load_notes = edited or (), load_notes(path, edited)
        return plan

    def prepare(
        self,
        model: nn.Module | Callable[[], nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
        loss: Callable[[Any, Any], LossSum] | None = None,
        *,
        device: str | torch.device | None = None,
        make_batch: Callable[[int, int], Any] | None = None,
        schedule: Callable[[torch.optim.Optimizer], Any] | None = AS_SEARCHED,
        max_grad_norm: float | None = AS_SEARCHED,
        global_batch: int | None = None,
        head: OutputHead | None = None,
        count: Callable[[Any], int] | None = None,
        unverified_ok: bool = False,
        changed_ok: bool = False,
        workload: str | Path | Workload | None = None,
    ) -> TrainingRun:
        """Builds the training run that was measured, on your own model, optimizer and loss.

        With nothing given it builds the workload that the search knew, where the plan can name it.

        Args:
            model: A module, which is changed in place, or a function that makes one. None: the model of the search.
            optimizer: An optimizer over the model's parameters (made anew over them, with its groups, hyper-parameters
                and state), or a function that makes one from parameters. None: as the workload of the search has it.
            loss: `loss(model, batch)` gives a LossSum: the summed loss and the count of its items. None: the loss of
                the search, where the plan can name it, or the causal loss of a transformers model with `labels`.
            device: Where it runs. None: the device the plan was found for, the current one of its kind.
            make_batch: `make_batch(num_samples, index)` gives a batch on the CPU. Training itself needs none: batches
                are handed to `run.step`.
            schedule: Makes the learning-rate schedule from the optimizer; it is stepped once per optimizer step.
                None: a constant rate. Not given: as in the search; refused where the plan cannot contain it (Python
                objects).
            max_grad_norm: The gradients are clipped to this norm (L2, of the whole gradient) before each optimizer
                step; None: no clipping. Not given: as in the search.
            global_batch: Samples per optimizer step. Must be the plan's own, if given: a plan never changes it.
            head: With a loss of your own: how the output head splits off (`Workload.head`), where the plan's loss is
                fused.
            count: With a loss of your own: the items of a batch that its mean is over (`Workload.count`). With it the
                gradients are right as they are made; without it they are scaled once a step, which is the same but for
                rounding.
            unverified_ok: Use a plan that is unverified: the best so far of a search that ended before its proof.
                Without it that is refused.
            changed_ok: Train otherwise than the search did: with an optimizer of another class, with other parameter
                groups or other values in them, or from files whose code changed. Without it that is refused; changed
                weights and versions are a warning. A plan that was edited, or that failed its parity check, is
                refused without it too.
            workload: What the plan is of, as you name it: a Workload, which takes the place of all parts that are not
                given; or a text, as `--model` takes it (`"train.py:workload"`, `"train.py:workload seed=3 -- --lr 0.5"`
                with options and arguments), which must be what the plan says. A plan's file runs only where you name
                it, or searched it yourself; with model, optimizer and loss it is not needed.

        Returns:
            The run: `run.step(batch)` takes the `run.local_batch` samples of this rank.

        Raises:
            PlanError: the global batch, the optimizer or the code is not the search's, or its schedule was not given;
                the plan was edited, or it alone says what code would run.
            ConfigError: the world does not have the plan's ranks, or a knob does not apply to this model.
            WorkloadError: the parts do not make a workload.
            DeviceError: the plan's kind of device is not here.
        """
        parts = Parts(
            model=model,
            optimizer=optimizer,
            loss=loss,
            make_batch=make_batch,
            schedule=schedule,
            max_grad_norm=max_grad_norm,
            head=head,
            count=count,
        )
        plan = self.accepted(unverified_ok, changed_ok=changed_ok)
        with draws_kept(self):
            return prepare_plan(plan, parts, device=device, global_batch=global_batch, workload=workload)

    def loader(
        self,
        dataset: Any,
        *,
        run: TrainingRun | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        shuffle: bool | None = None,
        seed: int = 0,
        start: int = 0,
        unverified_ok: bool = False,
    ) -> DataLoader[Any]:
        """The DataLoader of a dataset, with the setting that the search measured and batches for `run.step`.

        Args:
            dataset: A dataset; or a DataLoader, of which dataset, collate_fn and order are taken.
            run: What `plan.prepare` gave: it knows which data-parallel rank this is; one rank needs none.
            collate_fn, shuffle: None: as the DataLoader has them, else torch's own, and True.
            seed, start: Of the order; the training has seen `start` samples, `run.steps * global_batch`.
            unverified_ok: See `prepare`.

        Returns:
            One epoch each time, without a last, smaller batch; without workers where none were measured.

        Raises:
            PlanError: the plan has several data-parallel ranks, and it is not known which of them this is; or it is
                unverified.
            WorkloadError: it is no dataset, or has fewer samples than a step takes.
        """
        from autoplan.strategies.workloads.loading.source import make_loader, source_of

        refuse_unverified(self.accepted(unverified_ok))
        source = source_of(dataset)
        if collate_fn is not None:
            source = dataclasses.replace(source, collate_fn=collate_fn)
        if shuffle is not None:
            source = dataclasses.replace(source, shuffled=shuffle, sampler=None)
        rank, ranks = position_of(self, run)
        check_split(source, rank, ranks)
        setting = setting_of(self) or LoaderSetting(workers=0, pin_memory=self.device == "cuda")
        batch_size = self.workload.global_batch // self.config.dp
        return make_loader(source, setting, batch_size=batch_size, rank=rank, ranks=ranks, seed=seed, start=start)

    def apply_to(
        self,
        training: Any,
        *parts: Any,
        changed_ok: bool = False,
        unverified_ok: bool = False,
        **settings: Any,
    ) -> Any:
        """The training that was searched, as the plan runs it: of a Trainer, a loop, a LightningModule or a step.

        A Trainer of transformers or TRL gives a Trainer of the same class, built anew with the plan's arguments. It has
        the given one's model (changed in place where the plan says so: attention, compiled blocks), datasets, collator,
        processing class, callbacks, loss and compute_* functions, and an optimizer in the plan's form. What the Trainer
        cannot carry, and on how many processes it must be started, is said in warnings.

        Args:
            training: The Trainer that was searched, or one that is made in the same way; it has not trained yet. Or
                the model of a loop, a LightningModule, or make_step.
            parts: After the model of a loop its optimizer, its DataLoader, and the loss where the search had one; after
                a LightningModule its datamodule or DataLoader.
            changed_ok: Apply it although the model's or the loss's code, or the optimizer, is not that of the search.
            unverified_ok: See `prepare`.
            settings: Of a loop: schedule, schedule_interval, max_grad_norm, loss_mean and accelerator, as the search
                had them; of a LightningModule trainer instead of accelerator, and no schedule_interval.

        Returns:
            The new Trainer; `trainer.train()` trains it. Of a loop an `AppliedLoop`: its run, and its DataLoader with
            the run's batch size. Of a LightningModule `LightningSettings`: the arguments of the lightning.Trainer,
            the DataLoader's batch size, and what is not carried; the module is changed in place. Of make_step a
            `PlannedStep`, which is called with an index and gives the loss.

        Raises:
            PlanError: train() began; the plan needs another number of processes; the training is not that of the
                search; or the plan uses tensor or pipeline parallelism, or is unverified.
            ExportError: a lightning.Trainer cannot do what the plan has.
            WorkloadError: it is no training, or one that a search refuses.
            UsageError: parts were given beside a Trainer, which has all of them.
        """
        from autoplan.planner.plan.loops import apply_parts
        from autoplan.strategies.workloads.frameworks import framework_of, module_of

        plan = self.accepted(unverified_ok, changed_ok=changed_ok)
        refuse_unverified(plan)  # before the training is read
        framework = framework_of(training)
        if framework is None:
            return apply_parts(plan, training, parts, **settings)
        apply_plan = module_of(framework, "apply").apply_plan
        with draws_kept(plan, on_ranks=True):
            return apply_plan(plan, training, *parts, changed_ok=plan.changed_ok, **settings)
