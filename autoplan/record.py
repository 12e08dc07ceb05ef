"""The base of every record that crosses a process or a file, and a figure that says where it comes from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from autoplan.text import all_writable

Provenance = Literal["measured", "driver", "datasheet", "published", "assumed", "unknown"]


class Record(BaseModel):
    """A frozen record that crosses a process or a file; unknown fields are refused.

    Texts in it can always be written: a lone surrogate in one, which UTF-8 has no bytes for, is escaped.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __dir__(self) -> list[str]:
        """The names that completion offers: those of the record, without pydantic's own."""
        return sorted(set(super().__dir__()) - {name for name in dir(BaseModel) if not name.startswith("__")})

    @model_validator(mode="before")
    @classmethod
    def _keep_texts_writable(cls, value: Any) -> Any:
        return {name: all_writable(one) for name, one in value.items()} if isinstance(value, dict) else value


class Reading(Record):
    """One figure about the machine.

    `value` is None where the figure is unknown; `reason` then says why. Callers must branch on it: no number is
    substituted.
    """

    value: float | None
    unit: str = Field(description="name of the SI unit: bytes, bytes/s, flop/s, s, Hz, W, celsius, 1")
    provenance: Provenance
    spread: float | None = Field(
        default=None, description="interquartile range over the median of the repeats, as a share (1)"
    )
    source: str = Field(default="", description="the command, driver call, file or document it comes from")
    reason: str | None = Field(default=None, description="why the value is unknown")

    @classmethod
    def unknown(cls, unit: str, reason: str, source: str = "") -> Reading:
        """A reading without a value, and why."""
        return cls(value=None, unit=unit, provenance="unknown", reason=reason, source=source)

    @classmethod
    def driver(cls, value: float, unit: str, source: str) -> Reading:
        """A reading from the operating system or a driver, as it is."""
        return cls(value=value, unit=unit, provenance="driver", source=source)
