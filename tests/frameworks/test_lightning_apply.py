"""plan.apply_to of a LightningModule: what its Trainer counts in batches, and what no argument of it says."""

import sys
import types
import warnings

import pytest
import torch

from autoplan.errors import PlanError, WorkloadError
from autoplan.frameworks.lightning.read import read_module
from autoplan.strategies.analysis.training_facts import read_training_facts
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import spec_from_objects
from tests.recorded import make_plan
from tests.strategies.loops import Sentences, pad, tiny_gpt2

pytestmark = pytest.mark.filterwarnings("ignore:the plan was found on other hardware")


class LikeLightning(torch.nn.Module):
    """What is read of a LightningModule, where Lightning need not be installed; its schedule ends with the training."""

    automatic_optimization = True

    def __init__(self, frequency=1):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self._trainer, self.frequency = torch.nn.Linear(3, 1), None, frequency

    @property
    def trainer(self):
        return self._trainer

    @trainer.setter
    def trainer(self, trainer):
        self._trainer = trainer

    def __getstate__(self):
        return {**vars(self), "_trainer": None}

    def on_before_batch_transfer(self, batch, index):
        return batch

    on_after_batch_transfer = on_before_batch_transfer

    def training_step(self, batch, batch_idx):
        return ((self.layer(batch[0]) - batch[1]) ** 2).mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=steps)
        scheduled = {"scheduler": schedule, "interval": "step", "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": scheduled}


def trainer_of(**more):
    given = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": None, "global_step": 0, "num_devices": 1}
    given |= {"num_nodes": 1, "accumulate_grad_batches": 2, "max_epochs": 3, "max_steps": -1, "callbacks": []}
    given |= {"precision": "32-true", "strategy": type("SingleDeviceStrategy", (), {})()}
    return types.SimpleNamespace(**(given | more))


def module_of(kind=LikeLightning, package="lightning.pytorch", **options):
    base = type("LightningModule", (kind,), {"__module__": f"{package}.core.module"})
    return type("Mine", (base,), {})(**options)


def points():
    """Batches of 4."""
    return torch.utils.data.DataLoader([(torch.ones(3) * k, torch.ones(1)) for k in range(32)], batch_size=4)


def plan_of(module, data, trainer, micro_batch):
    spec = spec_from_objects(read_module(module, data, trainer=trainer).workload)
    return make_plan(TrainingConfig(micro_batch=micro_batch), workload=spec, training=None)


def said(settings):
    return "\n".join(settings.not_carried)


def test_a_module_is_read_with_the_trainer_of_the_search():
    module, data, trainer = module_of(), points(), trainer_of()
    found = plan_of(module, data, trainer, 2)
    settings = found.apply_to(module, data, trainer=trainer)
    assert (settings.batch_size, settings.trainer_arguments["accumulate_grad_batches"]) == (2, 4)
    with pytest.raises(WorkloadError, match="raised by configure_optimizers"):
        found.apply_to(module, data)


def test_what_the_trainer_counts_in_batches_is_counted_in_the_plans():
    module, data = module_of(), points()
    trainer = trainer_of(limit_train_batches=6, val_check_interval=3)
    settings = plan_of(module, data, trainer, 2).apply_to(module, data, trainer=trainer)
    assert {name: settings.trainer_arguments[name] for name in ("limit_train_batches", "val_check_interval")} == {
        "limit_train_batches": 12,
        "val_check_interval": 6,
    }
    with pytest.warns(UserWarning, match="val_check_interval=3 counts batches of 4 samples.*1.5 of them"):
        settings = plan_of(module, data, trainer, 8).apply_to(module, data, trainer=trainer)
    assert settings.trainer_arguments["limit_train_batches"] == 3
    assert "val_check_interval" not in settings.trainer_arguments and "val_check_interval=3" in said(settings)


@pytest.mark.parametrize(("given", "micro_batch"), [((0.5, 1.0), 2), ((6, 3), 4)])
def test_shares_of_an_epoch_and_batches_as_they_were_stay(given, micro_batch):
    module, data = module_of(), points()
    trainer = trainer_of(limit_train_batches=given[0], val_check_interval=given[1])
    settings = plan_of(module, data, trainer, micro_batch).apply_to(module, data, trainer=trainer)
    assert not {"limit_train_batches", "val_check_interval"} & set(settings.trainer_arguments)
    assert "batches" not in said(settings)


class Constant(LikeLightning):
    """Without a schedule that needs the Trainer."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_without_a_trainer_it_is_said_that_batches_have_another_size():
    module, data = module_of(Constant), points()
    found = plan_of(module, data, None, 2)
    settings = found.apply_to(module, data)
    assert "count batches of 4 samples, and the plan's have 2; give trainer=" in said(settings)


@pytest.mark.parametrize(("frequency", "micro_batch", "words"), [(3, 4, None), (1, 2, None), (4, 2, "frequency=8")])
def test_a_schedule_by_batches_is_said_where_the_accumulation_is_another(frequency, micro_batch, words):
    module, data, trainer = module_of(frequency=frequency), points(), trainer_of()
    found = plan_of(module, data, trainer, micro_batch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings = found.apply_to(module, data, trainer=trainer)
    warned = "\n".join(str(one.message) for one in caught)
    if words is None:
        assert "frequency" not in said(settings) + warned
    else:
        assert f"give {words}" in said(settings) and f"give {words}" in warned


class Normed(Constant):
    """With BatchNorm."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)

    def training_step(self, batch, batch_idx):
        return ((self.layer(self.norm(batch[0])) - batch[1]) ** 2).mean()


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_plan_of_several_gpus_has_the_strategy_of_the_modules_own_package(package, monkeypatch):
    strategy = object()
    strategies = types.SimpleNamespace(DDPStrategy=lambda **options: strategy)
    monkeypatch.setitem(sys.modules, f"{package}.strategies", strategies)
    module, data = module_of(Normed, package), points()
    config = TrainingConfig(micro_batch=2, dp_replicate=2, batch_norm="sync")
    spec = spec_from_objects(read_module(module, data).workload)
    settings = make_plan(config, workload=spec, training=None, device="cuda").apply_to(module, data)
    assert settings.trainer_arguments["strategy"] is strategy
    assert settings.trainer_arguments["sync_batchnorm"] is True
    assert type(module.norm) is torch.nn.SyncBatchNorm


class Language(Constant):
    """A language model, whose loss is a mean over labels."""

    def __init__(self):
        super().__init__()
        self.layer = tiny_gpt2()

    def training_step(self, batch, batch_idx):
        return self.layer(**batch).loss


def test_a_mean_over_labels_that_the_trainer_averages_by_micro_batch_is_said():
    data = torch.utils.data.DataLoader(Sentences(), batch_size=8, collate_fn=pad)
    module = module_of(Language)
    with pytest.warns(UserWarning, match="Lightning averages the means of 4 micro-batches.*export --to lightning"):
        settings = plan_of(module, data, None, 2).apply_to(module, data)
    assert "averages the means of 4 micro-batches" in said(settings)
    assert "averages the means" not in said(plan_of(module, data, None, 8).apply_to(module, data))
    same = torch.utils.data.DataLoader([s[:6] for s in Sentences()], batch_size=8, collate_fn=pad)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings = plan_of(module, same, None, 2).apply_to(module, same)
    assert "averages the means of 4 micro-batches" in said(settings)
    assert not any("averages the means" in str(one.message) for one in caught), "each has as many labels"


class PerBatch(LikeLightning):
    """Averages its weights after each batch."""

    def on_train_batch_end(self, *given):
        pass


class Own:
    """A callback of the user's own."""

    def on_after_backward(self, *given):
        pass


def test_hooks_that_lightning_calls_for_each_batch_are_named_where_a_step_has_more_of_them():
    module, data = module_of(), points()
    type(module).on_train_batch_end = PerBatch.on_train_batch_end
    trainer = trainer_of(accumulate_grad_batches=1, callbacks=[Own()], max_epochs=2)
    words = "on_train_batch_end of Mine and on_after_backward of Own: Lightning calls it for each micro-batch, 4 times"
    with pytest.warns(UserWarning, match=words):
        settings = plan_of(module, data, trainer, 1).apply_to(module, data, trainer=trainer)
    assert words in said(settings)
    assert words not in said(plan_of(module, data, trainer, 4).apply_to(module, data, trainer=trainer))


def test_other_clipping_and_another_schedule_of_a_trainer_are_refused():
    module, data, trainer = module_of(), points(), trainer_of()
    workload = read_module(module, data, trainer=trainer).workload
    facts = read_training_facts(workload, workload.build_model())
    found = make_plan(TrainingConfig(micro_batch=2), workload=spec_from_objects(workload), training=facts)
    with pytest.raises(PlanError, match="clipped to a norm of 1 .* clipped to a norm of 0.5"):
        found.apply_to(module, data, trainer=trainer_of(gradient_clip_val=1.0))
    with pytest.raises(PlanError, match="OneCycleLR"):
        found.apply_to(module, data, trainer=trainer_of(max_epochs=5))
    found.apply_to(module, data, trainer=trainer)


class SetsUp(LikeLightning):
    """Has attributes that it gets when it is set up and in a step, and draws numbers there."""

    def setup(self, stage):
        self.scale, self.calls = 0.5, 0
        torch.rand(())

    def training_step(self, batch, batch_idx):
        self.calls += 1
        return super().training_step(batch, batch_idx) * self.scale


def test_what_a_module_sets_when_it_is_set_up_is_no_change_and_draws_nothing():
    module, data, trainer = module_of(SetsUp), points(), trainer_of()
    found = plan_of(module, data, trainer, 2)
    torch.manual_seed(7)
    wanted = torch.rand(2)
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="changed since")
        found.apply_to(module, data, trainer=trainer)
    assert torch.equal(torch.rand(2), wanted)
