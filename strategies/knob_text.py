"""Knobs as text: as a user gives them, in `autoplan knobs`, and in the table of docs/reference/knobs.md.

All of it is made from the fields of TrainingConfig. Loads no torch.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from autoplan.errors import ConfigError
from autoplan.strategies.config import KNOBS, PLAIN, TrainingConfig, knob_values, knobs

HEADINGS = ("Knob", "Values", "What it does", "Numerics", "Left out when")

_EXCLUDED = {"compile": "anything compiled", "dp_shard": "FSDP2", "tp": "tensor parallelism", "pp": "a pipeline"}
"""The names that the table gives to knobs that others exclude."""


def parse_knob(text: str, option: str = "fix") -> tuple[str, Any]:
    """Reads `knob=value` as an option of the command line gives it.

    Raises:
        ConfigError: no `=`, an unknown knob, or a value the knob does not take.
    """
    knob, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"{text!r} is not of the form knob=value", hint=f"For example: --{option} precision=bf16")
    knob = knob.strip().replace("-", "_")
    return knob, check_knob(knob, value.strip())


def check_knob(knob: str, value: Any) -> Any:
    """The value in the knob's own type.

    Raises:
        ConfigError: an unknown knob, or a value the knob does not take.
    """
    allowed = knob_values(knob)
    try:
        config = TrainingConfig.model_validate({"micro_batch": 1} | {knob: value}, strict=False)
    except ValidationError:
        if knob == "precision" and str(value).lower() in ("fp8", "float8"):
            raise ConfigError(
                "fp8 is no value of precision: it is a knob beside precision=bf16, for the products of linear layers",
                hint="For example: --fix precision=bf16 --fix fp8=tensorwise --numerics lossy",
            ) from None
        least = next((part.ge for part in TrainingConfig.model_fields[knob].metadata if hasattr(part, "ge")), None)
        rule = "one of " + ", ".join(map(str, allowed)) if allowed else f"a whole number of at least {least}"
        raise ConfigError(f"{knob}={value!r} is not a value of {knob}", hint=f"{knob} takes {rule}.") from None
    return getattr(config, knob)


def knob_rows() -> list[tuple[str, ...]]:
    """The cells of HEADINGS, one row per knob in the order of the fields."""
    return [
        (
            knob,
            _values(knob),
            TrainingConfig.model_fields[knob].description or "",
            knobs()[knob].numerics,
            _left_out(knob),
        )
        for knob in KNOBS
    ]


def knob_table() -> list[str]:
    """The lines of the Markdown table, one row per knob in the order of the fields."""
    rows = [(f"`{knob}`", *cells) for knob, *cells in knob_rows()]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (HEADINGS, *rows)]
    return [lines[0], "|" + "---|" * len(HEADINGS), *lines[1:]]


def _values(knob: str) -> str:
    """The closed list, the plain value first, or the numbers that a search offers."""
    allowed, known = knob_values(knob), knobs()[knob]
    if allowed is not None:
        plain = getattr(PLAIN, knob)
        return ", ".join(f"`{value}`" for value in (plain, *(value for value in allowed if value != plain)))
    if known.role == "rank_count":
        return "factors of the number of ranks"
    return known.offered or f"`{getattr(PLAIN, knob)}`, and the numbers that you name"


def _left_out(knob: str) -> str:
    known = knobs()[knob]
    texts = ["you neither fix nor bound it"] if known.unpriced else []
    texts += {"cpu": ["CUDA"], "cuda": ["CPU"]}.get(known.device or "", [])
    texts += [f"without `{need.describe()}`" for need in known.needs]
    texts += [known.left_out] if known.left_out else []
    return "; ".join(texts + [_EXCLUDED[other] for other in known.excludes])
