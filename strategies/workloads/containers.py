"""Batches in containers that torch's pytree does not know: dataclasses, and mappings such as a BatchEncoding.

In: any batch. Afterwards pytree sees the tensors in it, so that batches are sliced and moved as a dict is.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from torch.utils import _pytree as pytree


def know_containers(batch: Any) -> None:
    """Registers the classes of the mappings and dataclasses in a batch with pytree, each once per process.

    A mapping whose class cannot be made from a dict stays a leaf.
    """
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, type):
            continue
        with contextlib.suppress(Exception):  # such a leaf is passed on as it is
            if isinstance(leaf, Mapping):
                if list(_make_mapping(*_parts_of_mapping(leaf))) != list(leaf):
                    continue
                _register(type(leaf), _parts_of_mapping, _make_mapping)
                know_containers(leaf)
            elif dataclasses.is_dataclass(leaf):
                _register(type(leaf), _parts_of_dataclass, _make_dataclass)
                know_containers(leaf)


def _register(kind: type, parts_of: Any, make: Any) -> None:
    pytree.register_pytree_node(kind, parts_of, make)


def _parts_of_mapping(value: Mapping[Any, Any]) -> tuple[list[Any], Any]:
    return list(value.values()), (type(value), tuple(value))


def _make_mapping(parts: Iterable[Any], context: Any) -> Any:
    kind, keys = context
    items = dict(zip(keys, parts, strict=True))
    return kind(**items) if dataclasses.is_dataclass(kind) else kind(items)  # type: ignore[operator]


def _parts_of_dataclass(value: Any) -> tuple[list[Any], Any]:
    names = tuple(field.name for field in dataclasses.fields(value))
    return [getattr(value, name) for name in names], (type(value), names)


def _make_dataclass(parts: Iterable[Any], context: Any) -> Any:
    kind, names = context
    made = object.__new__(kind)  # frozen or not, and whatever its __init__ takes
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(made, name, part)
    return made
