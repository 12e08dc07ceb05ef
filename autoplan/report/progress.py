"""The display of a running search: one live line on a terminal, a plain line per event elsewhere; all on stderr."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from autoplan.planner.records.trials import LeftOutFamily, Outcome, Prediction, Trial
from autoplan.planner.search.options import BudgetState, SearchObserver
from autoplan.probes.profile import HardwareProfile
from autoplan.report import facts, pieces
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.spec import WorkloadSpec
from autoplan.text import printable
from autoplan.units import format_bytes, format_clock, format_number, format_seconds

if TYPE_CHECKING:
    from autoplan.planner.search.next_work import Work

PHASES = {
    "probe": "measuring this machine",
    "inspect": "reading the model",
    "trace": "tracing the model's operations",
    "space": "listing the legal configurations",
    "loader": "measuring the loader beside the step",
    "plan": "writing the plan",
}


AFTER_WORK = ("loader", "plan")
"""Phases that are no part of a piece of work."""


def describe_phase(name: str, detail: str) -> str:
    """`reading the model: looking at gpt2`; a detail that names the phase already stays as it is."""
    phase = PHASES.get(name, name)
    if detail.startswith(phase):
        return detail
    return f"{phase}: {detail}" if detail else phase


SILENCE_S = 60.0  # between two lines of a log on a trial that takes long
DETAIL_S = 10.0  # between two lines on the parts of a phase that has many


class PlainProgress(SearchObserver):
    """One line per event, no bars: for logs, pipes and NO_COLOR."""

    def __init__(self, console: Console, unit: str = "tokens") -> None:
        self.console = console
        self.unit = unit
        self.baseline: Trial | None = None
        self.own: TrainingConfig | None = None
        self.work: Work | None = None
        self._trial = ""
        self._phase = ""
        self._started = self._said = time.monotonic()

    def say(self, text: str) -> None:
        """Prints one line."""
        self.put(Text(printable(text)))

    def put(self, text: Text) -> None:
        """Writes a text and ends the line; nothing is wrapped."""
        self.console.print(text, soft_wrap=True)

    def on_phase(self, name: str, detail: str = "") -> None:
        now = time.monotonic()
        if self.work is not None and name not in AFTER_WORK:
            return  # `on_work` has said it
        if name == "probe" and name == self._phase and now - self._said < DETAIL_S:
            return
        self._phase, self._said = name, now
        self.say(describe_phase(name, detail))

    def on_note(self, text: str) -> None:
        self.say(f"note: {text}")

    def on_hardware(self, hardware: HardwareProfile, memory_limit_bytes: int) -> None:
        names = ", ".join(device.name for device in hardware.devices)
        self.say(f"hardware: {names}; a trial may take {format_bytes(memory_limit_bytes)}")

    def on_workload(self, spec: WorkloadSpec) -> None:
        self.unit, self.own = spec.unit, spec.own_setting
        if spec.kind == "function":  # what it decides itself could not be said before it was called
            self.say(f"workload: {facts.workload_line(spec)}")
        for topic, text in facts.workload_notes(spec):
            self.say(f"{topic}: {text}")

    def on_space(self, candidates: int, left_out: tuple[LeftOutFamily, ...]) -> None:
        if self.work is not None:
            return
        ruled_out = sum(family.configurations for family in left_out)
        self.say(f"space: {candidates:,} configurations to choose from, {ruled_out:,} ruled out before any trial")

    def on_budget(self, budget: BudgetState) -> None:
        self.say(f"budget: {format_clock(budget.left_s)} left")

    def on_work(self, work: Work, best: Trial | None, budget: BudgetState) -> None:
        self.work = work
        so_far = pieces.best_words(best, self.baseline, self.unit, self.own, budget.gain)
        self.say(f"{format_clock(budget.left_s)} left, {so_far}; next: {pieces.work_words(work, self.own)}")

    def on_trial_started(
        self, number: int, purpose: str, config: TrainingConfig, prediction: Prediction | None, budget: BudgetState
    ) -> None:
        self._trial = f"trial {number}"
        self._started = self._said = time.monotonic()

    def on_progress(self, phase: str, facts: dict[str, Any], budget: BudgetState) -> None:
        now = time.monotonic()
        if self._trial and now - self._said >= SILENCE_S:
            self._said = now
            self.say(f"{self._trial}: {phase}, {format_clock(now - self._started)} so far")

    def on_trial_finished(self, trial: Trial, best: Trial | None, budget: BudgetState) -> None:
        self._trial = ""
        self.remember_baseline(trial)
        self.say(f"trial {trial.number} ({trial.purpose}) {trial.config.describe()}: {self.ending(trial, best)}")

    def remember_baseline(self, trial: Trial) -> None:
        """Keeps the baseline, which the best so far is compared with."""
        if trial.purpose == "baseline" and trial.outcome is Outcome.OK:
            self.baseline = trial

    def ending(self, trial: Trial, best: Trial | None) -> str:
        """How a trial ended, in a line."""
        if trial.outcome is Outcome.OK and trial.tokens_per_s is not None:
            text = f"{format_number(trial.tokens_per_s.median)} {self.unit}/s"
            text += f", {format_bytes(trial.peak_memory_bytes)} at the peak"
        else:
            text = f"{trial.outcome.value}: {trial.reason or 'in ' + trial.phase}"
        if best is not None and best.number == trial.number:
            text += ", the best so far"
        return text + (" (from the record)" if trial.resumed else f", took {format_seconds(trial.seconds_spent)}")


class LiveProgress(PlainProgress):
    """Live lines under the finished trials: the budget as a bar, what runs and why, the best so far."""

    def __init__(self, console: Console, unit: str = "tokens") -> None:
        super().__init__(console, unit)
        self.doing = "starting"
        self.running = ""
        self.budget: BudgetState | None = None
        self.best: Trial | None = None
        self._seen = time.monotonic()
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveProgress:
        self._live.__enter__()
        return self

    def __exit__(self, *ending: Any) -> None:
        self._live.__exit__(*ending)

    def put(self, text: Text) -> None:
        """Writes a text above the live lines, wrapped between words.

        The lock is that of rich's refreshing thread: rich finds out where to write before it takes it, and a refresh
        in between would leave live lines standing or overwrite the text.
        """
        with self._live._lock:
            self.console.print(text)

    def render(self) -> Group:
        """The live part."""
        left = self.budget.left_s - (time.monotonic() - self._seen) if self.budget else None
        lines: list[Table | Text] = []
        if self.budget is not None and left is not None:
            bar = ProgressBar(total=max(self.budget.budget_s, 1e-9), completed=self.budget.budget_s - left, width=24)
            head = Table.grid(padding=(0, 1))
            head.add_row(bar, Text(f"{format_clock(left)} left", style="bold"))
            lines.append(head)
        lines.append(Text(self.doing))
        if self.running:
            lines.append(Text(self.running, style="dim"))
        if self.best is not None:
            gain = None if self.budget is None else self.budget.gain
            text = pieces.best_words(self.best, self.baseline, self.unit, self.own, gain)
            lines.append(Text(f"{text}: {self.best.config.describe()}", style="green"))
        return Group(*lines)

    def remember(self, budget: BudgetState) -> None:
        """Keeps the state of the budget, and when it was that."""
        self.budget, self._seen = budget, time.monotonic()

    def on_phase(self, name: str, detail: str = "") -> None:
        if self.work is None or name in AFTER_WORK:
            self.doing, self.running = describe_phase(name, detail), ""
        elif name != "baseline":
            self.running = detail

    def on_budget(self, budget: BudgetState) -> None:
        self.remember(budget)
        self.doing = "starting the process that trials are forked from: it imports torch and the model's library"

    def on_work(self, work: Work, best: Trial | None, budget: BudgetState) -> None:
        self.remember(budget)
        self.work, self.best = work, best
        self.doing, self.running = pieces.work_words(work, self.own), ""

    def on_trial_started(
        self, number: int, purpose: str, config: TrainingConfig, prediction: Prediction | None, budget: BudgetState
    ) -> None:
        self.remember(budget)
        detail = f"{self.running}, " if purpose == "claim" and self.running else ""
        expected = f", predicted {format_seconds(prediction.step_time_s)} a step" if prediction else ""
        said = self.work is not None and self.work.config == config  # the line of the work names it
        self.running = f"{detail}trial {number}{'' if said else f': {config.describe()}'}{expected}"

    def on_progress(self, phase: str, facts: dict[str, Any], budget: BudgetState) -> None:
        self.remember(budget)
        head = self.running.split(" [", 1)[0]
        if head:
            self.running = f"{head} [{phase}]"

    def on_trial_finished(self, trial: Trial, best: Trial | None, budget: BudgetState) -> None:
        self.remember(budget)
        self.running = ""
        self.best = best
        self.remember_baseline(trial)
        good = trial.outcome is Outcome.OK
        self.put(
            Text.assemble(
                (f"{trial.number:3d} ", "dim"),
                (
                    printable(self.ending(trial, best)),
                    "green" if best is not None and best.number == trial.number else "",
                ),
                "  ",
                (trial.config.describe(), "dim" if good else "yellow"),
            )
        )
