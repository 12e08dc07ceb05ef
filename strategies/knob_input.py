"""Knobs as a user gives them: `knob=value` on the command line, values of a call; and the help text that lists them.

In: text or values. Out: values in the knob's own type, or a ConfigError. Loads no torch.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from autoplan.errors import ConfigError
from autoplan.strategies.config import KNOBS, TrainingConfig, knob_values


def parse_knob(text: str) -> tuple[str, Any]:
    """Reads `knob=value` as the command line gives it.

    Raises:
        ConfigError: no `=`, an unknown knob, or a value the knob does not take.
    """
    knob, separator, value = text.partition("=")
    if not separator:
        raise ConfigError(f"{text!r} is not of the form knob=value", hint="For example: --fix precision=bf16")
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
        rule = "one of " + ", ".join(map(str, allowed)) if allowed else f"a whole number of at least {_least(knob)}"
        raise ConfigError(f"{knob}={value!r} is not a value of {knob}", hint=f"{knob} takes {rule}.") from None
    return getattr(config, knob)


def knob_help() -> str:
    """Every knob with the values that it takes, for the help of a command line."""
    values = {knob: knob_values(knob) for knob in KNOBS}
    texts = [f"{knob}={' | '.join(map(str, allowed)) if allowed else 'N'}" for knob, allowed in values.items()]
    return "Knobs of --fix and --bound: " + "; ".join(texts) + "."


def _least(knob: str) -> int:
    """The smallest value of a knob that is a number."""
    return next(int(part.ge) for part in TrainingConfig.model_fields[knob].metadata if hasattr(part, "ge"))
