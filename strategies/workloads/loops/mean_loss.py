"""Losses that are a mean, as training loops write them, read as a sum and a count.

In: a loss(model, batch) that returns a scalar mean, the model, and some real samples. Out: a `MeanLoss`, which gives a
LossSum, or a refusal. Over what the loss averages is measured: of a few samples, the loss of all together must be the
mean of the losses of each, weighted by the number of items that each counts (samples, or label tokens).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from autoplan.errors import WorkloadError
from autoplan.strategies.workloads.batch import Batch, batch_size, know_containers, move_batch, slice_batch
from autoplan.strategies.workloads.carried import Carried, attributes_kept, buffers_kept, carried_state
from autoplan.strategies.workloads.devices import device_of
from autoplan.strategies.workloads.padding import padding_share
from autoplan.strategies.workloads.randomness import seeded
from autoplan.strategies.workloads.user_errors import users_call
from autoplan.strategies.workloads.workload import IGNORE_INDEX, LossSum

LossMean = Literal["samples", "tokens", "batches"]
"""Over what a loss averages: samples, label tokens, or the loop's own batches, each of which has the same weight."""

SAMPLES = 4
"""Samples whose losses are compared, one by one and together."""

OTHER_IGNORED = (-1, 0, 255)
"""Values besides IGNORE_INDEX that a loss may leave out: ignore_index=pad_token_id, or that of a map of classes."""

RELATIVE = 2e-5
"""Of an fp32 loss; LOW_PRECISION of a model that is stored in few bits."""

LOW_PRECISION = 1e-2

SUMMED, DRAWS = "that is a sum over samples", "it is another one with each random seed"
NOISE_SEEDS = 8

LOSS_RULE = (
    "loss(model, batch) returns autoplan.LossSum(sum of the losses, number of items), or the mean over the batch's "
    "samples or label tokens as a scalar tensor."
)


@dataclass(frozen=True)
class CountSamples:
    """Counts the samples of a batch."""

    def __call__(self, batch: Batch) -> int:
        """Samples."""
        return batch_size(batch)

    def describe(self) -> str:
        """In words."""
        return "samples"


@dataclass(frozen=True)
class CountLabels:
    """Counts the labels of a batch that are not IGNORE_INDEX, or the positions of a mask that are not zero.

    Attributes:
        path: Where the labels are in a batch: keys, numbers, and `.name` of an attribute.
        shifted: The first of each sequence does not count: nothing predicts it.
        ignored: What does not count: 0 for a mask; IGNORE_INDEX, or one of OTHER_IGNORED.
        name: Of the leaf, for texts.
    """

    path: tuple[str | int, ...]
    shifted: bool
    ignored: int
    name: str

    def __call__(self, batch: Batch) -> int:
        """Labels."""
        return int(self.counted(batch).sum())

    def counted(self, batch: Batch) -> torch.Tensor:
        """Which labels count, as booleans."""
        labels = self.labels(batch)
        return (labels[:, 1:] if self.shifted else labels) != self.ignored

    def labels(self, batch: Batch) -> torch.Tensor:
        """The labels, or the mask, in a batch."""
        found = batch
        for key in self.path:
            is_attribute = isinstance(key, str) and key.startswith(".")
            found = getattr(found, str(key)[1:]) if is_attribute else found[key]
        assert isinstance(found, torch.Tensor), "it was one when the count was found"
        return found

    def describe(self) -> str:
        """In words."""
        first = ", without the first of each sequence" if self.shifted else ""
        return f"the tokens of {self.name} that are not {self.ignored}{first}"


Count = CountSamples | CountLabels


@dataclass(frozen=True)
class MeanLoss:
    """A loss function that returns a mean, as one that returns a sum and a count.

    Attributes:
        mean: The user's own.
        count: What it averages over.
    """

    mean: Callable[[nn.Module, Batch], Any]
    count: Count

    def __call__(self, model: nn.Module, batch: Batch) -> LossSum:
        """The mean times its items, and the items."""
        mean = scalar_of(self.mean(model, batch))
        if isinstance(self.count, CountSamples):
            items = self.count(batch)
            return LossSum(mean * items, items)
        counted = self.count.counted(batch).sum()
        mean = torch.where(counted.to(mean.device) > 0, mean, torch.zeros_like(mean))  # a mean over nothing is NaN
        return LossSum(mean * counted, counted)


@dataclass(frozen=True)
class OutputLoss:
    """The loss that a model computes itself: `model(**batch).loss`, as models of transformers do with `labels`."""

    def __call__(self, model: nn.Module, batch: Batch) -> Any:
        """The model's output."""
        return model(**batch) if isinstance(batch, Mapping) else model(batch)


@dataclass(frozen=True)
class CriterionLoss:
    """A loss of torch over the output of a model for batches of (inputs, targets).

    Attributes:
        criterion: `nn.CrossEntropyLoss()`, `F.cross_entropy` and the like.
    """

    criterion: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The criterion of output and targets."""
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise WorkloadError(
                f"the loss is {getattr(self.criterion, '__name__', type(self.criterion).__name__)}, which compares the "
                "model's output with targets, and a "
                f"batch is {_structure(batch)}, not (inputs, targets)",
                hint="Give a function that knows the batch: loss(model, batch).",
            )
        return self.criterion(model(batch[0]), batch[1])


@dataclass(frozen=True)
class SummedLoss:
    """A loss function that returns a sum over samples, and steps with it: its sum and count, as a plan divides them.

    Attributes:
        summed: The user's own.
        global_batch: Samples of a step. The sum is multiplied by it, since a step divides by its samples.
    """

    summed: Callable[[nn.Module, Batch], Any]
    global_batch: int

    def __call__(self, model: nn.Module, batch: Batch) -> LossSum:
        """The sum times the global batch, and the samples."""
        return LossSum(scalar_of(self.summed(model, batch)) * self.global_batch, batch_size(batch))


def scalar_of(result: Any) -> torch.Tensor:
    """The loss in what a loss function or a model returned: a scalar tensor, or the `loss` of a dict or an output.

    Raises:
        WorkloadError: there is none, or it is not a scalar.
    """
    found = result
    if isinstance(result, Mapping):
        found = result.get("loss")
    elif not isinstance(result, torch.Tensor):
        found = getattr(result, "loss", None)
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        kind = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else _structure(result)
        raise WorkloadError(f"the loss function returned {kind}; {LOSS_RULE[0].lower()}{LOSS_RULE[1:]}", hint=LOSS_RULE)
    return found.reshape(())


def read_loss(
    loss: Callable[[nn.Module, Batch], Any],
    model: nn.Module,
    make_batch: Callable[[int, int], Batch],
    *,
    seed: int,
    mean: LossMean | None,
    global_batch: int,
    sum_divided: str | None,
) -> tuple[Callable[[nn.Module, Batch], LossSum], Count | None]:
    """A loss as a LossSum, and what it counts; the count is None where the loss is a LossSum already.

    The loss runs without gradients on a few samples, on the model as it is and where it is. Its modes, its buffers and
    the random generators are put back.

    Args:
        loss: The user's.
        model: Its model.
        make_batch: Makes the samples.
        seed: Of the generators while it runs.
        mean: Over what the loss averages, where the user says so; None: it is measured.
        global_batch: Samples of a step, which a loss that is a sum is measured by.
        sum_divided: Why the loop, or the plan's, may divide such a loss by more than one number; None: a step has one
            batch of the loop, whose loss is all that it goes by.

    Raises:
        WorkloadError: the loss fails, is no mean over samples or tokens, or is not what the user said.
    """
    batch = move_batch(make_batch(SAMPLES, 0), device_of(model))
    probe = _Probe(loss, model, seed)
    with _quiet(model):
        first = probe.result(batch)
        if isinstance(first, LossSum):
            if mean is not None:
                raise WorkloadError(
                    f"the loss returns an autoplan.LossSum, and loss_mean={mean!r} was given too",
                    hint="A LossSum says itself what it counts; leave loss_mean out.",
                )
            return loss, None
        scalar_of(first)
        if mean == "batches":
            return MeanLoss(loss, CountSamples()), CountSamples()
        found = _measured_count(probe, batch)
        drawn_sum = found == DRAWS and mean == "samples" and _is_drawn_sum(probe, batch)
        if drawn_sum or (isinstance(found, str) and mean is None and found.endswith(SUMMED)):
            if sum_divided is None:
                return SummedLoss(loss, global_batch), CountSamples()
            raise WorkloadError(
                f"the loss is a sum over samples, and {sum_divided}, so a plan's steps would be other ones ({found})",
                hint="Return the mean over the samples, with the learning rate that goes with it. "
                'loss_mean="batches" keeps the sum and the micro-batch at the DataLoader\'s batch size: a step then '
                "takes the mean of the sums of its batches.",
            )
        if found == DRAWS and mean == "samples":  # noise for each sample: the user's word is all there is
            found = CountSamples()
    if isinstance(found, str):
        noise = ' One that draws noise for each sample (diffusion): loss_mean="samples".' if found == DRAWS else ""
        raise WorkloadError(
            f"the loss function returns a single number, and it is not known what it counts: {found}",
            hint=f"{LOSS_RULE}{noise} A loss that belongs to the batches of your loop as they are (a contrastive one, "
            'auxiliary terms): loss_mean="batches", which keeps the micro-batch at the DataLoader\'s batch size.',
        )
    if mean is not None and (mean == "samples") != isinstance(found, CountSamples) and not _same(found, mean, batch):
        raise WorkloadError(
            f'loss_mean is "{mean}", and the loss is the mean over {found.describe()}',
            hint="Leave loss_mean out: it is measured.",
        )
    return MeanLoss(loss, found), found


def across_samples(
    loss: Callable[[nn.Module, Batch], LossSum], model: nn.Module, make_batch: Callable[[int, int], Batch], *, seed: int
) -> tuple[float | None, Carried | None]:
    """`padding_share` and `carried_state` of a loop's own model, which is left as it was."""
    with _quiet(model):
        padding = padding_share(loss, model, make_batch, device_of(model), seed=seed)
        try:
            carried = carried_state(loss, model, make_batch, device_of(model), seed=seed)
        except Exception:  # a loss that takes no two samples: the inspection says more
            carried = None
        return padding, carried


def _same(found: Count, mean: str, batch: Batch) -> bool:
    """Whether both means are the same one on these samples: each has as many tokens."""
    counts = candidate_counts(batch) if mean == "tokens" else [found]
    per_sample = [[count(slice_batch(batch, i, i + 1)) for i in range(batch_size(batch))] for count in counts]
    return any(len(set(numbers)) == 1 for numbers in per_sample)


class _Probe:
    """Runs the loss without gradients, with the same random numbers each time."""

    def __init__(self, loss: Callable[[nn.Module, Batch], Any], model: nn.Module, seed: int) -> None:
        self.loss, self.model, self.seed = loss, model, seed

    def result(self, batch: Batch, seed: int = 0) -> Any:
        """The value that the loss returns."""
        named = users_call("loss(model, batch) on some samples of the DataLoader", LOSS_RULE)
        with named, seeded(self.seed + seed), torch.no_grad(), buffers_kept(self.model):
            return self.loss(self.model, batch)

    def number(self, batch: Batch, seed: int = 0) -> float:
        """The mean that the loss returns."""
        return float(scalar_of(self.result(batch, seed)))

    @property
    def tolerance(self) -> float:
        """The relative difference that rounding explains."""
        low = any(p.dtype in (torch.bfloat16, torch.float16) for p in self.model.parameters())
        return LOW_PRECISION if low else RELATIVE


@contextlib.contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """The model in training mode without dropout and batch statistics, which make a loss random or a batch's.

    It is left as it was: what its forward sets in attributes is no part of what is trained.
    """
    with attributes_kept(model):
        if not model.training:
            model.train()
        for module in model.modules():
            if isinstance(module, _DropoutNd | _NormBase):
                module.training = False
        yield


def _measured_count(probe: _Probe, batch: Batch) -> Count | str:
    """The count that the mean is over; a text: why that is not known."""
    criterion: Any = getattr(probe.loss, "criterion", None)
    if isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss) and criterion.weight is not None:
        return "it is over the weights of the classes in a batch, so the loss depends on the micro-batch"
    if abs(probe.number(batch) - probe.number(batch)) > probe.tolerance * abs(probe.number(batch)):
        return (
            "the same batch gives another one the second time: the model keeps something of each forward for the next"
        )
    if abs(probe.number(batch) - probe.number(batch, seed=1)) > probe.tolerance * abs(probe.number(batch)):
        probe.model.eval()  # dropout that is no module: attention, layers that are dropped; `_quiet` puts it back
        if abs(probe.number(batch) - probe.number(batch, seed=1)) > probe.tolerance * abs(probe.number(batch)):
            return DRAWS
    samples = batch_size(batch)
    together = probe.number(batch)
    alone = [probe.number(slice_batch(batch, i, i + 1)) for i in range(samples)]
    fitting = [count for count in candidate_counts(batch) if _fits(count, batch, together, alone, probe.tolerance)]
    if not fitting:
        return _why_no_mean(together, alone)
    best: Count = fitting[0]
    told_apart = False
    for labels in [count for count in fitting if isinstance(count, CountLabels)]:
        masked = _with_fewer_labels(batch, labels)
        if masked is None:
            continue
        try:  # a loss that takes no masked labels says nothing more
            together = probe.number(masked)
            alone = [probe.number(slice_batch(masked, i, i + 1)) for i in range(samples)]
        except WorkloadError:
            continue
        left = [count for count in fitting if _fits(count, masked, together, alone, probe.tolerance)]
        if left:
            fitting, best, told_apart = left, left[0], True
    tokens = [count for count in fitting if isinstance(count, CountLabels)]
    # labels on a GPU are not masked for a test: one out of range would end its context. Equal counts are the same mean
    return best if told_apart or not tokens or not _is_cuda(batch) else tokens[0]


def _is_drawn_sum(probe: _Probe, batch: Batch) -> bool:
    """Whether a loss that draws noise is a sum over samples: over some seeds, it grows with them."""
    samples = batch_size(batch)
    together = sum(probe.number(batch, seed) for seed in range(NOISE_SEEDS))
    parts = [slice_batch(batch, i, i + 1) for i in range(samples)]
    alone = sum(probe.number(part, seed) for part in parts for seed in range(NOISE_SEEDS)) / samples
    return samples > 2 and abs(together) > 0.6 * samples * abs(alone)


def candidate_counts(batch: Batch) -> list[Count]:
    """The counts that a mean may be over: samples, then labels or masks of the batch, those named labels first."""
    know_containers(batch)
    found: list[CountLabels] = []
    for keys, leaf in pytree.tree_leaves_with_path(batch):
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or leaf.is_floating_point() or leaf.is_complex():
            continue
        path = tuple(_plain_key(key) for key in keys)
        name = str(path[-1]).lstrip(".") if path else "the batch"
        is_mask = "mask" in name or leaf.dtype == torch.bool
        others = () if is_mask else (value for value in OTHER_IGNORED if bool((leaf == value).any()))
        shifts = (False, True) if leaf.dim() == 2 and leaf.shape[1] > 1 else (False,)
        for ignored in (0 if is_mask else IGNORE_INDEX, *others):
            found += [CountLabels(path, shifted, ignored, name) for shifted in shifts]
    found.sort(key=lambda count: "label" not in count.name and "target" not in count.name)
    return [CountSamples(), *found]


def _plain_key(key: Any) -> str | int:
    """A step of a path in a batch: a key, a number, or an attribute."""
    if isinstance(key, pytree.GetAttrKey):
        return f".{key.name}"
    found: str | int = key.idx if isinstance(key, pytree.SequenceKey) else key.key
    return found


def _fits(count: Count, batch: Batch, together: float, alone: list[float], tolerance: float) -> bool:
    """Whether the loss of all is the mean of the losses of each, weighted by their items."""
    items = [count(slice_batch(batch, i, i + 1)) for i in range(len(alone))]
    if not sum(items):
        return False
    total = sum(number * loss for number, loss in zip(items, alone, strict=True) if number)  # a mean of none is NaN
    size = max(sum(abs(number * loss) for number, loss in zip(items, alone, strict=True) if number), 1e-12)
    return math.isfinite(together) and abs(together * sum(items) - total) <= tolerance * size


def _with_fewer_labels(batch: Batch, count: CountLabels) -> Batch | None:
    """The batch with two labels in the first sample, three in the second and so on; None where that cannot be.

    Only masks of labels are made: a mask is part of the model's input.
    """
    if "mask" in count.name or _is_cuda(batch):
        return None
    labels = count.labels(batch)
    if labels.dim() != 2 or labels.dtype not in (torch.int64, torch.int32) or labels.shape[1] <= SAMPLES + 1:
        return None
    changed = labels.clone()
    for sample in range(labels.shape[0]):
        places = (labels[sample] != count.ignored).nonzero()[:, 0]
        changed[sample, places[sample + 2 :]] = count.ignored
    return pytree.tree_map(lambda leaf: changed if leaf is labels else leaf, batch)


def _is_cuda(batch: Batch) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in pytree.tree_leaves(batch))


def _why_no_mean(together: float, alone: list[float]) -> str:
    shown = ", ".join(f"{loss:.6g}" for loss in alone)
    text = f"of {len(alone)} samples together it is {together:.6g}, of each by itself {shown}"
    if math.isclose(together, sum(alone), rel_tol=1e-4):
        return f"{text}: {SUMMED}"
    return f"{text}: that is no mean over samples or over label tokens, so the loss depends on the micro-batch"


def _structure(value: object) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(map(str, value))}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"of the type {type(value).__name__}"
