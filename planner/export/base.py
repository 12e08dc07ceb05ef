"""Shared parts of all export targets: the protocol of a target, its files, the comments about the plan, refusals."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass, field
from typing import Literal, Protocol

from autoplan.errors import ExportError
from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.plan_file import one_line
from autoplan.strategies.config import TrainingConfig

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
        notes: Sentences for the user, such as on a check that could not run.
    """

    files: dict[str, str]
    not_carried: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())


class Target(Protocol):
    """One export target: makes the files, and checks them with the reader that the other trainer uses."""

    name: str
    suffix: str
    runs_code: bool  # whether it builds the model, so that a file that the plan names runs

    def render(self, plan: Plan, stem: str) -> Export: ...

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
    return [
        f"{MADE_BY} {environment.autoplan} from a plan found on {plan.created} (study {plan.study}).",
        f"Workload: {plan.workload.name}, global batch {plan.workload.global_batch} {samples}{length}.",
        f"Hardware: {device.name} ({device.type}), torch {environment.torch}, Python {environment.python}"
        + (f", transformers {environment.transformers}." if environment.transformers else "."),
        f"Measured there: {measured.tokens_per_s.median:.4g} {unit}/s ({measured.tokens_per_s.low:.4g} to "
        f"{measured.tokens_per_s.high:.4g}), {plan.speedup.median:.3g} times the plain fp32 run "
        f"({plan.speedup.low:.3g} to {plan.speedup.high:.3g}).",
        f"Configuration: {plan.config.describe()}; accumulation {plan.accumulation}.",
    ]


def comment(lines: list[str] | tuple[str, ...], mark: str = "#") -> str:
    """The lines as a comment, wrapped at 110 columns.

    Names come from anywhere, so no character of theirs ends a line, in any language (U+2028 does in YAML).
    """
    import textwrap

    wrapper = textwrap.TextWrapper(
        110, initial_indent=f"{mark} ", subsequent_indent=f"{mark}   ", break_long_words=False
    )
    return "\n".join(wrapper.fill(one_line(line)) for line in lines)


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


Need = Literal["tensor parallelism", "pipeline parallelism", "replicas of shards", "shards on a CPU"]

_CARRIED_BY: dict[Need, tuple[str, ...]] = {
    "tensor parallelism": ("pytorch", "ray", "torchtitan", "megatron"),
    "pipeline parallelism": ("torchrun", "slurm", "torchtitan", "megatron"),
    "replicas of shards": ("pytorch", "accelerate", "torchtitan"),
    "shards on a CPU": ("pytorch", "deepspeed", "lightning", "fabric"),
}


def nearest(need: Need) -> str:
    """A hint that names what carries it."""
    return f"the targets {' and '.join(_CARRIED_BY[need])}, or plan.prepare() in your own loop, under torchrun."


def refusal(tool: str, need: Need, given: str) -> ExportError:
    """The error of a target that cannot express a plan.

    Args:
        tool: The tool, as a subject.
        need: What it lacks.
        given: What the plan has.
    """
    return ExportError(f"{tool} cannot run {need}, and the plan has {given}", hint=f"What does: {nearest(need)}")


def refuse_model_parallelism(tool: str, config: TrainingConfig, *, replicas_of_shards: bool) -> None:
    """Refuses tensor and pipeline parallelism, and replicas of shards.

    Args:
        tool: The tool, as a subject.
        config: The plan's.
        replicas_of_shards: Whether the tool has them.

    Raises:
        ExportError: the plan has one of these.
    """
    if config.tp > 1:
        raise refusal(tool, "tensor parallelism", f"tp={config.tp}")
    if config.pp > 1:
        raise refusal(tool, "pipeline parallelism", f"pp={config.pp}")
    if config.dp_shard > 1 and config.dp_replicate > 1 and not replicas_of_shards:
        given = f"dp_replicate={config.dp_replicate} dp_shard={config.dp_shard}"
        raise refusal(tool, "replicas of shards", given)
