"""The loss of the same first samples in every trial: recorded before any update, compared with the baseline's."""

import pytest
import torch

from autoplan.planner.records.trials import Outcome, Trial
from autoplan.planner.trials.batches import first_samples
from autoplan.planner.trials.runner import is_off, with_first_loss_compared
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from tests.planner.trials.test_step_timer import make_timer
from tests.strategies.tiny import GPT2, classifier, language


def trial(number, losses, **knobs):
    config = TrainingConfig.model_validate({"micro_batch": 4} | knobs)
    return Trial(
        number=number,
        purpose="search",
        config=config,
        outcome=Outcome.OK,
        phase="done",
        seconds_spent=1.0,
        first_losses=losses,
    )


@pytest.mark.parametrize(
    ("losses", "base", "knobs", "off"),
    [
        ((3.0,), (3.0, 3.0, 3.0), {}, False),
        ((3.1,), (3.0, 3.0, 3.0), {}, True),
        ((3.02,), (3.0, 3.0, 3.0), {"precision": "bf16"}, False),
        ((3.0, 3.1, 3.05), (3.02, 3.1, 2.99), {}, False),  # dropout
        ((2.0, 2.0, 2.0), (3.02, 3.1, 2.99), {}, True),
        ((2.0,), (3.0,), {}, False),  # the spread is not known
        ((), (3.0, 3.0), {}, False),
    ],
)
def test_compared_within_the_spread(losses, base, knobs, off):
    one, baseline = trial(2, losses, **knobs), trial(1, base)
    assert is_off(one, baseline) is off
    marked = with_first_loss_compared(one, baseline)
    assert marked.loss_differs is off
    assert ("the parity check decides" in " ".join(marked.warnings)) is off
    assert Trial.model_validate_json(marked.model_dump_json()).loss_differs is off


def test_a_trial_in_fp32_may_differ_from_a_baseline_in_bf16_by_its_rounding():
    baseline = trial(1, (3.0, 3.0, 3.0), precision="bf16")
    assert not is_off(trial(2, (3.02,)), baseline)
    assert is_off(trial(2, (3.1,)), baseline)


def test_the_baseline_is_not_compared_with_itself():
    baseline = trial(1, (3.0, 4.0))
    assert with_first_loss_compared(baseline, baseline) is baseline
    assert with_first_loss_compared(baseline, None) is baseline


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_mean_loss_is_the_same_at_every_micro_batch(dropout):
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    found = {}
    for micro_batch in (1, 2, 4):
        workload = language(GPT2 | rates)
        run = prepare(workload, TrainingConfig(micro_batch=micro_batch))
        batch = first_samples(workload, micro_batch, 3)
        assert all(torch.equal(row, batch["input_ids"][0]) for row in batch["input_ids"])
        losses = []
        for start in range(3):
            micro = {key: value[start * micro_batch : (start + 1) * micro_batch] for key, value in batch.items()}
            total, count = run.micro_step(micro, run.loss_divisor(batch), sync=False)
            losses.append(float(total) / float(count))
        found[micro_batch] = trial(micro_batch, tuple(losses), micro_batch=micro_batch)
    assert not is_off(found[4], found[1]) and not is_off(found[2], found[1])
    spread = max(found[1].first_losses) - min(found[1].first_losses)
    assert spread > 1e-3 if dropout else spread < 1e-6


def test_a_fixed_micro_batch_is_taken_as_it_is():
    workload = classifier(norm=True, fixed_micro_batch=4)
    batch = first_samples(workload, 4, 2)
    assert torch.equal(batch["image"][:4], workload.make_batch(4, 0)["image"])
    assert torch.equal(batch["image"][:4], batch["image"][4:])


def test_a_timer_keeps_the_losses_of_its_first_step_alone():
    timer = make_timer("make_sound", micro_batch=2)
    timer.short_steps()
    assert len(timer.first_losses) == min(3, timer.run.accumulation)
    assert timer.first_losses[0] == pytest.approx(timer.first_losses[-1], rel=1e-5)
