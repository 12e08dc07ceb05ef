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
from autoplan.files import replace_file
from autoplan.planner.apply import check_before_use
from autoplan.planner.export.base import Export, Target
from autoplan.planner.export.user_code import LIMITS, make_limits
from autoplan.planner.plan import Plan
from autoplan.planner.trust import require_trust

# Target: its module and class. A module is imported only when its target is used.
TARGETS: Mapping[str, tuple[str, str]] = {
    "json": ("autoplan.planner.export.json_file", "JsonTarget"),
    "yaml": ("autoplan.planner.export.yaml_file", "YamlTarget"),
    "pytorch": ("autoplan.planner.export.pytorch_script", "PytorchTarget"),
    "transformers": ("autoplan.planner.export.transformers_arguments", "TransformersTarget"),
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
    trust_code: bool = False,
    workload: str | Path | None = None,
) -> Exported:
    """Writes a plan for another trainer.

    Args:
        plan: The plan.
        to: json, yaml, pytorch or transformers.
        out: The file to write; other files are written beside it. None: `plan-<target>` in the current folder.
        budget: Time for building the workload's model, where the target needs it, like `"2m"`. Default: 5 minutes.
        memory_limit: What that may take, like `"8GiB"` or `"80%"`. Default: 80 % of what is available.
        changed_ok: Export it although the plan was edited, or the workload's code changed.
        trust_code: Run the file that the plan names, whoever made the plan: the target pytorch builds its model.
        workload: The plan's file, named again: where it is now. It is trusted then.

    Raises:
        UsageError: there is no such target, or the file cannot be written.
        PlanError: the plan was edited, its code changed, or it names code that nobody vouches for.
        ExportError: the target cannot express the plan, or the check failed; nothing is written.
    """
    target = load_target(to)
    if workload is not None:
        plan, trust_code = plan.with_workload_at(str(workload)), True
    if not plan.parity.passed:
        raise ExportError(
            "the plan failed its parity check: it does not train the same thing, and is not exported",
            hint="Search again: autoplan search.",
        )
    said = check_before_use(plan, changed_ok=changed_ok)
    if target.runs_code:
        require_trust(plan.workload, plan.study, trust_code=trust_code)
    path = Path(out) if out is not None else Path(f"plan-{to}{target.suffix}")
    limits = LIMITS.set(make_limits(budget, memory_limit))
    try:
        export = target.render(plan, path.stem)
        notes = target.check(plan, export)
    finally:
        LIMITS.reset(limits)
    notes = (*([] if said is None else [said]), *export.notes, *notes)
    return Exported(paths=_write(path, export), not_carried=export.not_carried, notes=notes)


def _write(path: Path, export: Export) -> tuple[Path, ...]:
    """Writes all files atomically; the first under the name of `path`."""
    written = []
    for number, (name, text) in enumerate(export.files.items()):
        file = path if number == 0 else path.with_name(name)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, text)
        except OSError as error:
            raise UsageError(
                f"the export cannot be written to {file}: {error.strerror}", hint="Give another path with --out."
            ) from error
        written.append(file)
    return tuple(written)
