"""The built-in model configurations, by name. Reads JSON only; loads no torch."""

from __future__ import annotations

import difflib
import functools
import json
from pathlib import Path
from typing import Any

from autoplan.errors import WorkloadError

_FOLDER = Path(__file__).parent / "model_configs"

# The defaults of transformers' Trainer (TrainingArguments), with torch's AdamW in fp32.
DEFAULT_OPTIONS: dict[str, Any] = {"learning_rate": 5e-5, "weight_decay": 0.0, "max_grad_norm": 1.0, "seed": 0}


def list_models() -> tuple[str, ...]:
    """The names of the built-in models, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def canonical_name(name: str) -> str | None:
    """The built-in model of a name or an alias; None if there is none."""
    return _names().get(name.strip().lower())


def read_config(name: str) -> dict[str, Any]:
    """The configuration of a built-in model, as transformers' config.json has it.

    Raises:
        WorkloadError: there is no such model.
    """
    if name not in list_models():  # it may come from a plan: no path is made of anything else
        raise WorkloadError(f"{name!r} is no built-in model", hint=f"Built in are {', '.join(list_models())}.")
    document = json.loads((_FOLDER / f"{name}.json").read_text())
    return dict(document["config"])


def near_names(name: str) -> list[str]:
    """Built-in names that look like this one."""
    return difflib.get_close_matches(name.strip().lower(), list_models(), n=3, cutoff=0.5)


@functools.cache
def _names() -> dict[str, str]:
    names = {}
    for name in list_models():
        document = json.loads((_FOLDER / f"{name}.json").read_text())
        names.update(dict.fromkeys([name, *document["aliases"]], name))
    return names
