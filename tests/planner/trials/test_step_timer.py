"""The steps of a trial, in this process: which are run, and that the parts of a step take as long as a whole step."""

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from autoplan.planner.records.trials import RECOMPILED
from autoplan.planner.trials import load as load_module
from autoplan.planner.trials import request, step_timer
from autoplan.planner.trials.load import LoadMonitor
from autoplan.planner.trials.measure import ToBeat, step_terms, sum_interval
from autoplan.planner.trials.ranks import RankSync
from autoplan.planner.trials.request import PART_MICRO_STEPS, TrialRequest
from autoplan.planner.trials.slices import _MAY, COUNT, Slices
from autoplan.planner.trials.step_timer import BehindError, StepTimer
from autoplan.planner.trials.worker import _warnings
from autoplan.probes.nvml import open_nvml
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.prepare import prepare
from autoplan.strategies.workloads.sources import load_workload, make_spec
from tests.probes.fake_nvml import FakeGpu, FakeNvml

WORKLOADS = Path(__file__).parents[1] / "data" / "faulty.py"


class Silent:
    """Drops what a rank reports to its planner."""

    def phase(self, name: str) -> None: ...

    def heartbeat(self, **facts: float) -> None: ...


class ScriptedLoad(LoadMonitor):
    """Says of each stretch what the test says, instead of what this machine does just now."""

    def __init__(self, *problems: str | None, stretch_s: float = 0.0) -> None:
        super().__init__(device=torch.device("cpu"), root_pid=os.getpid())
        self.problems = list(problems)
        self.stretch_s = stretch_s

    @property
    def is_long_enough(self) -> bool:
        return self.seconds >= self.stretch_s

    def end(self) -> str | None:
        super().end()
        return self.problems.pop(0) if self.problems else None


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_timer(
    function: str,
    micro_batch: int,
    *problems: str | None,
    precision: Any = "fp32",
    compiled: Any = "off",
    load: LoadMonitor | None = None,
    **asked: Any,
) -> StepTimer:
    spec = make_spec(model=f"{WORKLOADS}:{function}")
    config = TrainingConfig(micro_batch=micro_batch, threads=1, precision=precision, compile=compiled)
    silent: Any = Silent()
    return StepTimer(
        context=silent,
        request=TrialRequest(spec=spec, config=config, device="cpu", **asked),
        run=prepare(load_workload(spec), config),
        ranks=RankSync(1, torch.device("cpu")),
        load=load or ScriptedLoad(*problems),
    )


def slow_micro_steps(timer: StepTimer, seconds: float, update_s: float = 0.0) -> list[int]:
    """Has each micro-step, and each update, take so much longer; the list counts micro-steps by optimizer step."""
    real, real_end, counts = timer.run.micro_step, timer.run.optimizer_step, [0]

    def slow(*arguments: Any, **options: Any) -> Any:
        counts[-1] += 1
        time.sleep(seconds)
        return real(*arguments, **options)

    def end(*arguments: Any) -> Any:
        counts.append(0)
        time.sleep(update_s)
        return real_end(*arguments)

    timer.run.micro_step = slow  # type: ignore[method-assign]
    timer.run.optimizer_step = end  # type: ignore[method-assign]
    return counts


def slow_where(timer: StepTimer, is_slow: Callable[[int], bool], seconds: float) -> list[int]:
    """Has some calls of a micro-step take longer, by their number from 1 on; the list counts them."""
    real, seen = timer.run.micro_step, [0]

    def micro_step(*arguments: Any, **options: Any) -> Any:
        seen[0] += 1
        if is_slow(seen[0]):
            time.sleep(seconds)
        return real(*arguments, **options)

    timer.run.micro_step = micro_step  # type: ignore[method-assign]
    return seen


@pytest.fixture
def expensive(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets from how many seconds on a micro-step is expensive, and very expensive; then parts are timed."""

    def set_limits(first_s: float, very_s: float) -> None:
        for module in (request, step_timer):
            monkeypatch.setattr(module, "EXPENSIVE_S", first_s, raising=False)
            monkeypatch.setattr(module, "VERY_EXPENSIVE_S", very_s, raising=False)
        monkeypatch.setattr(step_timer, "WHOLE_STEP_S", 0.0)

    return set_limits


@pytest.mark.parametrize(
    ("micro_batch", "very", "counted", "samples"),
    [
        (32, True, [1, 2, 0], 2),
        (32, False, [2, 2, 0], 3),
        (384, True, [1, 1, 0], 1),  # the one micro-step of a step is a sample from the second step on
    ],
)
def test_an_expensive_look_runs_only_the_micro_steps_that_show_that_it_fits(
    expensive: Callable[..., None], micro_batch: int, very: bool, counted: list[int], samples: int
):
    """Real steps of a real run; each is made to last 0.2 s. Two optimizer steps, gradients accumulated beside state."""
    expensive(0.05, 0.1 if very else 3.0)
    timer = make_timer("make_sound", micro_batch)
    counts = slow_micro_steps(timer, 0.2)
    timer.short_steps()
    assert timer.choose_method() == "parts"
    interval = timer.measure_parts()
    assert counts == counted
    assert interval.samples == samples
    assert interval.median > timer.run.accumulation * 0.2
    assert interval.low < interval.median < interval.high
    assert set(timer.kept_samples()) == set(timer.parts) > {"optimizer_step"}


def test_a_look_ends_where_only_the_first_micro_step_was_very_expensive(expensive: Callable[..., None]):
    """Then the short steps have fewer samples than are wanted of the others; more of them are of the same part."""
    expensive(0.1, 0.35)
    timer = make_timer("make_sound", 32)
    counts = slow_micro_steps(timer, 0.2)
    slow_where(timer, lambda number: number == 1, 0.3)
    timer.short_steps()
    assert counts == [1, 2, 0] and timer.choose_method() == "parts"
    assert timer.measure_parts().samples == 4 and counts == [1, 2, 2, 0]


@pytest.mark.parametrize("micro_batch", [32, 384])
def test_a_further_run_shows_its_time_and_not_that_it_fits(expensive: Callable[..., None], micro_batch: int):
    """One micro-step that warms up, and one that counts."""
    expensive(0.1, 0.3)
    timer = make_timer("make_sound", micro_batch, again=True)
    counts = slow_micro_steps(timer, 0.5)
    timer.short_steps()
    assert timer.choose_method() == "parts"
    interval = timer.measure_parts()
    assert counts == [1, 1, 0] and interval.samples == 1
    assert interval.median > timer.run.accumulation * 0.5
    assert interval.low < interval.median < interval.high
    assert timer.batches.items_per_step(timer.ranks) > 0, "tokens/s of the run"


def test_the_compilation_is_no_part_of_what_counts(expensive: Callable[..., None], monkeypatch: pytest.MonkeyPatch):
    """Else torch.compile "compiled again while it was measured", and each run of a claim would be disturbed."""
    expensive(0.1, 0.3)
    monkeypatch.setattr(load_module, "cpu_problem", lambda *times, **how: None)  # of other tests
    load = LoadMonitor(device=torch.device("cpu"), root_pid=os.getpid())
    timer = make_timer("make_linear", 32, compiled="model", load=load, again=True)
    counts = slow_micro_steps(timer, 0.5)
    timer.short_steps()
    timer.choose_method()
    assert timer.measure_parts().samples == 1 and counts == [1, 1, 0]
    assert "compiled" not in str(timer.disturbed)
    assert timer.batches.items_per_step(timer.ranks) > 0, "tokens/s of the run"


def test_a_compilation_does_not_make_the_other_micro_steps_expensive(expensive: Callable[..., None]):
    """The first micro-step compiles: the second step has as many as it would without, and whole steps are timed."""
    timer = make_timer("make_sound", 32)
    compiled = timer.request.config.model_copy(update={"compile": "model"})
    timer.request = timer.request.model_copy(update={"config": compiled})  # the run itself is not compiled
    expensive(0.2, 0.3)
    counts = slow_micro_steps(timer, 0.0)
    slow_where(timer, lambda number: number == 1, 0.5)
    timer.short_steps()
    assert counts == [1, 3, 0] and max(timer._micro_steps_s()) < 0.2


def test_steps_that_become_expensive_are_measured_in_slices_too(
    expensive: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The first micro-step was cheap, so that the short steps did not wait for the other runs of the round."""
    expensive(0.2, 10.0)
    monkeypatch.setattr(step_timer, "SLICED_S", 0.1)
    timer = make_timer("make_linear", 384)
    slow_where(timer, lambda number: number > 1, 0.25)
    timer.slices = mine = Slices(tmp_path / "slices", 0, 1)
    mine._shared[_MAY, 0] = COUNT  # nobody else is there to wait for
    timer.short_steps()
    assert timer.choose_method() == "parts" and not mine.counts
    timer.measure_parts()
    assert mine.counts


@pytest.mark.timing
def test_a_look_at_short_steps_takes_little_more_than_its_warm_up_and_two_stretches():
    """By the samples' own clock: a loaded machine makes single steps longer, not the rule."""
    timer = make_timer("make_sound", 128)
    timer.short_steps()
    assert timer.choose_method() == "whole_steps"
    began = timer._began
    timer.warm_up()
    assert time.monotonic() - began >= request.WARM_UP_S
    began = time.monotonic()
    interval = timer.measure_whole_steps()
    assert request.MEASURING_S <= time.monotonic() - began < request.MEASURING_S + 2.0
    assert interval.samples >= request.FEWEST_SAMPLES
    assert len(timer.kept_samples()["step"]) == min(interval.samples, step_timer.MOST_KEPT)


def measured(timer: StepTimer) -> Any:
    """The interval of a look, after its short steps."""
    if timer.choose_method() == "parts":
        return timer.measure_parts()
    timer.warm_up()
    return timer.measure_whole_steps()


def leader(step_s: float) -> ToBeat:
    return ToBeat(log_s=math.log(step_s), sd=0.03, level=0.01)


@pytest.mark.parametrize("method", ["whole_steps", "parts"])
def test_what_is_behind_the_leader_is_dropped_with_a_lower_bound_of_its_time(method: Any):
    timer = make_timer("make_sound", 128, method=method, to_beat=leader(1e-5))
    timer.short_steps()
    with pytest.raises(BehindError) as dropped:
        measured(timer)
    assert 1e-5 < dropped.value.at_least_s < dropped.value.interval.median
    assert dropped.value.interval.samples >= request.FEWEST_SAMPLES


def test_an_expensive_look_ends_before_its_second_step_if_its_micro_steps_alone_are_too_slow(
    expensive: Callable[..., None],
):
    """The first micro-step never counts; the second is slow, so no other is run."""
    expensive(0.05, 10.0)
    timer = make_timer("make_sound", 32, to_beat=leader(0.05))
    counts = slow_micro_steps(timer, 0.25)
    with pytest.raises(BehindError) as dropped:
        timer.short_steps()
    assert counts == [2, 0]
    assert timer.batches.items_per_step(timer.ranks) > 0, "though only the first samples were used"
    assert 0.05 < dropped.value.at_least_s < timer.run.accumulation * 0.25 < dropped.value.interval.high


def test_a_disturbed_look_is_not_dropped(expensive: Callable[..., None]):
    expensive(0.05, 2.0)
    timer = make_timer("make_sound", 32, *[OTHERS] * 10_000, to_beat=leader(0.05))
    slow_micro_steps(timer, 0.2)
    timer.short_steps()
    assert timer.parts


def test_what_records_cuda_graphs_counts_from_the_third_micro_step_on(expensive: Callable[..., None]):
    """With accumulation 1 the second short step records the graph: it is no sample (the run here has no graphs)."""
    expensive(0.1, 0.3)
    timer = make_timer("make_sound", 384)
    graphs = timer.request.config.model_copy(update={"compile": "model", "compile_mode": "reduce-overhead"})
    timer.request = timer.request.model_copy(update={"config": graphs})
    seen = slow_where(timer, lambda number: number < 3, 1.0)
    timer.short_steps()
    interval = measured(timer)
    assert seen[0] >= 4
    assert interval.high < 1.0


@pytest.mark.timing
def test_a_step_by_parts_takes_as_long_as_a_whole_step(monkeypatch: pytest.MonkeyPatch):
    """By CPU time on one thread, in turn in one process: other processes on the machine do not count in it.

    Within 20 %: seen here are 2 %, and 15 to 40 % when the second micro-step is not a part of its own.
    """
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    timer = make_timer("make_wide", 32)
    batches = [timer.batches.next(timer.run.local_batch) for _ in range(2)]
    whole: list[float] = []
    timed: dict[str, list[float]] = {}
    for number in range(10):
        began = time.process_time()
        timer.run.step(batches[number % 2])
        whole.append(time.process_time() - began)
        for part, seconds in timer.short_step(PART_MICRO_STEPS).items():
            timed.setdefault(part, []).extend(seconds)
    parts = sum_interval(step_terms(timed, timer.run.accumulation)).median
    assert parts == pytest.approx(median(whole[2:]), rel=0.2)


OTHERS = "other work took 48% of the CPU time"


@pytest.mark.parametrize(
    ("method", "problem", "kind"),
    [
        ("whole_steps", OTHERS, "other work"),
        ("parts", OTHERS, "other work"),
        ("parts", RECOMPILED, RECOMPILED),
    ],
)
def test_a_disturbed_stretch_is_measured_again(method: Any, problem: str, kind: str):
    """The first stretch of the window is slow and disturbed: its samples do not count, in whole steps and in parts."""
    timer = make_timer("make_sound", 128, problem, method=method)
    load: Any = timer.load
    slow_where(timer, lambda number: bool(load.problems), 0.05)
    timer.short_steps()
    interval = measured(timer)
    assert timer.disturbed is None
    assert load.discarded == {kind: 1}
    assert interval.high < 0.05, "no sample of the disturbed stretch counts"
    window = load.window(timer.disturbed)
    assert window is not None and window.disturbed is None and window.discarded


@pytest.mark.timing
@pytest.mark.parametrize("method", ["whole_steps", "parts"])
def test_what_stays_disturbed_is_said_and_ends(method: Any):
    """Each stretch is disturbed: measuring takes twice as long at most, and the trial says that it was disturbed."""
    timer = make_timer("make_sound", 128, *[OTHERS] * 10_000, method=method)
    began = time.monotonic()
    timer.short_steps()
    interval = measured(timer)
    assert timer.disturbed == OTHERS
    assert interval.median > 0
    assert time.monotonic() - began < request.WARM_UP_S + 2 * request.MEASURING_S + 1.5


def test_skipped_fp16_steps_do_not_count_and_do_not_end_the_trial():
    """A loss scale that overflows at first, as on any new run: the steps that are skipped are run again."""
    for method in ("whole_steps", "parts"):
        timer = make_timer("make_sound", 128, precision="fp16", method=method)
        assert timer.run.scaler is not None
        timer.run.scaler._init_scale = 2.0**40
        timer.run.scaler._scale = None
        timer.short_steps()
        assert timer.skipped > 0
        before = timer.skipped
        if method == "whole_steps":
            timer.run.scaler._scale.fill_(2.0**40)  # type: ignore[union-attr]
        assert math.isfinite(measured(timer).median)
        assert method == "parts" or timer.skipped > before


def test_the_gpu_is_asked_while_its_kernels_run():
    """A driver that tells of a busy card until the work is waited for, and of an idle one after that."""
    timer, card = make_timer("make_sound", 128), FakeGpu()
    gpu = timer.load.gpu
    gpu._gpu.nvml, _ = open_nvml(FakeNvml([card]))
    gpu._gpu.handle = card

    def wait() -> None:
        card.events = 0x0

    def launch() -> str:
        card.events = 0x4
        return "launched"

    timer._synchronize = wait  # type: ignore[method-assign]
    timer.load.begin()
    result, _ = timer._time(launch)
    timer.load.end()
    assert result == "launched" and gpu.events == {"software power cap"} and len(gpu.clocks_hz) == 1


def test_cuda_graphs_that_torch_skipped_are_in_the_warnings():
    from torch._dynamo.utils import counters
    from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter

    timer = make_timer("make_sound", 128)
    config = TrainingConfig(micro_batch=128, compile="model", compile_mode="reduce-overhead")
    request = timer.request.model_copy(update={"config": config})
    before = counters["inductor"]["cudagraph_skips"]
    assert before or not any("CUDA graphs" in text for text in _warnings(timer, request))
    log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to a mutated input")
    assert any(f"skipped CUDA graphs {before + 1} time(s)" in text for text in _warnings(timer, request))
