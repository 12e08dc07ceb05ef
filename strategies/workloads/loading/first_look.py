"""A first look at a dataset, before anything is measured: can a batch of it be made? Runs in a rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from torch.utils.data import default_collate

from autoplan.strategies.workloads.loading.named import Failure, NamedCollate, NamedSamples, NamedStream
from autoplan.strategies.workloads.loading.source import LoaderSource, make_order, samples_of


def first_and_last(source: LoaderSource, samples: int) -> Failure | None:
    """What is wrong with the first samples of a `LoaderSource`, with a batch of them, or with its last sample.

    Where the order is that of a sampler of the user's own, the last sample is that of its first step.

    Args:
        source: The dataset.
        samples: Of a global batch, which the dataset, or the sampler, should have at least.

    Raises:
        WorkloadError: fewer samples than that, by the sampler; or nothing says how many there are.
    """
    indices: Sequence[Any]
    collate = NamedCollate(source.collate_fn or default_collate)
    too_few = "the dataset ends after {} samples, and a step takes {}: no whole batch can be made"
    if source.streams:
        named = list(itertools.islice(NamedStream(source.dataset), samples))
        if len(named) < samples and not any(isinstance(sample, Failure) for _, sample in named):
            return Failure(too_few.format(len(named), samples))
    else:
        dataset = NamedSamples(source.dataset)
        if source.sampler is not None:
            shared_by = int(getattr(source.sampler, "num_replicas", 1) or 1)  # it gives one rank's share
            step = max(samples // shared_by, 1)
            indices = list(itertools.islice(make_order(source, batch_size=step), step))
        else:
            indices = range(samples_of(source))
            if len(indices) < samples:
                return Failure(too_few.format(len(indices), samples))
        named = [dataset[index] for index in (indices[-1], indices[0], indices[min(1, len(indices) - 1)])]
        if not isinstance(named[0][1], Failure):
            named = named[1:]  # a last sample may well be shorter
    batch = collate(named)
    return batch if isinstance(batch, Failure) else None
