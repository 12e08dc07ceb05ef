"""The random generators that a training may draw from: torch's, Python's and NumPy's."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from autoplan.strategies.workloads.workload import Workload


def seed_generators(seed: int) -> None:
    """Seeds torch (CPU and CUDA), `random` and NumPy's global generator.

    transformers draws layerdrop from `random` or torch, and the masks of its audio models from NumPy.

    Args:
        seed: Any whole number; NumPy takes it modulo 2**32.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextlib.contextmanager
def seeded_build(seed: int) -> Iterator[None]:
    """Seeds the generators for the making of a model.

    Afterwards `random` and NumPy's, which are the program's own, are as they were; torch's go on.
    """
    before = _states(())
    seed_generators(seed)
    try:
        yield
    finally:
        _set_states((), before)


@contextlib.contextmanager
def generators_kept(*, cuda: bool = False) -> Iterator[None]:
    """Puts the generators back as they were afterwards.

    Args:
        cuda: Also those of CUDA, where it is; else torch's on the CPU alone.
    """
    generators = [torch.default_generator]
    if cuda and torch.cuda.is_available():
        torch.cuda.init()  # a seed that was given before counts from here on
        generators += torch.cuda.default_generators
    before = _states(generators)
    try:
        yield
    finally:
        _set_states(generators, before)


def _states(generators: Iterable[torch.Generator]) -> tuple[Any, ...]:
    """The states of generators of torch, of `random` and of NumPy's global generator."""
    return [one.get_state() for one in generators], random.getstate(), np.random.get_state()


def _set_states(generators: Iterable[torch.Generator], states: tuple[Any, ...]) -> None:
    for generator, state in zip(generators, states[0], strict=True):
        generator.set_state(state)
    random.setstate(states[1])
    np.random.set_state(states[2])


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the generators, and puts them back as they were afterwards (torch's on the CPU)."""
    with generators_kept():
        seed_generators(seed)
        yield


class RandomNumbers:
    """Random numbers apart from those of the process: `with numbers:` draws them, and goes on where it left off.

    Inside, torch's generator of the CPU, `random`, NumPy's global generator, and those that are given are as they were
    left the last time; outside they are as they were before. CUDA's generators are left alone.

    Args:
        seed: Any whole number.
        generators: Of torch, besides its own.
    """

    def __init__(self, seed: int, generators: Iterable[torch.Generator] = ()) -> None:
        self._generators = (torch.default_generator, *generators)
        self._outside = self._inside = _states(self._generators)
        for generator in self._generators:
            generator.manual_seed(seed % 2**63)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        self.__exit__()

    def __enter__(self) -> None:
        self._outside = _states(self._generators)
        _set_states(self._generators, self._inside)

    def __exit__(self, *error: object) -> None:
        self._inside = _states(self._generators)
        _set_states(self._generators, self._outside)


def with_seeded_batches(workload: Workload) -> Workload:
    """The workload with a make_batch that gives the same batch for the same index, whatever was drawn before.

    A make_batch that draws from a global generator (`torch.rand` without one of its own) gives other samples in each
    run; where two runs are compared, they have to be the same.
    """
    make_batch = workload.make_batch

    def same_batch(count: int, index: int) -> Any:
        with seeded(workload.seed + index):
            return make_batch(count, index)

    return dataclasses.replace(workload, make_batch=same_batch)
