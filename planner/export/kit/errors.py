"""The errors of the copied code, without autoplan's exit codes."""

from __future__ import annotations


class PlainError(ValueError):
    """Says what was given, which rule it broke and, in the hint, what to do."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}. {hint}")


class ConfigError(PlainError):
    """A knob does not go with the model or the device."""


class WorkloadError(PlainError):
    """The model, its batches or its loss cannot be trained."""
