"""Configurations of models: built in, by name, and in folders on the disk. Reads JSON only; loads no torch."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping
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


# Folders and files of models on the disk.


LENGTH_FIELDS = ("n_positions", "max_position_embeddings", "n_ctx", "max_seq_len", "seq_length")


def read_config_file(path: Path) -> dict[str, Any]:
    """The fields of a config.json of transformers.

    Raises:
        WorkloadError: it is missing, not JSON, or names no model type.
    """
    if path.suffix == ".py":
        raise WorkloadError(
            f"{path} is a Python file, and no function in it is named",
            hint=f"Write {path}:FUNCTION, the function that makes the workload or the model.",
        )
    try:
        fields = json.loads(path.read_text())
    except OSError as error:
        raise WorkloadError(
            f"{path} cannot be read: {error.strerror}", hint="Give a config.json or a folder with one."
        ) from error
    except ValueError as error:
        raise WorkloadError(f"{path} is not JSON: {error}", hint="Is the file cut short? Fetch it again.") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise WorkloadError(
            f"{path} names no model_type, so it is not a model configuration of transformers",
            hint='A config.json is an object with "model_type", for example "gpt2" or "llama".',
        )
    return fields


def own_length(fields: Mapping[str, Any]) -> int | None:
    """The longest sequence a configuration states; None if it states none."""
    for name in LENGTH_FIELDS:
        value = fields.get(name)
        if isinstance(value, int):
            return value
    return None


def weight_files(folder: Path) -> list[Path]:
    """The files of a model's weights in a folder, by name."""
    patterns = ("*.safetensors", "pytorch_model*.bin")
    return sorted(path for pattern in patterns for path in folder.glob(pattern))


def weights_stamp(folder: Path) -> str:
    """Names, sizes and times of the weight files: enough to see that they changed, without reading gigabytes."""
    stamps = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in weight_files(folder)]
    return json.dumps(stamps)
