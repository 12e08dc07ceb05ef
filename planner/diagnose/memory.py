"""Memory over the steps: how much it grows, and which name of the user's keeps tensors from step to step.

Host memory is what the process has for itself (resident less shared pages, proc(5) statm); of a CUDA device it is what
tensors hold there. Names and lines are kept, no values.
"""

from __future__ import annotations

import ast
import os
import statistics
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autoplan.planner.diagnose.records import Kept
from autoplan.processes.cause import is_users_file

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

MOST_NODES, MOST_COUNTED = 5000, 20_000
"""Nodes of a graph that are compared with those of another, and up to which they are counted."""

MOST_LISTS = 50
"""A dict with no more entries may hold lists that grow: `history["loss"]`."""

EACH = 0.5
"""A name that gets a tensor in half of the steps keeps what steps make."""

GROWS = frozenset({"append", "extend", "add", "appendleft", "insert", "update", "setdefault"})
"""Methods that make a container larger."""


class MemoryMeter:
    """Reads the memory of this process, or of its CUDA device, in some microseconds."""

    def __init__(self) -> None:
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        self._device = 0  # each thread has a current device of its own; that of the main thread is the rank's

    def read_bytes(self) -> int:
        """Bytes in use now."""
        if torch.cuda.is_initialized():
            if threading.current_thread() is threading.main_thread():
                self._device = torch.cuda.current_device()
            return torch.cuda.memory_allocated(self._device)
        _, resident, shared, *_ = os.pread(self._statm, 128, 0).split()
        return (int(resident) - int(shared)) * PAGE_BYTES


def growth_bytes(samples: Sequence[int]) -> float:
    """Bytes that a step adds: from the first to the last quarter of the steps, if the second half grew as the first."""
    quarter = len(samples) // 4
    if not quarter:
        return 0.0
    marks = [statistics.median(samples[n * quarter : (n + 1) * quarter]) for n in range(4)]
    if not marks[0] < marks[1] < marks[2] < marks[3]:
        return 0.0  # it came once, or goes up and down
    return (marks[3] - marks[0]) / (3 * quarter)


@dataclass(kw_only=True, slots=True)
class Named:
    """What a name holds at the end of a step: a container with its length, or a tensor with the nodes of its graph."""

    file: str
    name: str
    value: Any
    size: int

    def tensors(self, since: int) -> list[torch.Tensor]:
        """The tensors that came since the container had that length."""
        if isinstance(self.value, torch.Tensor):
            return [self.value]
        values = self.value.values() if isinstance(self.value, dict) else self.value
        return [one for value in list(values)[since:] for one in _tensors_in(value)]


def names_of_user(wanted: Sequence[str] | None = None) -> dict[tuple[str, str], Named]:
    """Containers and graphs that the user's functions on the stack can name, also as attributes of their objects.

    Args:
        wanted: Only these names; None: all.

    Returns:
        By file and name.
    """
    found: dict[tuple[str, str], Named] = {}
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users_file(file):
            for name, value in list(frame.f_locals.items()):
                for path, one in _with_attributes(name, value):
                    size = _size(one) if wanted is None or path in wanted else None
                    if size is not None:
                        found.setdefault((file, path), Named(file=file, name=path, value=one, size=size))
        frame = frame.f_back  # type: ignore[assignment]
    return found


def sizes_of_names() -> dict[tuple[str, str], int]:
    """The sizes of all names, for `find_kept` some steps later."""
    return {key: named.size for key, named in names_of_user().items()}


def find_kept(before: dict[tuple[str, str], int], steps: int) -> list[Kept]:
    """Names that got tensors since, in at least half of so many steps."""
    found: list[Kept] = []
    seen: set[int] = set()
    for key, now in names_of_user().items():
        then = before.get(key)
        if then is None or now.size - then < max(2, EACH * steps) or id(now.value) in seen:
            continue
        new = now.tensors(then)
        if not new:
            continue
        seen.add(id(now.value))
        graphs = any(one.grad_fn is not None for one in new)
        line = line_that_grows(now.file, now.name)
        is_sum = isinstance(now.value, torch.Tensor)
        if is_sum and line is None:
            continue  # it is made anew in each step, this time from more operations: of a longer sequence
        found.append(Kept(name=now.name, line=line, graphs=graphs, is_sum=is_sum))
    return found


def cut_graphs(names: Sequence[str], since: dict[str, int]) -> None:
    """Takes the graphs off the tensors that these names got since; what else they hold stays."""
    for named in names_of_user(names).values():
        for one in named.tensors(since.get(named.name, named.size)):
            if one.grad_fn is not None and not one._is_view():
                one.detach_()
        since[named.name] = 0 if isinstance(named.value, torch.Tensor) else named.size


def _with_attributes(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    yield name, value
    if type(value) is dict and len(value) <= MOST_LISTS:
        yield from ((f"{name}[{place}]", one) for place, one in enumerate(list(value.values())) if type(one) is list)
    if type(value).__module__ == "__main__" and not isinstance(value, torch.nn.Module):
        yield from ((f"{name}.{own}", one) for own, one in list(getattr(value, "__dict__", {}).items()))


def _size(value: Any) -> int | None:
    if isinstance(value, torch.Tensor):
        return min(MOST_COUNTED, len(graph_of(value, MOST_COUNTED))) if value.grad_fn is not None else None
    return len(value) if type(value) in (list, dict, deque) or type(value).__name__ == "defaultdict" else None


def graph_of(tensors: Any, most: int = MOST_NODES) -> set[Any]:
    """The nodes of the autograd graph behind tensors (or edges of it), so many of the nearest; leaves left out."""
    single = isinstance(tensors, torch.Tensor) or hasattr(tensors, "node")
    roots = (getattr(one, "node", None) or getattr(one, "grad_fn", None) for one in ([tensors] if single else tensors))
    waiting = deque(node for node in roots if node is not None)
    found = set(waiting)
    while waiting and len(found) < most:
        for node, _ in waiting.popleft().next_functions:
            if node is not None and node not in found and node.next_functions:
                found.add(node)
                waiting.append(node)
    return found


def _tensors_in(value: Any, depth: int = 2) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple, dict)):
        for one in value.values() if isinstance(value, dict) else value[:100]:
            yield from _tensors_in(one, depth - 1)


def line_that_grows(file: str, name: str) -> str | None:
    """The first line that adds to a name: `name.append(...)`, `name += ...`, `name[key] = ...`, `name = name + ...`."""
    try:
        tree = ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, ValueError):
        return None
    last = name.partition("[")[0].rpartition(".")[2]

    def is_it(node: ast.AST) -> bool:
        return getattr(node, "id", getattr(node, "attr", None)) == last

    def grows(node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Attribute) or node.func.attr not in GROWS:
                return False
            owner = node.func.value
            while isinstance(owner, ast.Subscript):  # `history["loss"].append(...)` adds to `history`
                owner = owner.value
            return is_it(owner)
        if isinstance(node, ast.AugAssign):
            return is_it(node.target)
        if isinstance(node, ast.Assign):
            targets = [one for target in node.targets for one in getattr(target, "elts", [target])]
            own = any(map(is_it, targets)) and any(map(is_it, ast.walk(node.value)))
            return own or any(isinstance(one, ast.Subscript) and is_it(one.value) for one in node.targets)
        return False

    lines = [node.lineno for node in ast.walk(tree) if grows(node)]  # type: ignore[attr-defined]
    return f"{os.path.basename(file)}:{min(lines)}" if lines else None
