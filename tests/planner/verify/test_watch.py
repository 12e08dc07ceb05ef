"""A training beside its plan: what is counted, what is left out, what is warned of, and where the figures go."""

from __future__ import annotations

import os
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import autoplan
from autoplan.planner.plan.plan import Plan
from autoplan.planner.plan.surroundings import read_environment
from autoplan.planner.records.trials import Interval, Window
from autoplan.planner.verify.meter import LEAST_STEPS, WARM_UP_STEPS, Meter, describe_causes
from autoplan.probes import cpu
from autoplan.probes.run import read_host_profile
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.spec import BatchSizes, Counted, SizeRange
from tests.recorded import make_plan

LENGTH, ROWS = 8, 4
STEP_S = 0.02


def plan_at(rate: float, **config: Any) -> Plan:
    """A plan found here and now, at so many tokens a second, 32 a step of which all are padding but 24."""
    plan = make_plan(TrainingConfig(micro_batch=4, **config))
    sizes = BatchSizes(
        batches=1,
        samples=ROWS,
        elements=SizeRange(min=64, mean=64, max=64),
        positions=SizeRange(min=32, mean=32, max=32),
        items=SizeRange(min=24, mean=24, max=24),
        largest=0,
        typical=(0,),
    )
    counted = Counted(unit="tokens", by="fields", fields=("input_ids",), without_padding=("input_ids",))
    workload = plan.workload.model_copy(update={"counted": counted, "batch_sizes": sizes})
    measured = plan.measurement.model_copy(
        update={
            "tokens_per_s": Interval(median=rate, low=rate, high=rate, samples=9),
            "step_time_s": Interval(median=24 / rate, low=24 / rate, high=24 / rate, samples=9),
        }
    )
    here = {"hardware": read_host_profile(), "environment": read_environment()}
    return plan.model_copy(update={"workload": workload, "measurement": measured, **here})


def batch(rows: int = ROWS) -> dict[str, torch.Tensor]:
    mask = torch.ones(rows, LENGTH, dtype=torch.long)
    mask[:, 6:] = 0
    return {"input_ids": torch.ones(rows, LENGTH, dtype=torch.long), "attention_mask": mask}


def steps(watch: Any, number: int = WARM_UP_STEPS + 3 * LEAST_STEPS, step: Callable[[], None] | None = None) -> None:
    for _ in range(number):
        time.sleep(STEP_S)
        step() if step else watch.step(batch())


@pytest.fixture
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_what_is_trained_is_counted_without_padding(no_warning: None) -> None:
    with autoplan.watch(plan_at(24 / STEP_S / 4), window_s=5 * STEP_S) as watch:
        assert watch.figures is None
        steps(watch)
    figures = watch.figures
    assert figures is not None and figures.unit == "tokens"
    assert figures.items_per_s == pytest.approx(24 / figures.step_time_s)
    assert figures.step_time_s >= STEP_S and figures.steps >= LEAST_STEPS
    assert figures.share == pytest.approx(figures.items_per_s / (24 / STEP_S / 4)) and figures.share > 1
    assert figures.peak_memory_bytes and figures.plan_peak_memory_bytes == 3 * 2**30


def test_several_ranks_count_for_all(no_warning: None) -> None:
    with autoplan.watch(plan_at(10.0, dp_replicate=2), window_s=5 * STEP_S) as watch:
        steps(watch)
    assert watch.figures is not None
    assert watch.figures.items_per_s == pytest.approx(48 / watch.figures.step_time_s)


def test_items_may_be_given_or_taken_from_the_plan(no_warning: None) -> None:
    for step, wanted in (({"items": 7.0}, 7.0), ({}, 24.0)):
        with autoplan.watch(plan_at(10.0), window_s=5 * STEP_S) as watch:
            steps(watch, step=lambda watch=watch, step=step: watch.step(**step))  # type: ignore[misc]
        assert watch.figures is not None
        assert watch.figures.items_per_s == pytest.approx(wanted / watch.figures.step_time_s)


def test_micro_batches_of_a_loader_are_added_up(no_warning: None) -> None:
    with autoplan.watch(plan_at(10.0), window_s=4 * STEP_S) as watch:
        loader = iter(watch.batches(batch(1) for _ in range(1000)))

        def step() -> None:
            for _ in range(3):
                next(loader)
            watch.step()

        steps(watch, step=step)
    assert watch.figures is not None
    assert watch.figures.items_per_s == pytest.approx(18 / watch.figures.step_time_s)


def test_a_slow_loader_is_the_likely_cause_and_is_said_once() -> None:
    def slow() -> Iterator[dict[str, torch.Tensor]]:
        for _ in range(4 * LEAST_STEPS + WARM_UP_STEPS):
            time.sleep(3 * STEP_S)
            yield batch()

    with pytest.warns(UserWarning) as said, autoplan.watch(plan_at(24 / STEP_S), window_s=5 * STEP_S) as watch:
        for _ in watch.batches(slow()):
            time.sleep(STEP_S)
            watch.step()
    assert len([one for one in said if "autoplan" in str(one.message)]) == 1
    text = str(said[0].message)
    assert "of the plan's" in text and "waited" in text.split("Likely cause:")[1].split(";")[0]
    assert watch.figures is not None and watch.figures.data_share is not None
    assert 0.5 < watch.figures.data_share < 0.95 and watch.warning == text


@pytest.mark.parametrize(
    ("disturbed", "positions", "words"),
    [
        (None, 64.0, "batches are larger than measured: 64 tokens with padding a step, 32 then"),
        (None, None, "nothing that explains it"),
        ("torch.compile compiled again", None, "compiled again"),
    ],
)
def test_what_was_seen_is_the_cause_and_nothing_is_made_up(
    disturbed: str | None, positions: float | None, words: str
) -> None:
    window = Window(seconds=1.0, disturbed=disturbed)
    (text,) = describe_causes(plan_at(1e6), window, (), data_share=None, positions=positions)
    assert words in text


def test_a_recompilation_in_a_window_is_seen() -> None:
    meter = Meter(plan=plan_at(1e9), window_s=5 * STEP_S)
    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    with pytest.warns(UserWarning, match="compiled again"):
        for number in range(WARM_UP_STEPS + LEAST_STEPS + 2):
            compiled(torch.ones(2 + number // (WARM_UP_STEPS + 2)))
            time.sleep(2 * STEP_S)
            meter.step()


def test_others_on_the_cores_are_a_cause() -> None:
    import subprocess

    cores = len(os.sched_getaffinity(0))
    code = "import time\nend = time.monotonic() + 20\nwhile time.monotonic() < end: pass"
    busy = [subprocess.Popen([sys.executable, "-c", code], start_new_session=True) for _ in range(cores)]
    others = [process.pid for process in busy]
    try:
        with pytest.MonkeyPatch.context() as patch:  # they are our children here: a stranger's are not
            own = cpu.cpu_time_below
            patch.setattr(cpu, "cpu_time_below", lambda root: own(root) - sum(map(own, others)))
            with pytest.warns(UserWarning, match="other work"), autoplan.watch(plan_at(1e9), window_s=1.0) as watch:
                steps(watch, 70)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert watch.figures is not None and any("other work" in cause for cause in watch.figures.causes)


def test_a_short_training_has_figures_and_no_warning(no_warning: None) -> None:
    with autoplan.watch(plan_at(1e9)) as watch:
        steps(watch)
        assert watch.figures is None
    assert watch.figures is not None and watch.figures.items_per_s == pytest.approx(24 / watch.figures.step_time_s)


def test_pauses_count_for_nothing(no_warning: None) -> None:
    with autoplan.watch(plan_at(10.0), window_s=5 * STEP_S) as watch:

        def step() -> None:
            watch.step(batch())
            with watch.pause():
                time.sleep(3 * STEP_S)

        steps(watch, step=step)
    assert watch.figures is not None and watch.figures.step_time_s < 2.5 * STEP_S


def test_a_logger_that_raises_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __init__(self) -> None:
            self.asked = 0

        def log(self, *_: Any, **__: Any) -> None:
            self.asked += 1
            raise ConnectionError("no route to the server\nsecond line")

        add_scalar = log

    run, writer = Broken(), Broken()
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=run))  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        with autoplan.watch(plan_at(10.0), writer=writer, window_s=LEAST_STEPS * STEP_S) as watch:
            steps(watch)
    assert watch.figures is not None and run.asked >= 2 and writer.asked >= 2, "each window is given to both"
    texts = [str(one.message) for one in said]
    assert len(texts) == 2 and all(text.endswith("no route to the server. The training goes on") for text in texts)


def test_the_figures_go_to_a_writer_and_to_a_run_that_is_active(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[str, float, int]] = []
    lines: list[tuple[dict[str, float], bool]] = []
    writer = types.SimpleNamespace(add_scalar=lambda name, value, step: logged.append((name, value, step)))
    run = types.SimpleNamespace(log=lambda metrics, commit: lines.append((metrics, commit)))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=run))
    with autoplan.watch(plan_at(10.0), window_s=5 * STEP_S, writer=writer) as watch:
        steps(watch)
    assert watch.figures is not None
    names = {"autoplan/tokens_per_s", "autoplan/share_of_plan", "autoplan/peak_memory_gib"}
    assert {name for name, _, _ in logged} == names and logged[-1][2] == watch.figures.step
    assert set(lines[-1][0]) == names and lines[-1][1] is False, "the user's own step counter stays"


@pytest.mark.parametrize("given", [{"window_s": 0}, {"shortfall": 1.5}, {"shortfall": 0.0}])
def test_options_out_of_range_are_refused(given: dict[str, float]) -> None:
    with pytest.raises(autoplan.UsageError, match=next(iter(given))), autoplan.watch(plan_at(1.0), **given):
        pass


def make_trainer(folder: Path, callbacks: list[Any], **given: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": LENGTH}
    rows = [{name: row[0] for name, row in batch(1).items()} for _ in range(400)]
    for row in rows:
        row["labels"] = row["input_ids"]
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=ROWS,
        max_steps=24,
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
        **({"report_to": "none", "gradient_accumulation_steps": 4, "save_strategy": "no"} | given),
    )
    model = GPT2LMHeadModel(GPT2Config(**sizes))
    return Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:4], callbacks=callbacks)


SLOW_S = 0.1


def slowly(function: Any) -> Any:
    def wait_first(*args: Any, **given: Any) -> Any:
        time.sleep(SLOW_S)
        return function(*args, **given)

    return wait_first


def test_a_trainer_logs_the_figures_with_its_own(tmp_path: Path, no_warning: None) -> None:
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):
        lines: list[dict[str, Any]] = []

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
            self.lines.append(dict(logs))

    recorder = Recorder()
    warnings.simplefilter("ignore", UserWarning)  # of torch's loader about pinned memory
    trainer = make_trainer(tmp_path, [recorder], include_num_input_tokens_seen="non_padding")
    watch = autoplan.TransformersWatch(plan_at(1.0), window_s=0.05).add_to(trainer)
    trainer.train()
    figures = watch.figures
    assert figures is not None and figures.items_per_s == pytest.approx(16 * 6 / figures.step_time_s)
    assert figures.data_share is not None and 0 <= figures.data_share < 1
    assert any("loss" in line and "autoplan/share_of_plan" in line for line in recorder.lines)


def test_a_trainer_with_another_global_batch_has_other_items(tmp_path: Path) -> None:
    plan = plan_at(1.0)  # a global batch of 16
    trainer = make_trainer(tmp_path, [], gradient_accumulation_steps=2)
    watch = autoplan.TransformersWatch(plan, window_s=0.05).add_to(trainer)
    trainer.train()
    assert watch.figures is not None
    assert watch.figures.items_per_s == pytest.approx(24 / 2 / watch.figures.step_time_s)


def test_an_evaluation_and_a_checkpoint_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, [], eval_strategy="steps", eval_steps=12, save_strategy="steps", save_steps=12)
    for name in ("evaluation_loop", "_save_checkpoint"):
        monkeypatch.setattr(trainer, name, slowly(getattr(trainer, name)))
    watch = autoplan.TransformersWatch(plan_at(1.0), window_s=60.0).add_to(trainer)
    left: list[float] = []
    monkeypatch.setattr(watch._meter, "leave_out", left.append)
    trainer.train()
    assert len([seconds for seconds in left if seconds >= SLOW_S]) == 4, left  # two of each


def test_a_trainer_that_falls_short_is_warned_of(tmp_path: Path) -> None:
    watch = autoplan.TransformersWatch(plan_at(1e9), window_s=0.05)
    with pytest.warns(UserWarning, match="Likely cause"):
        make_trainer(tmp_path, [watch]).train()
    assert watch.warning is not None


def test_a_trainers_tensorboard_has_the_figures(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer = make_trainer(tmp_path, [], report_to="tensorboard")
    autoplan.TransformersWatch(plan_at(1.0), window_s=0.05).add_to(trainer)
    trainer.train()
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.tfevents*")}
    events = loader.EventAccumulator(str(folder)).Reload()
    assert "train/autoplan/share_of_plan" in events.Tags()["scalars"]


def make_module(lightning: Any) -> Any:
    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(32, 4)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.embedding(batch["input_ids"]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


def test_lightnings_checkpoint_is_left_out_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.io import TorchCheckpointIO

    writer = TorchCheckpointIO()
    monkeypatch.setattr(writer, "save_checkpoint", slowly(writer.save_checkpoint))
    watch = autoplan.LightningWatch(plan_at(1.0), window_s=60.0)
    left: list[float] = []
    loaded: list[float] = []
    monkeypatch.setattr(watch._meter, "leave_out", left.append)
    monkeypatch.setattr(watch._meter, "loaded", loaded.append)
    trainer = lightning.Trainer(
        max_steps=6,
        accelerator="cpu",
        devices=1,
        logger=False,
        callbacks=[watch, ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=3, save_top_k=-1)],
        plugins=[writer],
        enable_progress_bar=False,
    )
    rows = [{name: row[0] for name, row in batch(1).items()} for _ in range(200)]
    trainer.fit(make_module(lightning), torch.utils.data.DataLoader(rows, batch_size=ROWS))
    assert max(left) >= SLOW_S > max(loaded), (left, loaded)


def test_lightning_logs_the_figures_to_its_loggers(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.loggers import CSVLogger

    rows = [{name: row[0] for name, row in batch(1).items()} for _ in range(200)]
    watch = autoplan.LightningWatch(plan_at(1.0), window_s=0.05)
    trainer = lightning.Trainer(
        max_steps=24,
        accumulate_grad_batches=2,
        accelerator="cpu",
        devices=1,
        logger=CSVLogger(str(tmp_path)),
        callbacks=[watch],
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=str(tmp_path),
    )
    trainer.fit(make_module(lightning), torch.utils.data.DataLoader(rows, batch_size=ROWS))
    figures = watch.figures
    assert figures is not None and figures.items_per_s == pytest.approx(2 * 24 / figures.step_time_s)
    (table,) = tmp_path.rglob("metrics.csv")
    assert "autoplan/share_of_plan" in table.read_text()


def test_without_lightning_the_line_to_install_it_is_named() -> None:
    try:
        import lightning.pytorch  # noqa: F401
    except ImportError:
        with pytest.raises(autoplan.MissingExtraError, match="pip install lightning"):
            autoplan.LightningWatch(plan_at(1.0))
