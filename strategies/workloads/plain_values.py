"""Plain values: data without code, described as JSON that is the same in every process."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from autoplan.strategies.workloads.digests import array_digest, length_of, qualified_name, sampled, tensor_digest

MAX_DEPTH = 12

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONFIG_NOTES = ("use_cache", "transformers_version", "torch_dtype", "dtype", "name_or_path", "architectures")


def is_plain(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Whether a value is data alone: numbers, texts, tensors, collections of them, dataclasses, configurations."""
    if isinstance(value, (*_PLAIN, torch.Tensor, torch.dtype, torch.device, enum.Enum, Path)):
        return True
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return True
    if depth <= 0 or isinstance(value, type):
        return False
    if isinstance(value, Mapping):
        return all(is_plain(key, depth - 1) and is_plain(item, depth - 1) for key, item in sampled(value.items()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(
            is_plain(item, depth - 1) for item in (value if isinstance(value, set | frozenset) else sampled(value))
        )
    if dataclasses.is_dataclass(value):
        return all(is_plain(getattr(value, field.name, None), depth - 1) for field in dataclasses.fields(value))
    return _is_configuration(value)


def _is_configuration(value: Any) -> bool:
    return hasattr(value, "model_type") and callable(getattr(value, "to_dict", None))


def plain(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Data as JSON; what is no data by its type."""
    if isinstance(value, float | complex | bytes) or value is None or isinstance(value, bool | int | str):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return tensor_digest(value)
    if isinstance(value, torch.dtype | torch.device | enum.Enum | Path):
        return str(value)
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return array_digest(value)
    if depth <= 0 or isinstance(value, type):
        return qualified_name(value)
    if isinstance(value, Mapping):
        pairs = [[str(key), plain(item, depth - 1)] for key, item in sampled(value.items())]
        return sorted(pairs, key=lambda pair: str(pair[0]))
    if isinstance(value, set | frozenset):
        return sorted(str(plain(item, depth - 1)) for item in value)
    if isinstance(value, list | tuple):
        return [length_of(value), *(plain(item, depth - 1) for item in sampled(value))]
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        return [qualified_name(type(value)), plain(fields, depth - 1)]
    if _is_configuration(value):
        fields = value.to_dict().items()
        kept = {k: v for k, v in fields if not k.startswith("_") and "drop" not in k and k not in _CONFIG_NOTES}
        return [qualified_name(type(value)), plain(kept, depth - 1)]
    return qualified_name(value)
