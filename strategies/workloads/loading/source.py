"""The dataset that was handed in as `loader=`: how it reaches another process, and what makes its DataLoader.

In: a dataset, a DataLoader, a function that gives one of them, or `file.py:function`. Out: a
`LoaderSpec`; and from that, in a rank, a `LoaderSource`. `spec_of_text` loads no torch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoplan.errors import WorkloadError
from autoplan.strategies.workloads.digests import Describer, digest
from autoplan.strategies.workloads.function_file import (
    NAMED,
    check_function,
    command_line,
    import_function,
    local_sources,
)
from autoplan.strategies.workloads.loading.settings import LoaderSetting, LoaderSpec

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from autoplan.strategies.workloads.loading.order import SampleOrder

WHAT_IT_IS = (
    "It is a dataset (len() and [], or one that streams), a torch DataLoader, a function that gives one of them, "
    "or file.py:function."
)


@dataclass(frozen=True, kw_only=True)
class LoaderSource:
    """A dataset, and how its DataLoader was made.

    Attributes:
        dataset: Map-style, or one that streams.
        collate_fn: None: torch's own.
        sampler: The order of samples, where it is the user's own.
        shuffled: Whether a plain order is shuffled.
        worker_init_fn, context: As in a DataLoader (context: multiprocessing_context).
    """

    dataset: Any
    collate_fn: Callable[[list[Any]], Any] | None = None
    sampler: Any = None
    shuffled: bool = True
    worker_init_fn: Callable[[int], None] | None = None
    context: str | None = None

    @property
    def streams(self) -> bool:
        """Whether it gives samples in its own order alone."""
        from torch.utils.data import IterableDataset

        return isinstance(self.dataset, IterableDataset) or not hasattr(self.dataset, "__getitem__")

    @property
    def split_over(self) -> int:
        """The processes that the sampler splits the samples over by itself; 1: it does not."""
        return int(getattr(self.sampler, "num_replicas", 1) or 1)


# For another process.


def spec_of_text(text: str, *, arguments: Sequence[str] = ()) -> LoaderSpec:
    """The spec of `file.py:function`. Loads no torch.

    Args:
        text: As `--loader` takes it.
        arguments: What sys.argv has after the file's name while the function runs.

    Raises:
        WorkloadError: no such file or function.
    """
    if not NAMED.fullmatch(text):
        raise WorkloadError(f"the loader is {text!r}", hint=WHAT_IT_IS)
    path, function = check_function(text)
    identity = digest([local_sources(path), function, list(arguments)])
    return LoaderSpec(kind="function", reference=f"{path}:{function}", arguments=tuple(arguments), identity=identity)


def spec_of_object(value: Any) -> LoaderSpec:
    """The spec of a dataset, a DataLoader or a function, which travels by cloudpickle.

    Raises:
        WorkloadError: it is none of them, or cannot be pickled.
    """
    from autoplan.strategies.workloads.objects import pack_objects

    is_function = inspect.isroutine(value) or isinstance(value, functools.partial)
    if is_function:
        packed, name = value, str(getattr(value, "__qualname__", type(value).__name__))
    else:
        packed = source_of(value)
        name = type(packed.dataset).__name__
    hint = (
        "Give a function that makes it, loader=make_dataset, or open files, locks and connections in the first "
        "__getitem__ of a worker."
    )
    describer = Describer(stamps=True)
    described = describer.describe(packed if is_function else vars(packed))
    identity = digest([name, described])
    payload = pack_objects(packed, f"loader-{identity}", what=f"the dataset {name} and its collate_fn", hint=hint)
    return LoaderSpec(kind="object", reference=name, payload=payload, identity=identity)


def source_of(value: Any) -> LoaderSource:
    """Facts about the loader of a training, from a dataset or a DataLoader.

    Raises:
        WorkloadError: it is neither; or it is a DataLoader without a batch size, whose dataset makes the batches.
    """
    from torch.utils.data import DataLoader, RandomSampler

    from autoplan.strategies.workloads.loading.order import is_plain_order, sampler_of

    value = getattr(value, "base_dataloader", value)  # what accelerator.prepare makes of a DataLoader
    if not isinstance(value, DataLoader):
        if isinstance(value, Iterator) or not (
            (hasattr(value, "__getitem__") and hasattr(value, "__len__")) or hasattr(value, "__iter__")
        ):
            raise WorkloadError(f"the loader is {type(value).__name__}", hint=WHAT_IT_IS)
        return LoaderSource(dataset=value)
    context = value.multiprocessing_context
    common: dict[str, Any] = {
        "dataset": value.dataset,
        "collate_fn": value.collate_fn,
        "worker_init_fn": value.worker_init_fn,
        "context": None if context is None else context.get_start_method(),
    }
    if value.batch_sampler is None:
        raise WorkloadError(
            "the loader has batch_size=None, so its dataset makes the batches, and their size cannot be a plan's",
            hint="Give the DataLoader a batch_size, and a dataset whose items are single samples.",
        )
    if LoaderSource(dataset=value.dataset).streams:
        return LoaderSource(**common)
    sampler = sampler_of(value)
    if is_plain_order(sampler, value.dataset):
        return LoaderSource(**common, shuffled=type(sampler) is RandomSampler)
    return LoaderSource(**common, sampler=sampler)


# In a rank.


def open_source(spec: LoaderSpec) -> LoaderSource:
    """The dataset of a spec. A user's function runs here.

    Raises:
        WorkloadError: the function fails or gives something else.
    """
    from autoplan.strategies.workloads.objects import unpack_objects
    from autoplan.strategies.workloads.user_errors import user_error

    if spec.kind == "object":
        assert spec.payload is not None, "an object travels with its spec"
        value = unpack_objects(spec.payload, f"the dataset {spec.reference} and its collate_fn")
    else:
        value = import_function(spec.reference)
    if isinstance(value, LoaderSource):
        return value
    try:
        with command_line(spec.reference, spec.arguments):
            value = value()
    except Exception as error:
        raise user_error(error, f"{spec.reference}()", "It takes no argument and gives a dataset.") from error
    return source_of(value)


def make_loader(
    source: LoaderSource,
    setting: LoaderSetting,
    *,
    batch_size: int,
    rank: int = 0,
    ranks: int = 1,
    seed: int = 0,
    start: int = 0,
    named: bool = False,
    timeout_s: float = 0.0,
) -> DataLoader[Any]:
    """The DataLoader of one rank.

    Args:
        source: The dataset and how its loader was made.
        setting: Workers, prefetch factor, pinned memory.
        batch_size: Samples of a batch of this rank. A last, smaller batch is dropped.
        rank, ranks: Which share of the samples; a stream splits itself.
        seed: Of the order, also of what the user's own sampler draws.
        start: Samples of all ranks that were seen before. A stream is gone over up to there.
        named: Failures come as a batch that says the index (`wrapped.py`).
        timeout_s: A batch that takes a worker longer is an error; 0: never.

    Raises:
        WorkloadError: the dataset has fewer samples than one step takes.
    """
    from torch.utils.data import DataLoader, IterableDataset, default_collate

    from autoplan.strategies.workloads.loading.wrapped import NamedCollate, NamedSamples, NamedStream, Stream

    dataset, collate, order = source.dataset, source.collate_fn or default_collate, None
    if not source.streams:
        order = make_order(source, batch_size=batch_size, rank=rank, ranks=ranks, seed=seed, start=start)
    elif start or not isinstance(dataset, IterableDataset):  # torch takes any other iterable for a map-style dataset
        dataset = Stream(dataset, start=start, batch_size=batch_size, ranks=ranks)
    if named:
        dataset = NamedStream(dataset) if source.streams else NamedSamples(dataset)
        collate = NamedCollate(collate)
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=order,
        collate_fn=collate,
        drop_last=True,
        worker_init_fn=source.worker_init_fn,
        multiprocessing_context=source.context if setting.workers else None,
        timeout=timeout_s if setting.workers else 0.0,
        **setting.arguments,
    )


def make_order(
    source: LoaderSource, *, batch_size: int, rank: int = 0, ranks: int = 1, seed: int = 0, start: int = 0
) -> SampleOrder:
    """The samples of one rank, as `make_loader` takes them from a dataset that does not stream.

    Raises:
        WorkloadError: the dataset has fewer samples than one step takes, or does not say how many it has.
    """
    from autoplan.strategies.workloads.loading.order import SampleOrder

    if source.split_over > 1:  # by itself
        return SampleOrder(source.sampler, seed=seed, start=start // ranks, multiple_of=batch_size)
    return SampleOrder(
        samples_of(source) if source.sampler is None else source.sampler,
        shuffle=source.shuffled,
        seed=seed,
        rank=rank,
        ranks=ranks,
        start=start,
        multiple_of=batch_size * ranks,
    )


def samples_of(source: LoaderSource) -> int:
    """The samples of a dataset that does not stream and whose order is not the user's own.

    Raises:
        WorkloadError: it has no length.
    """
    try:
        return len(source.dataset)
    except (TypeError, NotImplementedError) as error:
        raise WorkloadError(
            f"the dataset {type(source.dataset).__name__} does not say how many samples it has: {error}",
            hint="Give it a __len__, or a DataLoader whose sampler gives the indices.",
        ) from error
