"""What every export target shares: the files it makes, its own check, the numbers that stand in its comments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from autoplan.errors import ExportError
from autoplan.planner.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """The files of one export.

    Attributes:
        files: Text by file name; the first is the one that `--out` names.
        not_carried: What the target cannot say, in sentences; they stand in the files' comments too.
        notes: What a person should know, such as a check that could not run.
    """

    files: dict[str, str]
    not_carried: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())


class Target(Protocol):
    """One export target: makes the text, and checks it as its reader would read it."""

    name: str
    suffix: str

    def render(self, plan: Plan, stem: str) -> Export: ...

    def check(self, plan: Plan, export: Export) -> tuple[str, ...]:
        """Reads the export back as its consumer would; returns notes.

        Raises:
            ExportError: a value does not read back as the plan has it.
        """


def provenance_lines(plan: Plan) -> list[str]:
    """Where the plan comes from and what was measured, for the comments of an export."""
    measured, unit = plan.measurement, plan.workload.unit
    device = plan.hardware.device(plan.device)
    samples = "sequences" if plan.workload.sequence_length else "samples"
    length = f" of {plan.workload.sequence_length} tokens" if plan.workload.sequence_length else ""
    environment = plan.environment
    return [
        f"Made by autoplan {environment.autoplan} from a plan found on {plan.created} (study {plan.study}).",
        f"Workload: {plan.workload.name}, global batch {plan.workload.global_batch} {samples}{length}.",
        f"Hardware: {device.name} ({device.type}), torch {environment.torch}, Python {environment.python}"
        + (f", transformers {environment.transformers}." if environment.transformers else "."),
        f"Measured there: {measured.tokens_per_s.median:.4g} {unit}/s ({measured.tokens_per_s.low:.4g} to "
        f"{measured.tokens_per_s.high:.4g}), {plan.speedup.median:.3g} times the plain fp32 run "
        f"({plan.speedup.low:.3g} to {plan.speedup.high:.3g}).",
        f"Configuration: {plan.config.describe()}; accumulation {plan.accumulation}.",
    ]


def comment(lines: list[str] | tuple[str, ...], mark: str = "#") -> str:
    """The lines as a comment, wrapped at 110 columns."""
    import textwrap

    return "\n".join(
        textwrap.fill(line, 110, initial_indent=f"{mark} ", subsequent_indent=f"{mark}   ", break_long_words=False)
        for line in lines
    )


def same_or_error(what: str, read_back: object, wanted: object) -> None:
    """One comparison of an export's check.

    Raises:
        ExportError: they differ.
    """
    if read_back != wanted:
        raise ExportError(
            f"the export's own check failed: {what} reads back as {read_back!r}, the plan has {wanted!r}",
            hint="Nothing was written. This is a fault of the exporter or of the tool's version: please report it.",
        )
