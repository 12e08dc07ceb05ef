"""The entry of the exports: renders a target, checks it with the reader of the other trainer, and then writes it.

In: a plan and the name of a target. Out: files, and what the target cannot express.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autoplan.errors import ExportError, UsageError
from autoplan.files import is_special, replace_file
from autoplan.planner.export.base import Export, Target
from autoplan.planner.export.user_code import LIMITS, make_limits
from autoplan.planner.plan.loader import setting_of
from autoplan.planner.plan.plan import Plan
from autoplan.planner.plan.prepare import check_before_use
from autoplan.planner.records.plan_file import shown_text
from autoplan.planner.records.trust import own_workload

# Target: its module and class. A module is imported only when its target is used.
TARGETS: Mapping[str, tuple[str, str]] = {
    "json": ("autoplan.planner.export.documents", "JsonTarget"),
    "yaml": ("autoplan.planner.export.documents", "YamlTarget"),
    "pytorch": ("autoplan.planner.export.pytorch", "PytorchTarget"),
    "torchrun": ("autoplan.planner.export.launch", "TorchrunTarget"),
    "ray": ("autoplan.planner.export.ray", "RayTarget"),
    "slurm": ("autoplan.planner.export.launch", "SlurmTarget"),
    "transformers": ("autoplan.planner.export.transformers", "TransformersTarget"),
    "trl": ("autoplan.planner.export.transformers", "TrlTarget"),
    "accelerate": ("autoplan.planner.export.accelerate", "AccelerateTarget"),
    "deepspeed": ("autoplan.planner.export.deepspeed", "DeepspeedTarget"),
    "lightning": ("autoplan.planner.export.lightning", "LightningTarget"),
    "fabric": ("autoplan.planner.export.lightning", "FabricTarget"),
    "megatron": ("autoplan.planner.export.megatron", "MegatronTarget"),
    "torchtitan": ("autoplan.planner.export.torchtitan", "TorchtitanTarget"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """The written paths, sentences on what the target cannot express, and notes."""

    paths: tuple[Path, ...]
    not_carried: tuple[str, ...]
    notes: tuple[str, ...]


def load_target(name: str) -> Target:
    """The target of that name.

    Raises:
        UsageError: there is no such target.
    """
    if name not in TARGETS:
        near = difflib.get_close_matches(name, TARGETS, n=2)
        raise UsageError(
            f"{name!r} is not an export target",
            hint=("Did you mean " + " or ".join(near) + "? " if near else "") + f"Targets: {', '.join(TARGETS)}.",
        )
    module, kind = TARGETS[name]
    target: Target = getattr(importlib.import_module(module), kind)()
    return target


def export_plan(
    plan: Plan,
    to: str,
    out: str | Path | None = None,
    *,
    budget: str | float | None = None,
    memory_limit: str | int | None = None,
    changed_ok: bool = False,
    workload: str | Path | None = None,
    force: bool = False,
) -> Exported:
    """Writes a plan for another trainer.

    A file that is there already is never overwritten, unless with `force`. The same export made again changes nothing:
    where all files have the very text that would be written, they stay as they are.

    Args:
        plan: The plan.
        to: The name of a target: one of TARGETS.
        out: The file to write; other files are written beside it. None: `plan-<target>` in the current folder
            (`plan_<target>.py` where it is a module to import).
        budget: Time for building the workload's model, where the target needs it, like `"2m"`. Default: 5 minutes.
        memory_limit: What that may take, like `"8GiB"` or `"80%"`. Default: 80 % of what is available.
        changed_ok: Export it although the plan was edited, or the workload's code changed.
        workload: What the plan is of, as you name it: a text as `--model` takes it. The targets pytorch and ray build
            its model; not needed where you searched it.
        force: Overwrite files that are there already.

    Raises:
        UsageError: there is no such target, a file is there already, or it cannot be written; nothing is written.
        PlanError: the plan was edited, its code changed, or it alone names that code.
        ExportError: the target cannot express the plan, or the check failed; nothing is written.
    """
    target = load_target(to)
    if not plan.parity.passed and plan.unverified is None:
        raise ExportError(
            "the plan failed its parity check: it does not train the same thing, and is not exported",
            hint="Search again: autoplan search.",
        )
    if target.runs_code or workload is not None:
        named = own_workload(plan.workload, plan.study, None if workload is None else str(workload))
        plan = plan.model_copy(update={"workload": named})
    said = check_before_use(plan, changed_ok=changed_ok)
    dash = "_" if target.is_module else "-"  # a module's name can be imported
    path = Path(out if out is not None else f"plan{dash}{target.name}{target.suffix}")
    _refuse_odd_name(path)
    limits = LIMITS.set(make_limits(budget, memory_limit))
    try:
        shown = plan if target.name in ("json", "yaml") else with_step_form(plan)
        export = target.render(shown, path.stem)
        _refuse_other_suffix(path, export, target.suffix)
        notes = target.check(shown, export)
    finally:
        LIMITS.reset(limits)
    notes = (*([] if said is None else [said]), *notes)
    not_carried, setting = list(export.not_carried), setting_of(plan)
    if setting is not None and not target.carries_loader:
        own = "give it to the DataLoader of your own script or recipe"
        not_carried.append(f"the loader's setting ({setting.describe()}): {own}")
    return Exported(paths=_write(path, export, force=force), not_carried=tuple(not_carried), notes=notes)


def with_step_form(plan: Plan) -> Plan:
    """The plan with the form in which the workload's own optimizer steps, where that is known, in the place of `own`.

    Other trainers make the optimizer anew, from its options.
    """
    form = None if plan.training is None else plan.training.step_form
    if form is None or plan.config.optimizer_step != "own":
        return plan
    return plan.model_copy(update={"config": plan.config.model_copy(update={"optimizer_step": form})})


def _write(path: Path, export: Export, *, force: bool) -> tuple[Path, ...]:
    """Writes all files atomically; the first under the name of `path`."""
    files = {
        path if number == 0 else path.with_name(name): text for number, (name, text) in enumerate(export.files.items())
    }
    if path.is_dir():
        raise UsageError(
            f"{path} is a folder", hint=f"Give a file, for example --out {path / next(iter(export.files))}."
        )
    there = [] if force else [file for file, text in files.items() if _is_another_file(file, text)]
    if there:
        raise UsageError(
            f"{' and '.join(map(str, there))} {'are' if len(there) > 1 else 'is'} there already, and not what this "
            "export would write",
            hint="Nothing was written. Give another name with --out, or overwrite with --force (force=True).",
        )
    for file, text in files.items():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, text)
        except OSError as error:
            raise UsageError(
                f"the export cannot be written to {file}: {error.strerror}", hint="Give another path with --out."
            ) from error
    return tuple(files)


def _refuse_odd_name(path: Path) -> None:
    """Refuses a name that ends a line or commands a terminal: it stands in scripts and in what they print.

    Raises:
        UsageError: such a name.
    """
    if "\n" in path.name or shown_text(path.name) != path.name:
        raise UsageError(
            f"--out names the file {path.name!r}, and a name has no line breaks, control characters or parts of "
            "characters",
            hint="Nothing was written. Give another name with --out.",
        )


def _refuse_other_suffix(path: Path, export: Export, suffix: str) -> None:
    """Refuses a name for the first file that is not the one by which the other files find it.

    Raises:
        UsageError: such a name.
    """
    (first, _), *others = export.files.items()
    if path.name != first and any(first in text for _, text in others):
        raise UsageError(
            f"{path} does not end in {suffix}, and the other file of this export looks for {first}",
            hint=f"Nothing was written. For example: --out {path.with_suffix(suffix)}",
        )


def _is_another_file(file: Path, text: str) -> bool:
    """Whether something is at this path that writing would destroy; a link that leads nowhere is something."""
    if is_special(file):
        return False  # a pipe, /dev/stdout
    try:
        return file.read_bytes() != text.encode("utf-8", errors="backslashreplace")
    except (FileNotFoundError, NotADirectoryError):
        return file.is_symlink()
    except OSError:  # a folder, or not readable
        return True
