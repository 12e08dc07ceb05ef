"""Bugs that a user's training would suffer from, one row each; every row must fail in fp32 and in bf16.

A row changes one TrainingRun after prepare() made it, on the workload that shows it. `make test-parity` runs all rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.workload import IGNORE_INDEX, LossSum, Workload
from tests.cases import some
from tests.contracts.parity_contract import check_parity_of
from tests.planner.parity import planted
from tests.strategies.tiny import GPT2, LLAMA, language

# What is trained.


def schedule(workload: Workload) -> Workload:
    workload.build_schedule = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 / (1 + 0.2 * step)
    )
    return workload


def logits_and_labels(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs).logits[:, :-1].float()
    return logits.flatten(0, 1), batch["labels"][:, 1:].flatten()


def causal_loss(model: Any, batch: Any, *, smoothing: float = 0.0, z_loss: float = 0.0, cap: float = 0.0) -> LossSum:
    logits, labels = logits_and_labels(model, batch)
    if cap:
        logits = cap * torch.tanh(logits / cap)
    total = F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE_INDEX, label_smoothing=smoothing)
    counted = labels != IGNORE_INDEX
    if z_loss:
        total = total + z_loss * (torch.logsumexp(logits[counted], -1) ** 2).sum()
    return LossSum(total, counted.sum())


def with_loss(**options: float) -> Workload:
    workload = schedule(language(LLAMA, max_grad_norm=0.5, weight_decay=0.1))
    workload.loss, workload.count = functools.partial(causal_loss, **options), None
    return workload


def padded() -> Workload:
    """Sequences whose last quarter is padding, which an attention mask says."""
    workload = with_loss()
    make = workload.make_batch

    def make_batch(samples: int, index: int) -> dict[str, torch.Tensor]:
        batch = dict(make(samples, index))
        mask = torch.ones_like(batch["input_ids"])
        mask[:, : mask.shape[1] // 4] = 0  # on the left: without the mask, all that follows sees it
        labels = batch["labels"].masked_fill(mask == 0, IGNORE_INDEX)
        return {**batch, "labels": labels, "attention_mask": mask}

    workload.make_batch = make_batch
    return workload


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "gpt2": lambda: schedule(language(max_grad_norm=0.3, weight_decay=0.1)),
    "wide": lambda: schedule(language({**GPT2, "vocab_size": 500}, max_grad_norm=0.3, weight_decay=0.1)),
    "llama": lambda: schedule(language(LLAMA, max_grad_norm=0.5, weight_decay=0.1)),
    "capped": lambda: with_loss(cap=5.0),
    "z_loss": lambda: with_loss(z_loss=1e-3),
    "smooth": lambda: with_loss(smoothing=0.01),
    "padded": padded,
    "dropout_in_attention": lambda: language({**LLAMA, "attention_dropout": 0.1}),
}
RECOMPUTED = {"checkpointing": "full"}
SDPA = {"attention": "sdpa"}

# In time: what comes back every few steps, or begins late.


def counted_steps(run: Any, change: Callable[[int], Any]) -> None:
    """Calls `change` with the number of each step before it, counted from 1."""
    number = [0]

    def before() -> None:
        number[0] += 1
        change(number[0])

    planted.around_step(run, before)


def rate_frozen_from_step_4(run: Any) -> None:
    rates: list[float] = []

    def freeze(number: int) -> None:
        rates.append(run.optimizer.param_groups[0]["lr"])
        if number > 4:
            planted.each_group(run, lr=rates[3])

    counted_steps(run, freeze)


def schedule_not_stepped_after_step_3(run: Any) -> None:
    planted.change_calls(run.schedule, "step", lambda number, call: call() if number <= 3 else None)


def moments_cleared_every_8_steps(run: Any) -> None:
    counted_steps(run, lambda number: run.optimizer.state.clear() if number % 8 == 0 else None)


def every_10th_step_skipped(run: Any) -> None:
    planted.change_calls(run.optimizer, "step", lambda number, call: call() if number % 10 else None)


def weight_decay_lost_from_step_5(run: Any) -> None:
    counted_steps(run, lambda number: planted.each_group(run, weight_decay=0.0) if number >= 5 else None)


def other_betas_from_step_5(run: Any) -> None:
    counted_steps(run, lambda number: planted.each_group(run, betas=(0.9, 0.95)) if number >= 5 else None)


def a_weight_frozen_from_step_4(run: Any) -> None:
    weight, kept = run.optimizer.param_groups[0]["params"][2], []

    def after(_: Any) -> None:
        kept.append(weight.detach().clone())
        if len(kept) > 4:
            with torch.no_grad():
                weight.copy_(kept[3])

    planted.around_step(run, lambda: None, after)


def clipping_lost_from_step_5(run: Any) -> None:
    def clip(number: int, call: Any) -> Any:
        return call() if number < 5 else call.func(call.args[0], 1e9)

    planted.change_calls(run._build.gradients, "clip", clip)


def gradients_kept_once_in_8_steps(run: Any) -> None:
    planted.change_calls(run.optimizer, "zero_grad", lambda number, call: call() if number % 8 else None)


# Saving and loading.


def after_loading(run: Any, change: Callable[[], Any]) -> None:
    planted.change_calls(run, "load_state_dict", lambda _, call: (call(), change()))


def zero_states(run: Any, name: str) -> None:
    for state in run.optimizer.state.values():
        state[name].zero_()


def second_moments_lost_on_resume(run: Any) -> None:
    after_loading(run, lambda: zero_states(run, "exp_avg_sq"))


def first_moments_lost_on_resume(run: Any) -> None:
    after_loading(run, lambda: zero_states(run, "exp_avg"))


def count_of_steps_lost_on_resume(run: Any) -> None:
    after_loading(run, lambda: zero_states(run, "step"))


def schedule_lost_on_resume(run: Any) -> None:
    honest = run.load_state_dict
    run.load_state_dict = lambda state: honest({**state, "schedule": None})


def a_weight_lost_on_resume(run: Any) -> None:
    honest = run.load_state_dict

    def load_state_dict(state: Any) -> None:
        name = next(name for name in state["model"] if name.endswith("ln_f.bias"))
        honest({**state, "model": {**state["model"], name: torch.zeros_like(state["model"][name])}})

    run.load_state_dict = load_state_dict


# Micro-batches.


def change_micro_batches(run: Any, change: Callable[[list[Any], int], list[Any]]) -> None:
    """Changes the micro-batches of each step, given with its number from 1."""
    planted.change_calls(run, "micro_batches", lambda number, call: change(list(call()), number))


def shifted(micro: Any) -> Any:
    return {**micro, "labels": micro["labels"].roll(1, 1)}


def labels_of_the_4th_micro_batch_shifted(run: Any) -> None:
    change_micro_batches(run, lambda micros, _: [shifted(m) if n == 3 else m for n, m in enumerate(micros)])


def micro_batches_after_the_3rd_dropped(run: Any) -> None:
    change_micro_batches(run, lambda micros, _: micros[:3])


def copies_above_micro_batch_2(run: Any) -> None:
    change_micro_batches(run, lambda micros, _: [micros[min(n, 1)] for n in range(len(micros))])


def the_first_micro_batch_is_the_second(run: Any) -> None:
    change_micro_batches(run, lambda micros, _: [micros[min(1, len(micros) - 1)], *micros[1:]])


def labels_shifted_from_step_6(run: Any) -> None:
    change_micro_batches(run, lambda micros, step: [shifted(m) if step >= 6 else m for m in micros])


def last_micro_batch_dropped_from_step_4(run: Any) -> None:
    change_micro_batches(run, lambda micros, step: micros[:-1] if step >= 4 else micros)


def gradients_rounded_between_micro_batches(run: Any) -> None:
    honest = run.micro_step

    def micro_step(*given: Any, **named: Any) -> Any:
        found = honest(*given, **named)
        for parameter in run.parameters:
            if parameter.grad is not None:
                parameter.grad.copy_(parameter.grad.bfloat16())
        return found

    run.micro_step = micro_step


# Parts of a tensor.


def step_a_part_alone(run: Any, places: Callable[[torch.Tensor], Any]) -> None:
    """What `places` gives of each flat parameter stays as it was."""

    def before() -> list[tuple[torch.Tensor, Any, torch.Tensor]]:
        flat = [parameter.detach().view(-1) for parameter in run.parameters]
        return [(values, places(values), values[places(values)].clone()) for values in flat]

    def after(kept: Any) -> None:
        for values, where, old in kept:
            values[where] = old

    planted.around_step(run, before, after)


def elements_past_16384_never_stepped(run: Any) -> None:
    step_a_part_alone(run, lambda values: slice(16_384, None))


def last_rows_of_the_embedding_never_stepped(run: Any) -> None:
    step_a_part_alone(run, lambda values: slice(483 * 64 if len(values) == 500 * 64 else len(values), None))


def gradients_past_16384_lost(run: Any) -> None:
    def lose() -> None:
        for parameter in run.parameters:
            if parameter.grad is not None:
                parameter.grad.view(-1)[16_384:] = 0.0

    planted.around_step(run, lose)


# What bf16 would hide.


def loss_of(run: Any, loss: Any) -> None:
    run._build.training_module.loss = loss


def another_loss(run: Any) -> None:
    """Without its soft cap, its z-loss, its label smoothing."""
    loss_of(run, causal_loss)


def padding_mask_lost(run: Any) -> None:
    loss_of(run, lambda model, batch: causal_loss(model, {k: v for k, v in batch.items() if k != "attention_mask"}))


def attention_scale_doubled(run: Any) -> None:
    for module in run.model.modules():
        if isinstance(getattr(module, "scaling", None), float):
            module.scaling *= 2


def norms_with_another_eps(run: Any) -> None:
    for module in run.model.modules():
        for name in ("eps", "variance_epsilon"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 1e-3)


def rotary_base_halved(run: Any) -> None:
    for module in run.model.modules():
        if hasattr(module, "inv_freq"):
            count = len(module.inv_freq)
            module.inv_freq.copy_(5_000.0 ** (-torch.arange(count) / count))


def another_activation(run: Any) -> None:
    for module in run.model.modules():
        if hasattr(module, "act"):
            module.act.forward = lambda values: values * torch.sigmoid(1.702 * values)


def biases_of_the_last_norm_lost(run: Any) -> None:
    norm = run.model.transformer.ln_f
    norm.forward = lambda hidden: F.layer_norm(hidden, hidden.shape[-1:], norm.weight, None)


def one_position_late(run: Any) -> None:
    wpe = run.model.transformer.wpe
    honest = wpe.forward
    wpe.forward = lambda positions: honest((positions + 1) % wpe.num_embeddings)


# Dropout.


def masks_alike_in_all_micro_batches(run: Any) -> None:
    run.before_micro_steps(lambda: torch.manual_seed(7))


def masks_alike_in_all_steps(run: Any) -> None:
    planted.change_calls(run, "forward_backward", lambda _, call: (torch.manual_seed(7), call())[1])


def one_kind_of_dropout_does_nothing(run: Any) -> None:
    """Its rate is there for whoever asks."""
    for name, module in run.model.named_modules():
        if name.endswith("mlp.dropout"):
            module.forward = lambda hidden: hidden


def attention_dropout_lost_in_sdpa(run: Any) -> None:
    for module in run.model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0


# NaN.


def nan_gradients_become_zero(run: Any) -> None:
    def clean() -> None:
        for parameter in run.parameters:
            if parameter.grad is not None:
                parameter.grad.nan_to_num_()

    planted.around_step(run, clean)


def nan_losses_left_out(run: Any) -> None:
    honest = run._backward
    run._backward = lambda loss: honest(loss) if bool(loss.isfinite()) else None


def nan_norm_becomes_zero(run: Any) -> None:
    honest = run._build.gradients.clip

    def clip(parameters: Any, limit: float) -> Any:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.nan_to_num_()
        return honest(parameters, limit)

    run._build.gradients.clip = clip


def steps_without_numbers_left_out(run: Any) -> None:
    def step(_: int, call: Any) -> Any:
        finite = all(bool(p.grad.isfinite().all()) for p in run.parameters if p.grad is not None)
        return call() if finite else None

    planted.change_calls(run.optimizer, "step", step)


ROWS: list[tuple[Callable[[Any], None], str, dict[str, Any]]] = [
    *(
        (change, "gpt2", {})
        for change in (
            rate_frozen_from_step_4,
            schedule_not_stepped_after_step_3,
            moments_cleared_every_8_steps,
            every_10th_step_skipped,
            weight_decay_lost_from_step_5,
            other_betas_from_step_5,
            a_weight_frozen_from_step_4,
            clipping_lost_from_step_5,
            gradients_kept_once_in_8_steps,
            second_moments_lost_on_resume,
            first_moments_lost_on_resume,
            count_of_steps_lost_on_resume,
            schedule_lost_on_resume,
            a_weight_lost_on_resume,
            labels_of_the_4th_micro_batch_shifted,
            micro_batches_after_the_3rd_dropped,
            copies_above_micro_batch_2,
            the_first_micro_batch_is_the_second,
            labels_shifted_from_step_6,
            last_micro_batch_dropped_from_step_4,
            gradients_rounded_between_micro_batches,
            another_activation,
            norms_with_another_eps,
            biases_of_the_last_norm_lost,
            one_position_late,
            attention_scale_doubled,
            masks_alike_in_all_micro_batches,
            masks_alike_in_all_steps,
            one_kind_of_dropout_does_nothing,
            nan_gradients_become_zero,
            nan_losses_left_out,
            nan_norm_becomes_zero,
            steps_without_numbers_left_out,
        )
    ),
    (elements_past_16384_never_stepped, "wide", {}),
    (last_rows_of_the_embedding_never_stepped, "wide", {}),
    (gradients_past_16384_lost, "wide", {}),
    (another_loss, "capped", {}),
    (another_loss, "z_loss", {}),
    (another_loss, "smooth", {}),
    (padding_mask_lost, "padded", {}),
    (attention_scale_doubled, "llama", {}),
    (rotary_base_halved, "llama", {}),
    (norms_with_another_eps, "llama", RECOMPUTED),
    (attention_dropout_lost_in_sdpa, "dropout_in_attention", SDPA),
]
FEW = (moments_cleared_every_8_steps, second_moments_lost_on_resume, micro_batches_after_the_3rd_dropped)
FEW = (*FEW, elements_past_16384_never_stepped, padding_mask_lost, masks_alike_in_all_steps, nan_losses_left_out)


def rows_of(rows: list[tuple[Callable[[Any], None], str, dict[str, Any]]], few: tuple[Any, ...]) -> list[Any]:
    """Every row in both precisions; of a few one belongs to `make test`."""
    found = []
    for change, name, knobs in rows:
        for precision in ("fp32", "bf16"):
            everywhere = change in few and precision == "bf16"
            marks = [pytest.mark.slow] if everywhere else [pytest.mark.slow, pytest.mark.exhaustive]
            label = f"{change.__name__}-{name}-{precision}"
            found.append(pytest.param(change, name, {"precision": precision, **knobs}, marks=marks, id=label))
    return found


def verdict(build: Callable[[], Workload], knobs: dict[str, Any]) -> Any:
    return check_parity_of(build, TrainingConfig.model_validate({"micro_batch": 2, **knobs}))


@pytest.mark.parametrize("precision", some(["fp32", "bf16"], ["bf16"]))
@pytest.mark.parametrize("name", some(WORKLOADS, ["gpt2", "wide", "padded"]))  # those of FEW
def test_nothing_planted_passes(name: str, precision: str) -> None:
    parity = verdict(WORKLOADS[name], {"precision": precision})
    assert parity.passed, parity.failures


@pytest.mark.parametrize(("change", "name", "knobs"), rows_of(ROWS, FEW))
def test_planted(monkeypatch: pytest.MonkeyPatch, change: Any, name: str, knobs: dict[str, Any]) -> None:
    planted.plant(monkeypatch, change)
    parity = verdict(WORKLOADS[name], knobs)
    assert not parity.passed, parity.note
