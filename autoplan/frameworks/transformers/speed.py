"""Runs some steps of a Trainer's own loop in a process of its own, and compares their speed with a plan's measurement.

In: a Trainer, and a plan. Out: seconds per optimizer step, and a sentence. The loop is the Trainer's: its loader, its
accelerator, its compute_loss. Its callbacks, evaluations and checkpoints do not run, and its weights stay as they are.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import torch

from autoplan.frameworks.transformers.loss import OF_ONE_TRAINER, travels
from autoplan.frameworks.transformers.rebuild import build_anew, divide_loss, switch_on
from autoplan.planner.records.plan import PlanRecord
from autoplan.processes import Ended, RankContext, Task, Zygote
from autoplan.strategies.workloads.devices import on_the_host
from autoplan.strategies.workloads.pickling import dumps

WARMUP_STEPS = 2
"""Steps that are not timed: the first make the optimizer's state, and compile."""

DEFAULT_STEPS = 8
"""Steps that are timed."""

TIME_LIMIT_S = 300.0
"""For all of it. A compiler may take most of this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnLoop:
    """The step times of the Trainer's own loop.

    Attributes:
        step_s: Seconds of each timed optimizer step, from the end of one to the end of the next.
        reason: Why there are none; empty where there are.
    """

    step_s: tuple[float, ...] = ()
    reason: str = ""

    @property
    def median_s(self) -> float:
        """The median step."""
        return statistics.median(self.step_s)


def run_own_loop(trainer: Any, *, steps: int = DEFAULT_STEPS, time_limit_s: float = TIME_LIMIT_S) -> OwnLoop:
    """Times steps of a Trainer's own loop in a process of its own. The Trainer is left as it was.

    Args:
        trainer: A Trainer that has not trained yet.
        steps: How many are timed.
        time_limit_s: The process is ended after so many seconds.
    """
    if trainer.args.world_size > 1:
        return OwnLoop(reason="it trains on several processes")
    with tempfile.TemporaryDirectory(prefix="autoplan-trainer-") as folder, on_the_host(trainer):
        file = Path(folder) / "trainer.pickle"
        try:
            file.write_bytes(dumps(_parts_to_send(trainer)))
        except Exception as error:
            return OwnLoop(reason=f"it cannot be sent to another process: {type(error).__name__}: {error}")
        task = Task(
            target=f"{__name__}:run_in_rank",
            args=(str(file), steps),
            total_deadline_s=time_limit_s,
        )
        with Zygote(preload=("torch",)) as zygote:
            report = zygote.run(task)
    if report.ended is Ended.FINISHED:
        return OwnLoop(step_s=tuple(report.ranks[0].result or ()))
    return OwnLoop(reason=report.describe())


def describe_speed(plan: PlanRecord, loop: OwnLoop) -> str:
    """How far the Trainer's own loop is from what the search measured, in a sentence."""
    if not loop.step_s:
        return f"the Trainer's own loop was not measured: {loop.reason}"
    measured = plan.measurement.step_time_s
    ratio = measured.median / loop.median_s
    return (
        f"the Trainer's own loop takes {loop.median_s:.3g} s a step (median of {len(loop.step_s)}), and the search "
        f"measured {measured.median:.3g} s ({measured.low:.3g} to {measured.high:.3g}): {ratio:.2f} of the measured "
        "speed"
    )


def run_in_rank(context: RankContext, file: str, steps: int) -> list[float]:
    """Makes the Trainer again and trains some steps. Called in a rank."""
    from transformers import DefaultFlowCallback, TrainerCallback

    kind, state, optimizers, divided_by, config = cloudpickle.loads(Path(file).read_bytes())
    sent: Any = object.__new__(kind)
    sent.__dict__.update(state)
    arguments = dataclasses.replace(
        sent.args,
        output_dir=str(context.directory / "trainer-output"),
        max_steps=WARMUP_STEPS + steps,
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        load_best_model_at_end=False,
        report_to=[],
        disable_tqdm=True,
        push_to_hub=False,
    )

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **options: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    if config is not None:
        switch_on(sent.model, config, "cpu" if sent.args.use_cpu else "cuda")
    trainer = build_anew(sent, arguments, optimizers=optimizers)
    if divided_by is not None:
        divide_loss(trainer, divided_by)
    trainer.add_callback(DefaultFlowCallback())  # ends the training at max_steps
    trainer.add_callback(Clock())
    trainer.train()
    return [later - earlier for earlier, later in zip(ends[WARMUP_STEPS - 1 :], ends[WARMUP_STEPS:], strict=False)]


def _parts_to_send(trainer: Any) -> tuple[Any, ...]:
    """The class, what travels, the optimizer and schedule, the loss that divides, and the plan's config."""
    left = {*OF_ONE_TRAINER, "eval_dataset", "compute_loss", "divided_by"} - {"model", "args"}
    sent = {name: value for name, value in vars(trainer).items() if name not in left and travels(value)}
    sent |= {"callback_handler": SimpleNamespace(callbacks=()), "eval_dataset": None}  # callbacks do not run
    return (
        type(trainer),
        sent,
        (trainer.optimizer, trainer.lr_scheduler),
        getattr(trainer, "divided_by", None),
        getattr(trainer, "plan_config", None),
    )
