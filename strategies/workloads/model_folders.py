"""Folders and files of transformers models on the disk: their configuration and weight files. Loads no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoplan.errors import WorkloadError

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
