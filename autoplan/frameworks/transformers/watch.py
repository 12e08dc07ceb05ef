"""TransformersWatch: a callback for Trainer and TRL's trainers."""

from __future__ import annotations

import time
from typing import Any

from transformers.trainer_callback import TrainerCallback

from autoplan.planner.plan.plan import Plan
from autoplan.planner.verify.meter import SHORTFALL, WINDOW_S, Figures, Meter, Watcher, give, log_to_wandb


class TransformersWatch(Watcher, TrainerCallback):
    """Watches a Trainer beside its plan: throughput, memory, and one warning if it falls short.

        TransformersWatch(plan).add_to(trainer)        # or callbacks=[TransformersWatch(plan)]

    `add_to` puts it before the Trainer's own loggers, so that its figures are in the same lines of TensorBoard, W&B and
    the console. As one of `callbacks` it comes after them, and logs to the active run of W&B alone.

    Items are those of the Trainer's count (`include_num_input_tokens_seen`), where it counts without padding or the
    plan's batches have none; else each step has as many as the plan's for its global batch.

    Args:
        plan: The plan that the Trainer's arguments are of.
        window_s: Seconds of a window that is compared with the plan.
        shortfall: The share below the plan's throughput that is warned of.

    Raises:
        UsageError: the window or the shortfall is out of its range.
    """

    def __init__(self, plan: Plan, *, window_s: float = WINDOW_S, shortfall: float = SHORTFALL) -> None:
        super().__init__(Meter(plan=plan, window_s=window_s, shortfall=shortfall))
        self._mark: float | None = None
        self._seen = 0
        self._items = self._meter.plan_items
        self._first = False
        self._unsaid: Figures | None = None

    def add_to(self, trainer: Any) -> TransformersWatch:
        """Adds this callback to a Trainer, before its loggers; returns it."""
        trainer.callback_handler.callbacks.insert(0, self)
        self._first = True
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begins; a Trainer with another global batch than the plan's has other items a step."""
        batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        plan = self._meter.plan
        ranks = args.world_size / plan.config.dp if plan.config.tp * plan.config.pp > 1 else 1.0
        self._items = self._meter.plan_items * batch / ranks / plan.workload.global_batch
        self._seen = state.num_input_tokens_seen
        self._meter.begin()
        self._mark = time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The batches of the step are there: what passed since the last step was waiting for them."""
        if self._mark is not None:
            self._meter.loaded(time.perf_counter() - self._mark)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Counts a step."""
        self._meter.on_window = self._keep if state.is_world_process_zero else None
        items, seen = self._items, state.num_input_tokens_seen
        if seen > self._seen and self._counts_as_the_plan(args):
            items, self._seen = float(seen - self._seen), seen
        self._meter.step(items)
        self._mark = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **given: Any) -> None:
        """Adds the figures of the last window to the Trainer's own log."""
        if logs is None or "loss" not in logs:
            return  # an evaluation logs before `on_evaluate` comes, which leaves all of it out
        if self._first and self._unsaid is not None:
            logs.update(self._unsaid.as_metrics())
            self._unsaid = None
        self._mark = time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """A short training has its figures now."""
        self._meter.finish()

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """An evaluation is no training."""
        self._leave_out()

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Nor is a checkpoint."""
        self._leave_out()

    def _leave_out(self) -> None:
        now = time.perf_counter()
        if self._mark is not None:
            self._meter.leave_out(now - self._mark)
        self._mark = now

    def _counts_as_the_plan(self, args: Any) -> bool:
        """Whether the Trainer's count is the plan's: of the same field, and padding counts in both or in none."""
        counted, sizes = self._meter.plan.workload.counted, self._meter.plan.workload.batch_sizes
        if counted is None or counted.fields != ("input_ids",):
            return False
        padded = sizes is None or sizes.items.mean < sizes.positions.mean
        how = str(args.include_num_input_tokens_seen)
        return how == "non_padding" or (how == "all" and not padded)

    def _keep(self, figures: Figures) -> None:
        self._unsaid = figures
        if not self._first:
            give(figures, log_to_wandb, "the active run of W&B")
