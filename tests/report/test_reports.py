"""What people look at: units, tables, progress on a terminal and off it, the page of HTML."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import sys
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest
from rich.console import Console

from autoplan.errors import UsageError
from autoplan.planner.export.run import load_target
from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.plan import Choice, HandSetting, broken_rules
from autoplan.planner.records.trials import Claim, Interval, LeftOutFamily, Outcome, Trial
from autoplan.planner.search.next_work import Work
from autoplan.planner.search.options import BudgetState
from autoplan.report import facts, pieces, terminal
from autoplan.report.estimate import describe_option, training_lines
from autoplan.report.html import render_page
from autoplan.report.progress import LiveProgress, PlainProgress
from autoplan.report.screen import is_plain, make_console
from autoplan.report.svg import draw_best_so_far, draw_tradeoff
from autoplan.strategies.config import TrainingConfig
from autoplan.units import (
    format_bytes,
    format_clock,
    format_number,
    format_seconds,
    parse_duration_s,
    parse_memory_bytes,
)
from tests.recorded import make_ledger, make_plain_plan, make_plan, make_trial


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("10m", 600), ("1h", 3600), ("1h30m", 5400), (45, 45), (2.5, 2.5), ("1.5m", 90)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "ten", "10", "1h30", "10x", "-5s", "0", "10m foo", "nan", float("inf"), "1h-3m"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(UsageError, match="budget is"):
        parse_duration_s(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 8 * 2**30), ("8GB", 8 * 10**9), ("512MiB", 2**29), (1024, 1024), ("80%", 0.8), ("1.5g", 15 * 10**8)],
)
def test_sizes(text: str, size: float) -> None:
    assert parse_memory_bytes(text) == size


@pytest.mark.parametrize("text", ["", "big", "8", "8 parsecs", "0", "-1GiB", "0%", "101%", "x%"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="memory_limit is"):
        parse_memory_bytes(text)


def test_figures_in_words() -> None:
    assert format_bytes(3 * 2**30) == "3.00 GiB" and format_bytes(None) == "unknown" and format_bytes(12) == "12 B"
    assert [format_seconds(s) for s in (5e-6, 0.0123, 4.567, 200, 7500)] == [
        "5.00 µs",
        "12.3 ms",
        "4.57 s",
        "3 min 20 s",
        "2 h 05 min",
    ]
    assert [format_clock(s) for s in (-1, 65, 3729)] == ["0:00", "1:05", "1:02:09"]
    assert [format_number(n) for n in (12345.6, 87.54, 1.234, 0.01234, 0)] == ["12,346", "87.5", "1.23", "0.0123", "0"]


def test_the_table_keeps_the_global_batch_in_view() -> None:
    rows = dict(row[:2] for row in facts.configuration(make_plan()).rows)
    assert rows["accumulation"] == "4" and rows["precision"] == "bf16"
    names = [row[0] for row in facts.configuration(make_plan()).rows]
    assert len(names) == len(set(names))


def test_mfu_of_the_baseline_stands_on_the_same_peak() -> None:
    plan = make_plan()
    share = facts.baseline_mfu(plan)
    assert share == pytest.approx(0.31 * 2.5 / 8.0)


def shown(width: int | None = None) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=width is not None, width=width, no_color=True)
    terminal.show_plan(console, make_plan())
    terminal.show_trials(console, make_plan().evidence, "tokens")
    return stream.getvalue()


def test_off_a_terminal_every_row_is_one_plain_line() -> None:
    text = shown()
    assert "\x1b" not in text and "─" not in text
    assert any(line.split()[:2] == ["precision", "bf16"] and "3.9 times" in line for line in text.splitlines())


def test_on_a_narrow_terminal_nothing_is_cut() -> None:
    text = re.sub(r"\x1b\[\d+m", "", shown(60))
    assert max(len(line) for line in text.splitlines()) <= 60
    assert "…" not in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_no_color_and_pipes_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert is_plain(io.StringIO()) and not is_plain(Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    assert is_plain(Terminal())
    stream = Terminal()
    make_console(stream).print("[bold]word[/bold]")
    assert stream.getvalue() == "word\n"


class Tee:
    """What a program puts in the place of a stream: the two functions that print calls."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_a_stream_that_does_not_say_what_it_is_is_plain() -> None:
    make_console(tee := Tee()).print("x")
    assert tee.text == "x\n"
    (closed := io.StringIO()).close()
    assert is_plain(closed)


def test_in_a_notebook_the_stream_that_was_given_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = type("ZMQInteractiveShell", (), {})
    monkeypatch.setattr("builtins.get_ipython", shell, raising=False)
    stream = io.StringIO()
    make_console(stream).print("x")
    assert stream.getvalue() == "x\n"


def drive(progress: PlainProgress) -> None:
    """The events of a short search."""
    plan = make_plan()
    budget = BudgetState(budget_s=600, spent_s=60, trials_done=1, max_trials=None)
    fast, lost = plan.evidence[1], make_trial(2, TrainingConfig(micro_batch=16), None, outcome=Outcome.CRASHED)
    lost = lost.model_copy(update={"reason": "SIGSEGV in build"})
    progress.on_budget(budget)
    progress.on_phase("probe")
    progress.on_hardware(plan.hardware, 8 * 2**30)
    progress.on_space(120, (LeftOutFamily(family="f", limit="l", by="b", configurations=30),))
    plain = Work(kind="baseline", config=plan.baseline.config, cost_s=47.0, why="all others are compared with it")
    progress.on_work(plain, None, budget)
    progress.on_phase("baseline", "the plain fp32 run")
    progress.on_trial_started(0, "baseline", plan.baseline.config, plan.prediction, budget)
    progress.on_progress("warmup", {}, budget)
    progress.on_trial_finished(plan.baseline, plan.baseline, budget)
    why = "it has the largest expected gain for its cost"
    progress.on_work(
        Work(kind="look", config=fast.config, gain=0.04, cost_s=23.0, why=why, over="the rest"), plan.baseline, budget
    )
    progress.on_trial_started(1, "search", fast.config, None, budget)
    progress.on_trial_finished(fast, fast, budget)
    progress.on_work(Work(kind="look", gain=1.0, cost_s=23.0, why="--sampler tpe draws it"), fast, budget)
    progress.on_trial_started(2, "search", lost.config, None, budget)
    progress.on_trial_finished(lost, fast, budget)
    progress.on_note("[not markup]")
    progress.on_work(Work(kind="claim", config=fast.config, cost_s=47.0, why="it rests on its own runs"), fast, budget)
    progress.on_phase("claim", "round 2 of 4")
    progress.on_trial_started(3, "claim", fast.config, None, budget)


def test_a_log_has_one_line_for_each_piece_of_work_and_one_for_each_trial() -> None:
    stream = io.StringIO()
    drive(PlainProgress(make_console(stream)))
    fast = make_plan().config.describe()
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().splitlines() == [
        "budget: 9:00 left",
        "measuring this machine",
        "hardware: Test CPU <3 GHz>; a trial may take 8.00 GiB",
        "space: 120 configurations to choose from, 30 ruled out before any trial",
        "9:00 left, nothing measured yet; next: the plain run, micro_batch=2 (about 47.0 s), because all others are "
        "compared with it",
        "trial 0 (baseline) micro_batch=2: 128 tokens/s, 3.00 GiB at the peak, the best so far, took 12.0 s",
        f"9:00 left, best so far 128 tokens/s, the plain run; next: a look at {fast} (expected gain 4.1 %, about "
        "23.0 s), rather than the rest",
        f"trial 1 (search) {fast}: 410 tokens/s, 3.00 GiB at the peak, the best so far, took 12.0 s",
        "9:00 left, best so far 410 tokens/s, 3.20 times the plain run; next: a look at what the sampler draws (about "
        "23.0 s), because --sampler tpe draws it",
        "trial 2 (search) micro_batch=16: crashed: SIGSEGV in build, took 12.0 s",
        "note: [not markup]",
        f"9:00 left, best so far 410 tokens/s, 3.20 times the plain run; next: the claim of {fast} (about 47.0 s), "
        "because it rests on its own runs",
    ]


def test_the_best_so_far_names_what_stands_for_the_plain_run() -> None:
    def ran(speed: int, **knobs: object) -> Trial:
        return make_trial(0, TrainingConfig.model_validate({"micro_batch": 1} | knobs), 1.0, tokens=speed)

    rung = ran(100, checkpointing="full")
    assert pieces.best_words(ran(150, loss="fused"), rung, "tokens") == (
        "best so far 150 tokens/s, 1.50 times the run with checkpointing=full"
    )
    assert pieces.best_words(rung, rung, "tokens") == "best so far 100 tokens/s, the run with checkpointing=full"
    assert pieces.best_words(ran(200, loss="fused"), ran(100), "tokens").endswith("2.00 times the plain run")
    assert pieces.best_words(ran(200, loss="fused"), ran(100), "tokens", gain=1.7).endswith("1.70 times the plain run")


def on_screen(live: LiveProgress, width: int = 200) -> str:
    screen = Console(file=io.StringIO(), width=width)
    screen.print(live.render())
    return screen.file.getvalue()  # type: ignore[attr-defined]


def test_progress_on_a_terminal() -> None:
    stream = Terminal()
    with LiveProgress(Console(file=stream, force_terminal=True, width=100)) as live:
        budget = BudgetState(budget_s=600, spent_s=60, trials_done=0, max_trials=None)
        live.on_budget(budget)
        live.on_phase("inspect", "looking at gpt2")
        text = on_screen(live)
        assert ":00 left" in text or ":59 left" in text, "before the first trial too"
        assert "reading the model: looking at gpt2" in text
        drive(live)
        text = on_screen(live)
    assert "best so far 410 tokens/s, 3.20 times the plain run: micro_batch=4" in text
    assert "the claim of micro_batch=4" in text and "because it rests on its own runs" in text
    assert "round 2 of 4, trial 3\n" in text
    assert "SIGSEGV" in stream.getvalue()


@pytest.mark.parametrize("columns", [80, 120])
def test_no_word_of_the_live_lines_is_cut(columns: int) -> None:
    live = LiveProgress(Console(file=io.StringIO(), width=columns))
    drive(live)
    text = on_screen(live, columns)
    assert max(map(len, text.splitlines())) <= columns and "…" not in text
    assert " ".join(text.split()).endswith(f"3.20 times the plain run: {make_plan().config.describe()}")


def screen_of(text: str) -> list[str]:
    """The lines of a terminal after a text with the movements of the cursor that rich makes."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", text):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part[0] not in "\x1b\r":
            lines[row] = part
    return [line.rstrip() for line in lines if line.strip()]


@pytest.fixture
def quick_turns() -> Iterator[None]:
    """Threads take turns as often as they can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("quick_turns")
def test_lines_stay_whole_while_the_live_lines_are_refreshed() -> None:
    stream, ended = Terminal(), threading.Event()
    console = Console(file=stream, force_terminal=True, width=80, no_color=True, color_system=None)
    with LiveProgress(console) as live:

        def refresh() -> None:
            while not ended.is_set():
                live._live.refresh()

        thread = threading.Thread(target=refresh)
        thread.start()
        for number in range(300):
            live.doing = "\n".join(["live"] * (1 + number % 4))
            live.say(f"line {number}")
        ended.set()
        thread.join()
    assert screen_of(stream.getvalue()) == [f"line {number}" for number in range(300)]


class Page(HTMLParser):
    """Collects the tags, and what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.scripts = 0
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in ("link", "img", "iframe"):
            self.loads.append(tag)
        self.scripts += tag == "script"
        self.loads += [name for name, _ in attributes if name in ("src", "href") or name.startswith("on")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_stands_alone_and_says_all() -> None:
    page = Page()
    page.feed(render_page(make_plan()))
    assert not page.open and not page.loads
    for words in ("3.20 x", "Every trial", "Ruled out, never tried", "matmuls measured 3.9 times", "Test CPU <3 GHz>"):
        assert words in page.text, words
    assert page.scripts == 1, "the one that sorts"


def plan_of(kind: str, taken_from: str, config: TrainingConfig | None = None) -> Plan:
    """A plan of a workload that was made of this."""
    plan = make_plan(config)
    return plan.model_copy(
        update={"workload": plan.workload.model_copy(update={"kind": kind, "taken_from": taken_from})}
    )


@pytest.mark.parametrize(
    ("kind", "taken_from", "call", "target"),
    [
        ("object", "Trainer", "plan.apply_to(trainer)", "transformers"),
        ("function", "SFTTrainer", "plan.apply_to(trainer)", "transformers"),
        ("object", "training loop", "plan.apply_to(model, optimizer, loader, loss)", "accelerate"),
        ("object", "LightningModule", "plan.apply_to(module, datamodule)", "lightning"),
        ("object", "step function", "plan.apply_to(make_step)", None),
        ("object", "", "plan.prepare(model, optimizer, loss)", None),
        ("function", "", "plan.prepare()", "pytorch"),
        ("model", "", "plan.prepare()", "pytorch"),
    ],
)
def test_the_next_step_is_possible_and_the_page_says_the_same(
    kind: str, taken_from: str, call: str, target: str | None
) -> None:
    plan = plan_of(kind, taken_from)
    words, page = facts.next_step(plan, "my plan.json").words, Page()
    page.feed(render_page(plan, path="my plan.json"))
    for text in (words, page.text):
        assert call in text and re.findall(r"--to (\w+)", text) == ([] if target is None else [target])
        assert text.count("autoplan export 'my plan.json' --to") == text.count("autoplan export")
        assert not taken_from or "plan.prepare(" not in text
    assert 'load_plan("my plan.json")' in page.text
    if target not in (None, "pytorch"):
        load_target(target).render(plan, "plan")  # raises nothing


def test_no_export_is_offered_that_may_refuse_the_plan() -> None:
    shards, stages = TrainingConfig(micro_batch=4, dp_shard=2), TrainingConfig(micro_batch=4, pp=2, pp_microbatches=2)
    for plan in (plan_of("object", "Trainer", shards), plan_of("object", "training loop", shards), make_plan(stages)):
        step = facts.next_step(plan, "plan.json")
        assert step.code and not step.export and "export" not in step.words + render_page(plan)


def test_a_plan_without_a_gain_has_nothing_to_apply() -> None:
    page = Page()
    page.feed(render_page(make_plain_plan()))
    assert "Nothing to apply: the plan is the plain run." in page.text and "autoplan export" not in page.text


def test_what_costs_little_is_no_zero() -> None:
    option = {"num_gpus": 8, "chip": "H100", "hours": 0.0085, "hours_low": 0.008, "hours_high": 0.009}
    option |= {"gpu_hours": 0.068, "cost": 0.17, "cost_low": 0.16, "cost_high": 0.18}
    assert describe_option(option, "USD").endswith(", 0.17 USD (0.16 to 0.18)")
    assert describe_option(option, None).endswith(", 0.068 GPU hours")


@pytest.mark.parametrize(("days", "words"), [(1 / 24, "1 h 00 min (1 h 00 min"), (24, "24.0 days (24.0")])
def test_a_short_training_takes_no_zero_days(days: float, words: str) -> None:
    training = {"tokens": 1e9, "steps": 10, "gpu_hours": 8.0, "days": days, "days_low": days, "days_high": days}
    said = "\n".join(training_lines({"model": {}, "training": training, "rent": None}))
    assert words in said and said.endswith("8.00 GPU hours")


def test_a_page_of_many_trials_is_small_and_names_each_once() -> None:
    trials = tuple(make_trial(n, TrainingConfig(micro_batch=1 + n % 2), 2.0 + n % 7) for n in range(600))
    text = render_page(make_plan(evidence=trials))
    assert len(text) < 1_000_000
    labels = re.findall(r'<tr><td data-h="#" data-v="[\d.]+">(\d+)</td>', text)
    assert len(labels) == len(set(labels)) == 600
    drawing = draw_tradeoff(make_plan(evidence=(*make_plan().evidence, *trials[4:])))
    names = re.findall(r'text-anchor="\w+">([^<]*)</text>', drawing)
    assert len(names) == len(set(names)) == drawing.count("<circle") and {"0 plain", "1 plan"} < set(names)


def test_no_script_of_a_hostile_plan_runs() -> None:
    text = render_page(make_plan(choices=(Choice(knob="x", value="y", reason="</script><script>alert(1)</script>"),)))
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)
    allowed = re.search(r"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-(.+?)'\"", text)
    assert script and allowed and text.count("<script") == 1
    assert base64.b64decode(allowed[1]) == hashlib.sha256(script[1].encode()).digest()


def test_values_of_one_knob_that_one_limit_rules_out_are_one_row() -> None:
    families = [
        LeftOutFamily(family=family, limit=limit, by="", configurations=4)
        for family, limit in (
            ("attention=eager", "not of transformers"),
            ("attention=sdpa", "not of transformers"),
            ("attention=sdpa_flash", "CPU"),
            ("kernels=liger", "not of transformers"),
            ("micro_batch=4 precision=bf16", "not of transformers"),
            ("micro_batch=4 precision=fp16", "not of transformers"),
        )
    ]
    rows = [(row[0], row[3]) for row in facts.left_out_rows(families).rows]
    assert rows == [
        ("attention=eager, sdpa", "8"),
        ("attention=sdpa_flash", "4"),
        ("kernels=liger", "4"),
        ("micro_batch=4 precision=bf16", "4"),
        ("micro_batch=4 precision=fp16", "4"),
    ]


def test_the_drawings_are_well_formed() -> None:
    plan = make_plan()
    trials = (*plan.evidence, make_trial(4, TrainingConfig(micro_batch=1), 9.0))
    plan = make_plan(evidence=trials)
    curve = ElementTree.fromstring(draw_best_so_far(plan))
    assert len(curve.findall("circle")) == 4 and len(curve.findall("path")) == 2
    dots = ElementTree.fromstring(draw_tradeoff(plan))
    assert len(dots.findall("circle")) == 4
    assert draw_best_so_far(make_plan(evidence=())) == "" and draw_tradeoff(make_plan(evidence=())) == ""


def test_a_long_list_of_what_was_ruled_out_is_cut_and_says_so() -> None:
    families = [LeftOutFamily(family=f"f{n}", limit="l", by="b", configurations=n) for n in range(1, 31)]
    stream = io.StringIO()
    terminal.show_left_out(Console(file=stream), families)
    text = stream.getvalue()
    assert "f30" in text and "f1 " not in text and "20 more families, 210 configurations" in text


def test_a_long_trial_says_so_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    from autoplan.report import progress as module

    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    progress = PlainProgress(make_console(stream))
    budget = BudgetState(budget_s=600, spent_s=60, trials_done=1, max_trials=None)
    progress.on_trial_started(3, "search", TrainingConfig(micro_batch=1), None, budget)
    for now[0] in (30.0, 61.0, 62.0, 130.0):
        progress.on_progress("measure", {}, budget)
    assert [line for line in stream.getvalue().splitlines() if "so far" in line] == [
        "trial 3: measure, 1:01 so far",
        "trial 3: measure, 2:10 so far",
    ]


def test_the_baseline_shown_is_the_one_the_speedup_stands_on() -> None:
    plan = make_plan()
    (lost,) = plan.alternatives
    again = lost.model_copy(update={"config": plan.baseline.config})
    table = {row[0]: row[1] for row in facts.comparison(make_plan(alternatives=(again,))).rows}
    assert table["step time"].startswith("7.50 s")
    assert {row[0]: row[1] for row in facts.comparison(plan).rows}["step time"].startswith("8.00 s")


CLAIMED = Claim(claimed=True, rounds=3, spread=0.012, spread_repeats=4)


def plan_text(plan: Plan, **given: str) -> str:
    """What a wide screen shows of a plan."""
    stream = io.StringIO()
    terminal.show_plan(Console(file=stream, width=300), plan, **given)
    return stream.getvalue()


def first_line(plan: Plan) -> str:
    return plan_text(plan).splitlines()[0]


def test_the_first_line_says_what_is_claimed_and_what_is_not() -> None:
    plan = make_plan()
    parts = plan.measurement.model_copy(update={"method": "parts"})
    plan = plan.model_copy(update={"claim": CLAIMED, "measurement": parts})
    line = facts.headline(plan)
    assert line.startswith("3.20 times (3.10 to 3.30) the speed of the plain baseline; step times")
    assert "nothing is claimed against it" in line and "put together from parts" in line
    assert "3 rounds side by side, runs differ by 1.2 % (measured over 4 repeats)" in line
    assert first_line(plan) == f"speed-up: {line}"
    why = "disturbed: not a claim (other work took 48% of the CPU time while it was measured)"
    loud = plan.model_copy(update={"claim": CLAIMED.model_copy(update={"claimed": False, "why_not": why})})
    assert f"the plain baseline - {why}" in facts.headline(loud)
    earlier = plan.model_copy(update={"claim": None, "hand": None})
    assert facts.headline(earlier).startswith("3.20 times (3.10 to 3.30) the speed of the plain baseline; step times")


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (1.6, 1.9, "; at least 1.60 times the hand setting (micro_batch=8 precision=bf16)"),
        (0.9, 1.3, "; not told apart from the hand setting (micro_batch=8 precision=bf16)"),
        (0.5, 0.8, "; at most 0.8 times the hand setting (micro_batch=8 precision=bf16), which fails parity"),
    ],
)
def test_a_hand_setting_is_compared_by_the_bound_of_its_look(low: float, high: float, words: str) -> None:
    config = TrainingConfig(micro_batch=8, precision="bf16")
    bound = Interval(median=(low + high) / 2, low=low, high=high, samples=1)
    looked = Claim(claimed=low > 1, rounds=0, chosen_from=9, spread=0.012, spread_repeats=4)
    plan = make_plan(claim=CLAIMED, failed_parity=(config,) if high < 1 else ())
    hand = HandSetting(config=config, measurement=plan.measurement, speedup=bound, claim=looked)
    line = facts.headline(plan.model_copy(update={"hand": hand}))
    assert words in line and not broken_rules(plan.model_copy(update={"hand": hand}))
    assert "hand setting" in render_page(plan.model_copy(update={"hand": hand}))
    loud = looked.model_copy(update={"why_not": "disturbed: not a claim (others computed while it was measured)"})
    line = facts.headline(plan.model_copy(update={"hand": hand.model_copy(update={"claim": loud})}))
    assert f"nothing is claimed against the hand setting ({config.describe()}): not a claim (others computed" in line
    same = hand.model_copy(update={"config": plan.config})
    assert "it is the hand setting" in facts.headline(plan.model_copy(update={"hand": same}))
    plain = hand.model_copy(update={"config": plan.baseline.config})
    assert "; the baseline is the hand setting too" in facts.headline(plan.model_copy(update={"hand": plain}))


def test_a_plan_without_a_gain_says_so_first() -> None:
    plan = make_plain_plan()
    assert not broken_rules(plan)
    assert first_line(plan).startswith("no gain found in 8 m: the plan is the plain run; go on with: the same search")
    text = plan_text(plan, more="autoplan search --model gpt2 --budget 20m")
    assert text.splitlines()[0].endswith("; go on with: autoplan search --model gpt2 --budget 20m")
    assert "parity: the plan is the plain run, with which a parity check compares: nothing was checked\n" in text
    assert "not told apart from precision=bf16 (trial 1), side by side: the plan is simpler" in text
    assert plan.claim is not None
    why = "nothing faster was found; disturbed: others may be faster (other work took 48% of the CPU time)"
    loud = plan.model_copy(update={"claim": plan.claim.model_copy(update={"why_not": why})})
    assert "the plain run; disturbed: others may be faster (other work took 48% of the CPU time); go" in first_line(
        loud
    )
    done = make_plain_plan(evidence=make_plan().evidence)  # no rounds, and nothing left that could win
    assert not facts.may_go_on(done) and facts.may_go_on(plan)
    assert first_line(done).endswith("; nothing is left that a longer search would try")
    page = Page()
    page.feed(render_page(plan))
    assert "no gain found in 8 m: the plan is the plain run." in page.text and "1.00 x" not in page.text
    assert "nothing was checked." in page.text and "time: setup 15 s" in page.text


def test_no_screen_calls_the_users_setting_the_plain_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Its knobs are said once on a screen: in the first line."""
    plan = make_plan()
    own = plan.baseline.config
    claim = Claim(claimed=True, rounds=2, spread=0.02, spread_repeats=0, chosen_from=3)
    spec = plan.workload.model_copy(update={"own_setting": own})
    plan = plan.model_copy(update={"workload": spec, "claim": claim, "ledger": make_ledger(plan.config, own)})
    text = facts.headline(plan)
    assert f"the speed of your setting ({own.describe()})" in text and "hand setting" not in text
    assert f" times (3.10 to 3.30) your setting ({own.describe()})" in facts.headline_clause(plan)
    plan.show()
    shown = capsys.readouterr().out
    assert "baseline (yours)" in shown and shown.count("your setting (") == 1 and "plain run" not in shown
    page = re.sub(r"<style>.*?</style>", "", render_page(plan), flags=re.DOTALL)
    words = " ".join(re.findall(r">([^<]*)<", page))
    assert "over your setting" in words and "blue: yours" in words and "plain" not in words
    alone = plan.model_copy(update={"config": own, "accumulation": 8})
    assert facts.next_step(alone, "plan.json").words == "nothing to apply: the plan is your setting"
    stand_in = spec.model_copy(update={"own_setting": TrainingConfig(micro_batch=16, precision="bf16")})
    lost = plan.model_copy(update={"workload": stand_in})
    assert "the plain baseline (your setting does not run here)" in facts.headline(lost)
    assert "the hand setting was not looked at" in facts.headline(lost)
    assert (
        "plan.prepare" in facts.next_step(lost.model_copy(update={"config": own, "accumulation": 8}), "plan.json").words
    )


def test_a_plain_plan_is_applied_to_a_training_whose_setting_is_not_known() -> None:
    """It may have bf16, or several GPUs: the plain run is another training."""
    plan = make_plan()
    plain = plan.model_copy(update={"config": plan.baseline.config, "accumulation": 8})
    of = {name: plain.workload.model_copy(update={"taken_from": name}) for name in ("", "step function", "Trainer")}
    words = {
        name: facts.next_step(plain.model_copy(update={"workload": spec}), "plan.json").words
        for name, spec in of.items()
    }
    assert words[""] == words["step function"] == "nothing to apply: the plan is the plain run"
    assert "plan.apply_to(trainer)" in words["Trainer"]


def test_the_end_screen_has_one_line_of_the_ledger() -> None:
    plan = make_plan()
    ledger = make_ledger(plan.config, plan.baseline.config)
    words = "setup 15 s, plain run 47 s, 9 looks 235 s, parity 50 s, claim 4 rounds 142 s"
    assert pieces.time_words(ledger) == words
    assert pieces.time_words(()) is None, "a plan of an earlier version"
    assert pieces.time_words(ledger[1:]) == words, "what was spent before the first piece"
    brief = "9 looks 235 s, claim 4 rounds 142 s, parity 50 s, other 62 s"
    for show, said in ((terminal.show_plan, words), (terminal.show_summary, brief)):
        stream = io.StringIO()
        show(make_console(stream), plan.model_copy(update={"ledger": ledger}))
        assert f"time: {said}" in stream.getvalue().replace("\n      ", " ")


def test_no_setting_is_cut_on_a_narrow_terminal():
    """At 80 columns `optimizer_step=foreach` was printed as `optimizer_step=for` and `each`."""
    words = "micro_batch=1 precision=bf16 checkpointing=selective optimizer_step=foreach allocator=keep"
    rows = facts.Rows(
        ("#", "for", "configuration", "tokens/s", "peak memory", "took", "outcome"),
        [("0", "reference", words, "93.1 (87.9 to 94.9)", "6.33 GiB", "48.7 s", "ok")],
    )
    for columns in (80, 300):
        stream = io.StringIO()
        terminal.show_table(Console(file=stream, force_terminal=True, width=columns, no_color=True), rows, title="All")
        text = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
        assert all(word in text.split() for word in (*words.split(), "reference", "ok"))
        assert max(map(len, text.splitlines())) <= columns


def test_a_plan_shows_itself_in_a_line_on_a_screen_and_in_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(choices=(Choice(knob="precision", value="bf16", reason="<script>alert(1)</script>"),))
    assert len(repr(plan)) < 300 and "3.20 times (3.10 to 3.30) the plain run" in repr(plan) == str(plan)
    page = Page()
    page.feed(plan._repr_html_())
    assert not page.open and not page.loads and "alert(1)" in page.text
    plan.show(trials=True)
    assert "Ruled out, never tried" in (shown := capsys.readouterr().out) and "Trials:" in shown
    offered = [name for name in dir(plan) if not name.startswith("_")]
    assert {"show", "prepare", "apply_to", "speedup"} < set(offered) and not {"model_dump", "parse_obj"} & set(offered)
