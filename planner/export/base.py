"""Shared parts of all export targets: the protocol of a target, its files, the comments about the plan."""

from __future__ import annotations

import keyword
import re
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoplan.errors import ExportError
from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.baseline import run_words
from autoplan.planner.records.plan_file import one_line

CODING = "# -*- coding: utf-8 -*-"
"""The first line of each Python file: Python reads the encoding from a comment, and the next ones have names in them
that could say another (PEP 263)."""


MADE_BY = "Made by autoplan"
"""In the first lines of each file of an export."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """The files of one export.

    Attributes:
        files: Text by file name; the first is the one that `--out` names.
        not_carried: Sentences on what the target cannot express; they are in the comments of the files too.
    """

    files: dict[str, str]
    not_carried: tuple[str, ...] = ()


class Target(ABC):
    """One export target: makes the files, and checks them with the reader that the other trainer uses.

    Attributes:
        name: Of the target.
        suffix: Of its first file.
        runs_code: It builds the model, so a file that the plan names runs.
        is_module: Its first file is imported by its name.
        carries_loader: It has the loader's workers, prefetch factor and pinned memory, where the search measured them.
    """

    name: str
    suffix: str
    runs_code = False
    is_module = False
    carries_loader = True

    @abstractmethod
    def render(self, plan: Plan, stem: str) -> Export:
        """The files of a plan; the first is `stem` with the target's suffix.

        Raises:
            ExportError: the target cannot express the plan.
        """

    @abstractmethod
    def check(self, plan: Plan, export: Export) -> tuple[str, ...]:
        """Reads the export back as the other trainer would; returns notes.

        Raises:
            ExportError: a value that was read back is not the plan's.
        """


def provenance_lines(plan: Plan) -> list[str]:
    """The origin of the plan and its measurement, as lines for the comments of an export."""
    measured, unit = plan.measurement, plan.workload.unit
    device = plan.hardware.device(plan.device)
    samples = "sequences" if plan.workload.sequence_length else "samples"
    length = f" of {plan.workload.sequence_length} tokens" if plan.workload.sequence_length else ""
    environment = plan.environment
    before = run_words(plan.baseline.config, plan.workload.own_setting, "the plain fp32 run", whole=True)
    return [
        f"{MADE_BY} {environment.autoplan} from a plan found on {plan.created} (study {plan.study}).",
        f"Workload: {plan.workload.name}, global batch {plan.workload.global_batch} {samples}{length}.",
        f"Hardware: {device.name} ({device.type}), torch {environment.torch}, Python {environment.python}"
        + (f", transformers {environment.transformers}." if environment.transformers else "."),
        *([] if plan.nodes is None else [f"Nodes: {plan.nodes.describe()}."]),
        f"Measured there: {measured.tokens_per_s.median:.4g} {unit}/s ({measured.tokens_per_s.low:.4g} to "
        f"{measured.tokens_per_s.high:.4g}), {plan.speedup.median:.3g} times {before} "
        f"({plan.speedup.low:.3g} to {plan.speedup.high:.3g}).",
        f"Configuration: {plan.config.describe()}; accumulation {plan.accumulation}.",
    ]


def comment(lines: Sequence[str], not_carried: Sequence[str] = ()) -> str:
    """The lines as a comment, wrapped at 110 columns, and what is not carried.

    Names come from anywhere, so no character of theirs ends a line, in any language (U+2028 does in YAML).
    """
    wrapper = textwrap.TextWrapper(110, initial_indent="# ", subsequent_indent="#   ", break_long_words=False)
    missing = (f"NOT CARRIED: {text}." for text in not_carried)
    return "\n".join(wrapper.fill(one_line(line)) for line in (*lines, *missing))


def companion_name(stem: str) -> str:
    """The name of the Python module beside a file, one that can be imported.

    Args:
        stem: The name of that file without its suffix.
    """
    name = re.sub(r"\W", "_", stem, flags=re.ASCII)
    return f"{'_' if name[:1].isdigit() else ''}{name}_companion.py"


def is_python_name(text: object, *, dotted: bool = False) -> bool:
    """Whether a text is a name that may stand in Python source: an identifier, or several with dots between them."""
    if not isinstance(text, str):
        return False
    parts = text.split(".") if dotted else [text]
    return all(part.isascii() and part.isidentifier() and not keyword.iskeyword(part) for part in parts)


def same_or_error(what: str, read_back: object, wanted: object) -> None:
    """Compares one value in the check of an export.

    Raises:
        ExportError: they differ.
    """
    if read_back != wanted:
        raise ExportError(
            f"the export's own check failed: {what} reads back as {read_back!r}, the plan has {wanted!r}",
            hint="Nothing was written. The exporter or its support for this version is wrong: please report it.",
        )


def same_or_error_each(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Compares each value that is wanted with what was read back.

    Raises:
        ExportError: one differs, or is not there.
    """
    for what, value in wanted.items():
        same_or_error(what, found.get(what), value)
