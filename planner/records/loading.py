"""The findings of a search about the loader of a training: records that go into the plan."""

from __future__ import annotations

from pydantic import Field

from autoplan.record import Record
from autoplan.strategies.workloads.loading.settings import LoaderSetting
from autoplan.units import format_number, format_seconds


class LoaderTrial(Record):
    """One setting of the loader, measured beside the plan's step."""

    setting: LoaderSetting
    samples_per_s: float | None = Field(description="over all ranks; None: it failed")
    waiting_share: float | None = Field(default=None, description="share of the time in which the step waits for data")
    first_batch_s: float | None = Field(default=None, description="until the first batch, with starting the workers")
    steps: int = Field(default=0, description="timed, or groups of micro-steps where a step is long")
    problem: str | None = Field(default=None, description="why it failed, with the index of the sample")


class Loading(Record):
    """The loader's setting, and what it was chosen from."""

    source: str = Field(description="the dataset's type, or file.py:function")
    identity: str = Field(description="a hash of the dataset")
    setting: LoaderSetting | None = Field(description="None: nothing could be measured; `problem` says why")
    waiting_share: float | None = Field(default=None, description="of the setting")
    samples_per_s: float | None = Field(default=None, description="with the setting, over all ranks")
    own_samples_per_s: float | None = Field(
        default=None, description="the step alone, with its batch at hand and no worker beside it"
    )
    batches: str = Field(default="dataset", description="what the step ran on: the dataset's batches, or make_batch's")
    tried: tuple[LoaderTrial, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str | None = None
    seconds_spent: float = 0.0

    def describe(self) -> str:
        """The setting and what it costs, in a sentence."""
        if self.setting is None:
            return f"{self.source}: not measured: {self.problem}"
        waits = "" if self.waiting_share is None else f"; the step waits for data {self.waiting_share:.1%} of the time"
        return f"{self.setting.describe()} for {self.source}{waits}"

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Each setting as cells: setting, samples/s, waiting, first batch, steps."""
        return [
            (
                trial.setting.describe() + (" (chosen)" if trial.setting == self.setting else ""),
                "failed" if trial.samples_per_s is None else format_number(trial.samples_per_s),
                "" if trial.waiting_share is None else f"{trial.waiting_share:.1%}",
                "" if trial.first_batch_s is None else format_seconds(trial.first_batch_s),
                trial.problem or f"{trial.steps} timed",
            )
            for trial in self.tried
        ]
