"""The entry of the exports: renders a target, checks it with the reader of the other trainer, and then writes it.

In: a plan and the name of a target. Out: files, and what the target cannot express.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autoplan.errors import UsageError
from autoplan.planner.export.base import Export, Target
from autoplan.planner.export.user_code import LIMITS, make_limits
from autoplan.planner.plan import Plan

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
) -> Exported:
    """Writes a plan for another trainer.

    Args:
        plan: The plan.
        to: json, yaml, pytorch or transformers.
        out: The file to write; other files are written beside it. None: `plan-<target>` in the current folder.
        budget: Time for building the workload's model, where the target needs it, like `"2m"`. Default: 5 minutes.
        memory_limit: What that may take, like `"8GiB"` or `"80%"`. Default: 80 % of what is available.

    Raises:
        UsageError: there is no such target, or the file cannot be written.
        ExportError: the target cannot express the plan, or the check failed; nothing is written.
    """
    target = load_target(to)
    path = Path(out) if out is not None else Path(f"plan-{to}{target.suffix}")
    limits = LIMITS.set(make_limits(budget, memory_limit))
    try:
        export = target.render(plan, path.stem)
        notes = target.check(plan, export)
    finally:
        LIMITS.reset(limits)
    return Exported(paths=_write(path, export), not_carried=export.not_carried, notes=(*export.notes, *notes))


def _write(path: Path, export: Export) -> tuple[Path, ...]:
    """Writes all files atomically; the first under the name of `path`."""
    written = []
    for number, (name, text) in enumerate(export.files.items()):
        file = path if number == 0 else path.with_name(name)
        temporary = file.with_name(file.name + ".tmp")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(file)
        except OSError as error:
            raise UsageError(
                f"the export cannot be written to {file}: {error.strerror}", hint="Give another path with --out."
            ) from error
        written.append(file)
    return tuple(written)
