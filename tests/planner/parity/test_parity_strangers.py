"""Bugs of real training code, written by someone who had not read the parity check; each must fail in fp32 and in bf16.

A row changes one TrainingRun after prepare() made it, as in `test_parity_plants.py`. What passed when they were first
run is in docs/parity.md. `make test-parity` runs all rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoplan.strategies.workloads.workload import IGNORE_INDEX, LossSum, Workload
from tests.planner.parity import planted
from tests.planner.parity.test_parity_plants import (
    RECOMPUTED,
    after_loading,
    change_micro_batches,
    counted_steps,
    loss_of,
    masks_alike_in_all_steps,
    rows_of,
    schedule,
    verdict,
)
from tests.strategies.tiny import LLAMA, classifier, image_batch, language

# What is trained.


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        samples, length, width = hidden.shape
        parts = self.qkv(hidden).view(samples, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, attn_mask=mask[:, None])
        return self.out(mixed.transpose(1, 2).reshape(samples, length, width))


class DecoderBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        layers = (nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.mlp = nn.Sequential(*layers)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.dropout(self.attention(self.norm(hidden), mask))
        return hidden + self.dropout(self.mlp(hidden))


class Decoder(nn.Module):
    """A language model over packed documents: each sees itself alone, within a window, from its own first position."""

    def __init__(self, dropout: float = 0.0, frozen: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(131, 32)
        self.position = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(DecoderBlock(32, 4, dropout) for _ in range(3))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 131, bias=False)
        self.head.weight = self.embed.weight
        self.causal, self.apart, self.restart, self.window = True, True, True, 6
        self.embed.weight.requires_grad_(not frozen)

    def forward(self, tokens: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        distance = places[:, None] - places[None]
        mask = (distance < self.window).expand(len(tokens), -1, -1)
        if self.causal:
            mask = mask & (distance >= 0)
        if self.apart:
            mask = mask & (documents[:, :, None] == documents[:, None])
        positions = places.expand_as(tokens)
        if self.restart:
            first = documents.diff(dim=1, prepend=documents[:, :1]) != 0
            positions = positions - torch.where(first, positions, 0).cummax(1).values
        hidden = 5 * self.embed(tokens) + self.position(positions)
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.head(self.norm(hidden))


def packed_batch(samples: int, index: int) -> dict[str, torch.Tensor]:
    """Three documents in each sequence of 32; the first quarter of each is a prompt, which has no labels."""
    generator = torch.Generator().manual_seed(1000 + index)
    tokens = torch.randint(0, 131, (samples, 32), generator=generator)
    documents = torch.bucketize(torch.arange(32), torch.tensor([8, 20]), right=True).expand(samples, -1).contiguous()
    labels = tokens.roll(-1, 1)
    prompt = torch.zeros(32, dtype=torch.bool)
    prompt[[0, 1, 7, 8, 9, 10, 19, 20, 21, 22, 31]] = True
    labels = labels.masked_fill(prompt, IGNORE_INDEX)
    labels[:, 24:] = labels[:, 24:].masked_fill(torch.rand(samples, 8, generator=generator) < 0.5, IGNORE_INDEX)
    return {"tokens": tokens, "documents": documents, "labels": labels, "all_labels": tokens.roll(-1, 1)}


def packed_loss(model: Any, batch: Any, *, labels: str = "labels") -> LossSum:
    wanted = batch[labels].flatten()
    logits = model(batch["tokens"], batch["documents"]).float().flatten(0, 1)
    total = F.cross_entropy(logits, wanted, reduction="sum", ignore_index=IGNORE_INDEX)
    return LossSum(total, (wanted != IGNORE_INDEX).sum())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)


def packed(**options: Any) -> Workload:
    workload = Workload(
        name="packed",
        build_model=functools.partial(Decoder, **options),
        make_batch=packed_batch,
        loss=packed_loss,
        build_optimizer=adamw,
        global_batch=4,
        sequence_length=32,
        max_grad_norm=0.5,
    )
    return schedule(workload)


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    """Decay for the matrices alone; norms and biases at three times the rate."""
    each = list(parameters)
    return torch.optim.AdamW(
        [
            {"params": [p for p in each if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in each if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-3},
        ],
        lr=1e-3,
    )


def groups() -> Workload:
    workload = packed()
    workload.build_optimizer = two_groups
    return workload


def nesterov() -> Workload:
    workload = schedule(classifier(max_grad_norm=1.0))
    workload.build_optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)
    return workload


CLASS_WEIGHTS = (0.5, 1.0, 2.0, 1.0, 0.7)


def weighted_loss(model: nn.Module, batch: Any, *, weighted: bool = True) -> LossSum:
    weights = torch.tensor(CLASS_WEIGHTS if weighted else (1.0,) * 5)
    total = F.cross_entropy(model(batch["image"]).float(), batch["label"], weight=weights, reduction="sum")
    return LossSum(total, weights[batch["label"]].sum())


def weighted() -> Workload:
    workload = classifier()
    workload.loss = weighted_loss
    return workload


def side_loss(model: nn.Module, batch: Any, *, share: float = 0.05) -> LossSum:
    """With a term that keeps logits small, as routers and quantisers have them."""
    logits = model(batch["image"]).float()
    total = F.cross_entropy(logits, batch["label"], reduction="sum") + share * logits.square().sum()
    return LossSum(total, len(logits))


def with_side_loss() -> Workload:
    workload = classifier()
    workload.loss = side_loss
    return workload


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(100, 32)
        self.enter = nn.Linear(192, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(3))
        self.leave = nn.Linear(32, 192)

    def forward(self, noisy: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(noisy) + self.time(times)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.leave(hidden)


def noise_loss(model: nn.Module, batch: Any, *, times_below: int = 100) -> LossSum:
    clean = batch["image"].flatten(1)
    times = torch.randint(0, times_below, (len(clean),), device=clean.device)
    noise = torch.randn_like(clean)
    kept = (1 - times[:, None] / 100).sqrt()
    found = model(kept * clean + (1 - kept**2).sqrt() * noise, times)
    return LossSum(F.mse_loss(found.float(), noise, reduction="sum"), noise.numel())


def diffusion() -> Workload:
    return Workload(
        name="diffusion",
        build_model=Denoiser,
        make_batch=image_batch,
        loss=noise_loss,
        build_optimizer=adamw,
        global_batch=4,
    )


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "packed": packed,
    "packed_dropout": lambda: packed(dropout=0.1),
    "frozen": lambda: packed(frozen=True),
    "groups": groups,
    "nesterov": nesterov,
    "weighted": weighted,
    "side_loss": with_side_loss,
    "diffusion": diffusion,
    "batch_norm": lambda: classifier(norm=True, fixed_micro_batch=2),
    "rotary": lambda: schedule(language({**LLAMA, "max_position_embeddings": 512}, length=512, max_grad_norm=0.5)),
}

# Masks, positions, labels.


def attention_sees_the_future(run: Any) -> None:
    run.model.causal = False


def documents_see_each_other(run: Any) -> None:
    run.model.apart = False


def positions_go_on_through_documents(run: Any) -> None:
    run.model.restart = False


def window_one_token_short(run: Any) -> None:
    run.model.window -= 1


def loss_on_prompts_too(run: Any) -> None:
    loss_of(run, functools.partial(packed_loss, labels="all_labels"))


def class_weights_lost(run: Any) -> None:
    loss_of(run, functools.partial(weighted_loss, weighted=False))


def side_loss_of_the_first_micro_batch_alone(run: Any) -> None:
    calls: list[None] = []

    def loss(model: nn.Module, batch: Any) -> LossSum:
        calls.append(None)
        return side_loss(model, batch, share=0.05 if len(calls) == 1 else 0.0)

    honest = run.forward_backward

    def forward_backward(batch: Any) -> Any:
        calls.clear()
        return honest(batch)

    run.forward_backward = forward_backward
    loss_of(run, loss)


# Data.


def labels_of_one_sample_shuffled_from_step_3(run: Any) -> None:
    def shuffle(micros: list[Any], step: int) -> list[Any]:
        if step < 3:
            return micros
        labels = micros[0]["labels"].clone()
        labels[0] = labels[0][torch.randperm(labels.shape[1], generator=torch.Generator().manual_seed(step))]
        return [{**micros[0], "labels": labels}, *micros[1:]]

    change_micro_batches(run, shuffle)


def batch_of_the_step_before(run: Any) -> None:
    """A buffer that is filled again before it is read: from the second step on each step has the last one's batch."""
    kept: list[Any] = []
    change_micro_batches(run, lambda micros, _: (kept.append(micros), kept[max(0, len(kept) - 2)])[1])


def first_batch_for_ever(run: Any) -> None:
    kept: list[Any] = []
    change_micro_batches(run, lambda micros, _: (kept.append(micros), kept[0])[1])


def last_sample_copies_the_first(run: Any) -> None:
    def copy(value: torch.Tensor) -> torch.Tensor:
        return torch.cat([value[:-1], value[:1]])

    change_micro_batches(run, lambda micros, _: [{k: copy(v) for k, v in m.items()} for m in micros])


def token_ids_wrap_at_128(run: Any) -> None:
    change_micro_batches(run, lambda micros, _: [{**m, "tokens": m["tokens"] % 128} for m in micros])


def last_labels_lost(run: Any) -> None:
    def cut(labels: torch.Tensor) -> torch.Tensor:
        labels = labels.clone()
        labels[:, -2:] = IGNORE_INDEX
        return labels

    change_micro_batches(run, lambda micros, _: [{**m, "labels": cut(m["labels"])} for m in micros])


def channels_swapped(run: Any) -> None:
    change_micro_batches(run, lambda micros, _: [{**m, "image": m["image"].flip(1)} for m in micros])


def later_micro_batches_mirrored(run: Any) -> None:
    def mirror(micros: list[Any], _: int) -> list[Any]:
        return [{**m, "image": m["image"].flip(3)} if n >= 2 else m for n, m in enumerate(micros)]

    change_micro_batches(run, mirror)


# Schedules and groups.


def schedule_one_step_ahead(run: Any) -> None:
    run.optimizer._opt_called = True  # torch warns of this order; who sees it?
    run.schedule.step()


def schedule_stepped_for_each_micro_batch(run: Any) -> None:
    planted.change_calls(run.schedule, "step", lambda _, call: [call() for _ in range(run.accumulation)])


def schedule_stepped_again_on_resume(run: Any) -> None:
    def again() -> None:
        for _ in range(run.steps):
            run.schedule.step()

    after_loading(run, again)


def schedule_for_the_first_group_alone(run: Any) -> None:
    rate = run.optimizer.param_groups[1]["lr"]
    counted_steps(run, lambda _: run.optimizer.param_groups[1].update(lr=rate))


def inside_the_step(run: Any, options: Callable[[int, Any], dict[str, Any]]) -> None:
    """Options that the step uses and that nobody sees before or after it, from those of group `number`."""

    def before() -> list[dict[str, Any]]:
        kept = [{k: v for k, v in group.items() if k != "params"} for group in run.optimizer.param_groups]
        for number, group in enumerate(run.optimizer.param_groups):
            group.update(options(number, kept))
        return kept

    def after(kept: list[dict[str, Any]]) -> None:
        for group, old in zip(run.optimizer.param_groups, kept, strict=True):
            group.update(old)

    planted.around_step(run, before, after)


def rate_of_the_first_step_used_for_ever(run: Any) -> None:
    """As a compiled step does that took the rate for a constant."""
    first: dict[int, float] = {}
    inside_the_step(run, lambda number, kept: {"lr": first.setdefault(number, kept[number]["lr"])})


def decay_on_norms_and_biases(run: Any) -> None:
    inside_the_step(run, lambda number, kept: {"weight_decay": 0.1})


def rates_of_groups_swapped(run: Any) -> None:
    inside_the_step(run, lambda number, kept: {"lr": kept[1 - number]["lr"]})


def decoupled_decay_becomes_l2(run: Any) -> None:
    def options(number: int, kept: Any) -> dict[str, Any]:
        for parameter in run.optimizer.param_groups[number]["params"]:
            parameter.grad.add_(parameter.detach(), alpha=kept[number]["weight_decay"])
        return {"weight_decay": 0.0}

    inside_the_step(run, options)


def epsilon_too_large(run: Any) -> None:
    inside_the_step(run, lambda number, kept: {"eps": 1e-5})


def nesterov_lost(run: Any) -> None:
    inside_the_step(run, lambda number, kept: {"nesterov": False})


# The optimizer.


def each_state(run: Any, change: Callable[[dict[str, Any]], Any]) -> None:
    with torch.no_grad():
        for state in run.optimizer.state.values():
            change(state)


def bias_correction_lost(run: Any) -> None:
    """The count of steps goes on from an earlier training's; the moments do not."""

    def before() -> None:
        each_state(run, lambda state: state["step"].add_(1000))

    def after(_: Any) -> None:
        each_state(run, lambda state: state["step"].sub_(1000) if state["step"] > 1000 else None)

    planted.around_step(run, before, after)


def moments_kept_in_bf16(run: Any) -> None:
    def rounded(state: dict[str, Any]) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].copy_(state[name].bfloat16())

    planted.around_step(run, lambda: None, lambda _: each_state(run, rounded))


def weights_kept_in_bf16(run: Any) -> None:
    def round_all(_: Any) -> None:
        with torch.no_grad():
            for parameter in run.parameters:
                parameter.copy_(parameter.bfloat16())

    planted.around_step(run, lambda: None, round_all)


def first_step_not_taken(run: Any) -> None:
    planted.change_calls(run.optimizer, "step", lambda number, take: take() if number > 1 else None)


def every_4th_step_taken_twice(run: Any) -> None:
    planted.change_calls(run.optimizer, "step", lambda n, take: take() if n % 4 else (take(), take()))


def steps_with_a_large_norm_left_out(run: Any) -> None:
    """A guard against spikes whose threshold is that of another model."""
    norms: list[float] = []
    honest = run._build.gradients.clip

    def clip(parameters: Any, limit: float) -> Any:
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])))
        return honest(parameters, limit)

    run._build.gradients.clip = clip
    planted.change_calls(run.optimizer, "step", lambda _, take: take() if norms[-1] <= 1.02 * min(norms) else None)


def weights_of_the_step_before(run: Any) -> None:
    """Each forward and backward reads the weights as they were before the last step."""
    honest, kept = run.forward_backward, []

    def forward_backward(batch: Any) -> Any:
        now = [p.detach().clone() for p in run.parameters]
        kept.append(now)
        with torch.no_grad():
            for parameter, old in zip(run.parameters, kept[max(0, len(kept) - 2)], strict=True):
                parameter.copy_(old)
        found = honest(batch)
        with torch.no_grad():
            for parameter, value in zip(run.parameters, now, strict=True):
                parameter.copy_(value)
        return found

    run.forward_backward = forward_backward


def averaged_weights_put_back_every_6_steps(run: Any) -> None:
    """An evaluation with averaged weights, after which the weights themselves are not put back."""
    averages = [p.detach().clone() for p in run.parameters]
    calls: list[None] = []

    def after(_: Any) -> None:
        calls.append(None)
        with torch.no_grad():
            for average, parameter in zip(averages, run.parameters, strict=True):
                average.lerp_(parameter, 0.1)
                if len(calls) % 6 == 0:
                    parameter.copy_(average)

    planted.around_step(run, lambda: None, after)


# Gradients.


def last_micro_batch_counts_twice(run: Any) -> None:
    honest = run.micro_step

    def micro_step(micro: Any, divisor: torch.Tensor, *, sync: bool) -> Any:
        return honest(micro, divisor / 2 if sync and run.accumulation > 1 else divisor, sync=sync)

    run.micro_step = micro_step


def each_micro_batch_clipped(run: Any) -> None:
    def clipped(_: int, call: Any) -> Any:
        found = call()
        torch.nn.utils.clip_grad_norm_(run.parameters, 0.2)
        return found

    planted.change_calls(run, "micro_step", clipped)


def clip_otherwise(run: Any, clip: Callable[[list[Any], float], Any]) -> None:
    def other(parameters: Any, limit: float) -> torch.Tensor:
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        clip(list(parameters), limit)
        return norm

    run._build.gradients.clip = other


def clipping_by_value(run: Any) -> None:
    clip_otherwise(run, lambda parameters, limit: torch.nn.utils.clip_grad_value_(parameters, limit / 20))


def clipping_of_each_parameter(run: Any) -> None:
    clip_otherwise(run, lambda parameters, limit: [torch.nn.utils.clip_grad_norm_([p], limit / 3) for p in parameters])


def norm_without_embeddings(run: Any) -> None:
    def clip(parameters: list[Any], limit: float) -> None:
        rest = [p.grad for p in parameters if p.grad is not None and p.shape[0] != 131]
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, torch.nn.utils.get_total_norm(rest))

    clip_otherwise(run, clip)


def norm_of_the_wrong_kind(run: Any) -> None:
    clip_otherwise(run, lambda parameters, limit: torch.nn.utils.clip_grad_norm_(parameters, limit, norm_type=3.0))


def gradients_of_the_step_before(run: Any) -> None:
    """As an asynchronous optimizer does: the first step takes its own."""
    kept: list[list[torch.Tensor]] = []

    def swap() -> None:
        kept.append([p.grad.detach().clone() for p in run.parameters])
        for parameter, old in zip(run.parameters, kept[max(0, len(kept) - 2)], strict=True):
            parameter.grad.copy_(old)

    planted.around_step(run, swap)


def gradients_of_one_group_never_cleared(run: Any) -> None:
    def zero_grad(set_to_none: bool = True) -> None:
        for parameter in run.optimizer.param_groups[0]["params"]:
            parameter.grad = None

    run.optimizer.zero_grad = zero_grad


def embedding_trains_as_a_head_alone(run: Any) -> None:
    run.model.embed.register_forward_hook(lambda module, given, found: found.detach())


def gradient_stops_below_the_last_block(run: Any) -> None:
    run.model.blocks[-1].register_forward_pre_hook(lambda module, given: (given[0].detach(), *given[1:]))


def gradient_of_a_norm_halved(run: Any) -> None:
    run.model.norm.weight.register_hook(lambda gradient: gradient / 2)


def frozen_weights_decay(run: Any) -> None:
    def decay(_: Any) -> None:
        with torch.no_grad():
            run.model.embed.weight.mul_(0.999)

    planted.around_step(run, lambda: None, decay)


# Dropout and noise.


def each_dropout(run: Any, forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    for module in run.model.modules():
        if isinstance(module, nn.Dropout):
            module.forward = functools.partial(forward, module)


def dropout_without_rescaling(run: Any) -> None:
    each_dropout(run, lambda module, hidden: F.dropout(hidden, module.p, module.training) * (1 - module.p))


def dropout_keeps_what_it_should_drop(run: Any) -> None:
    each_dropout(run, lambda module, hidden: F.dropout(hidden, 1 - module.p, module.training))


def masks_alike_for_all_samples(run: Any) -> None:
    def forward(module: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * F.dropout(torch.ones_like(hidden[:1]), module.p, module.training)

    each_dropout(run, forward)


def masks_alike_in_all_places(run: Any) -> None:
    """Each dropout of a forward draws what the first one drew."""
    drawn: list[Any] = []
    run.model.register_forward_pre_hook(lambda module, given: drawn.clear())

    def forward(module: Any, hidden: torch.Tensor) -> torch.Tensor:
        if not drawn:
            drawn.append(torch.get_rng_state())
        torch.set_rng_state(drawn[0])
        return F.dropout(hidden, module.p, module.training)

    each_dropout(run, forward)


def another_mask_in_the_recomputation(run: Any) -> None:
    """Each dropout draws from a generator that no checkpoint puts back."""
    generator = torch.Generator().manual_seed(5)

    def forward(module: Any, hidden: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(hidden.shape, generator=generator) >= module.p
        return hidden * kept / (1 - module.p) if module.training else hidden

    each_dropout(run, forward)


def masks_repeat_after_a_resume(run: Any) -> None:
    first = torch.get_rng_state()
    after_loading(run, lambda: torch.set_rng_state(first))


def late_times_never_drawn(run: Any) -> None:
    loss_of(run, functools.partial(noise_loss, times_below=50))


# Statistics, ties, what is lost on resume.


def statistics_move_twice_as_fast(run: Any) -> None:
    for module in run.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum *= 2


def statistics_used_from_step_3(run: Any) -> None:
    def evaluate(number: int) -> None:
        if number == 2:
            for module in run.model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()

    counted_steps(run, evaluate)


def statistics_lost_on_resume(run: Any) -> None:
    def reset() -> None:
        for module in run.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()

    after_loading(run, reset)


def head_no_longer_tied_after_a_resume(run: Any) -> None:
    def untie() -> None:
        run.model.head.weight = nn.Parameter(run.model.head.weight.detach().clone())

    after_loading(run, untie)


def optimizer_holds_dead_parameters_after_a_resume(run: Any) -> None:
    """A module that was made anew by loading: it runs, and nobody steps it."""

    def replace() -> None:
        run.model.norm.weight = nn.Parameter(run.model.norm.weight.detach().clone())

    after_loading(run, replace)


def states_of_two_parameters_swapped_on_resume(run: Any) -> None:
    """A state that goes by the number of a parameter, loaded in another order."""

    def swap() -> None:
        first, second = (run.optimizer.state[block.norm.weight] for block in run.model.blocks[:2])
        for name in ("exp_avg", "exp_avg_sq"):
            first[name], second[name] = second[name], first[name]

    after_loading(run, swap)


def rotary_frequencies_in_bf16(run: Any) -> None:
    for module in run.model.modules():
        if hasattr(module, "inv_freq"):
            module.inv_freq.copy_(module.inv_freq.bfloat16())


def reported_loss_is_of_the_last_micro_batch(run: Any) -> None:
    def micro_steps(micros: Any, divisor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for number, micro in enumerate(micros, start=1):
            found = run.micro_step(micro, divisor, sync=number == run.accumulation)
        return found

    run.micro_steps = micro_steps


ROWS: list[tuple[Callable[[Any], None], str, dict[str, Any]]] = [
    *(
        (change, "packed", {})
        for change in (
            attention_sees_the_future,
            documents_see_each_other,
            positions_go_on_through_documents,
            window_one_token_short,
            loss_on_prompts_too,
            labels_of_one_sample_shuffled_from_step_3,
            batch_of_the_step_before,
            first_batch_for_ever,
            last_sample_copies_the_first,
            token_ids_wrap_at_128,
            last_labels_lost,
            schedule_one_step_ahead,
            schedule_stepped_for_each_micro_batch,
            schedule_stepped_again_on_resume,
            rate_of_the_first_step_used_for_ever,
            decoupled_decay_becomes_l2,
            epsilon_too_large,
            bias_correction_lost,
            moments_kept_in_bf16,
            weights_kept_in_bf16,
            first_step_not_taken,
            every_4th_step_taken_twice,
            steps_with_a_large_norm_left_out,
            weights_of_the_step_before,
            averaged_weights_put_back_every_6_steps,
            last_micro_batch_counts_twice,
            each_micro_batch_clipped,
            clipping_by_value,
            clipping_of_each_parameter,
            norm_without_embeddings,
            norm_of_the_wrong_kind,
            gradients_of_the_step_before,
            embedding_trains_as_a_head_alone,
            gradient_stops_below_the_last_block,
            gradient_of_a_norm_halved,
            head_no_longer_tied_after_a_resume,
            optimizer_holds_dead_parameters_after_a_resume,
            states_of_two_parameters_swapped_on_resume,
            reported_loss_is_of_the_last_micro_batch,
        )
    ),
    *(
        (change, "groups", {})
        for change in (
            schedule_for_the_first_group_alone,
            decay_on_norms_and_biases,
            rates_of_groups_swapped,
            gradients_of_one_group_never_cleared,
        )
    ),
    *(
        (change, "packed_dropout", {})
        for change in (
            dropout_without_rescaling,
            dropout_keeps_what_it_should_drop,
            masks_alike_for_all_samples,
            masks_alike_in_all_places,
            masks_repeat_after_a_resume,
        )
    ),
    (another_mask_in_the_recomputation, "packed_dropout", RECOMPUTED),
    (frozen_weights_decay, "frozen", {}),
    (gradient_stops_below_the_last_block, "frozen", RECOMPUTED),
    (nesterov_lost, "nesterov", {}),
    (channels_swapped, "nesterov", {}),
    (later_micro_batches_mirrored, "nesterov", {}),
    (class_weights_lost, "weighted", {}),
    (side_loss_of_the_first_micro_batch_alone, "side_loss", {}),
    (masks_alike_in_all_steps, "diffusion", {}),
    (late_times_never_drawn, "diffusion", {}),
    (statistics_move_twice_as_fast, "batch_norm", {}),
    (statistics_used_from_step_3, "batch_norm", {}),
    (statistics_lost_on_resume, "batch_norm", {}),
    (rotary_frequencies_in_bf16, "rotary", {}),
]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_nothing_planted_passes(name: str, precision: str) -> None:
    parity = verdict(WORKLOADS[name], {"precision": precision})
    assert parity.passed, parity.failures


@pytest.mark.parametrize(("change", "name", "knobs"), rows_of(ROWS, ()))
def test_planted(monkeypatch: pytest.MonkeyPatch, change: Any, name: str, knobs: dict[str, Any]) -> None:
    planted.plant(monkeypatch, change)
    parity = verdict(WORKLOADS[name], knobs)
    assert not parity.passed, parity.note
