"""The command line: what each command prints where, and how each end becomes an exit code."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autoplan.cli import app, output
from autoplan.cli.search import PANELS
from autoplan.errors import PlanError
from autoplan.planner.plan.plan import Plan
from autoplan.planner.search.plan_maker import UNCHECKED
from autoplan.strategies.config import TrainingConfig
from tests.recorded import make_ledger, make_plain_plan, make_plan

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cli(cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs a command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return cli


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    return make_plan().save(tmp_path / "plan.json")


COMMANDS = tuple(app.COMMANDS)


def test_help_says_each_command_in_one_line_and_the_exit_codes(cli) -> None:
    ended = cli("--help")
    assert ended.code == 0 and "130 interrupted" in ended.out
    lines = ended.out.splitlines()
    said = {command: next(line for line in lines if line.startswith(f"  {command} ")) for command in COMMANDS}
    assert not [line for line in said.values() if line.endswith("...")]


@pytest.mark.parametrize("columns", [80, 120])
def test_the_help_of_search_fits_the_terminal_and_names_every_option(columns: int) -> None:
    from autoplan.planner.search.options import SearchOptions

    code = (
        "import sys; sys.argv = ['autoplan', 'search', '--help-all']\n"
        "from autoplan.cli import app\n"
        "app.is_plain = lambda stream: False\n"
        "app.run()"
    )
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "dumb", "NO_COLOR": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= columns and "…" not in done.stdout, done.stderr
    for name in SearchOptions.flags():
        assert any(f"--{name.replace('_', '-')} " in line for line in lines), name
    panels = [next(n for n, line in enumerate(lines) if f"─ {panel} ─" in line) for panel in PANELS]
    assert panels == sorted(panels), "the everyday ones first"


def test_the_help_of_search_shows_a_dozen_options_and_all_on_demand(cli) -> None:
    def options(text: str) -> list[str]:
        return re.findall(r"^  (--[a-z-]+)[ ,]", text, re.MULTILINE)

    few, every = options(cli("search", "--help").out), options(cli("search", "--help-all").out)
    assert len(few) == 13 and "--help-all" in few and {"--model", "--budget", "--fix", "--out"} < set(few)
    assert set(few) < set(every) and {"--objective", "--sampler", "--store", "--quiet"} < set(every)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_with_words_for_types_and_json(cli, command: str) -> None:
    ended = cli(command, "--help")
    assert ended.code == 0 and not re.findall(r"<[a-z]|range\b.*x>|\bNone\b", ended.out)
    assert "--json" in ended.out or command == "schema"


def test_help_is_quick_and_loads_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['autoplan', '--help']\n"
        "from autoplan.cli.app import run\n"
        "run()\n"
        "print(sorted({'torch', 'optuna', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_version(cli) -> None:
    assert cli("--version").out.startswith("autoplan 0.")


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        (("gpt2", "--global-batch", "2.5"), "usage", "--global-batch takes"),
        (("gpt3",), "workload", "Did you mean gpt2"),
    ],
    ids=["typer's", "ours"],
)
def test_with_json_an_error_is_a_document_too(cli, given: tuple[str, ...], code: str, words: str) -> None:
    ended = cli("search", "--model", *given, "--json")
    assert ended.code == 2 and ended.document["schema_version"] == 1 and ended.document["status"] == "error"
    error = ended.document["error"]
    assert error["code"] == code and words in f"{error['message']} {error['hint']}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serch",), "Did you mean 'search'"),
        (("search", "--modle", "gpt2"), "Did you mean --model?"),
        (("search", "--model", "gpt2", "--batch-size", "8"), "Give --global-batch"),
        (("search", "--model", "gpt2", "--budget", "10"), "has no unit"),
        (("search", "--model", "gpt2", "--memory-limit", "8"), "has no unit"),
        (("search", "--model", "meta-llama/Llama-2-7b"), "nothing is downloaded"),
        (("search", "--model", "nofile.py"), "there is no file nofile.py here"),
        (("search", "--model", "nofile.py:f"), "nofile.py\n  Give file.py:function with a file that exists"),
        (("search", "--model", "x.ipynb:f"), "x.ipynb is a notebook"),
        (("search", "--model", "gpt2", "--fix", "precision", "bf16"), "In one word: precision=bf16"),
        (("search", "--model", "gpt2", "--bound", "micro_batch=1-8"), "--bound micro_batch=1..8"),
        (("search", "--model", "gpt2", "--out", "nowhere/plan.json"), "there is no folder nowhere"),
        (("search", "--model", "gpt2", "--quiet", "--verbose"), "Give one of them"),
        (("estimate", "--model", "llama2-7b", "--cluster", "8xA100", "--top", "0"), "--top is 0"),
        (("search",), "no workload was named"),
        (("search", "--model", "gpt3"), "Did you mean gpt2"),
        (("search", "--model", "gpt2", "--global-batch", "0"), "at least 1"),
        (("search", "--model", "gpt2", "--global-batch", "2.5"), "--global-batch takes a whole number"),
        (("search", "--model", "gpt2", "--seq-len", "4096"), "1024 positions"),
        (("search", "--model", "gpt2", "--fix", "precison=bf16"), "Did you mean precision"),
        (("search", "--model", "gpt2", "--fix", "precision=int3"), "fp32, tf32"),
        (("search", "--model", "gpt2", "--fix", "precision"), "knob=value"),
        (("search", "--model", "gpt2", "--fix", "tp=1", "--fix", "tp=2"), "given twice"),
        (("search", "--model", "gpt2", "--nproc", "0"), "--nproc is 0"),
        (("search", "--model", "gpt2", "--bound", "micro_batch=8..1"), "the low end is above the high end"),
        (("show", "nowhere.json"), "cannot be read"),
        (("explain", "--knob", "x", "nowhere.json"), "cannot be read"),
        (("run", "--steps", "0"), "at least 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_bad_input_ends_with_2_and_says_what_to_do(cli, arguments: tuple[str, ...], words: str) -> None:
    ended = cli(*arguments)
    assert ended.code == 2 and words in ended.err and ended.out == "" and "\n  " in ended.err, ended.err
    assert ended.err.startswith("error: ") or "\nerror: " in ended.err
    assert "Traceback" not in ended.err and not re.search(r"\b(?:max_trials|memory_limit) is", ended.err)


def test_a_settings_file_gives_options_and_the_command_line_goes_first(cli, plan_file, tmp_path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.autoplan.explain]\nknob = "precision"\n')
    ended = cli("explain", plan_file)
    assert "note: pyproject.toml gives knob=precision" in ended.err and "checkpointing=" not in ended.out
    (tmp_path / "autoplan.toml").write_text('[explain]\nknob = "nothing"\n[search]\nfix = {precision = "int3"}')
    assert "precision" in cli("explain", plan_file, "--knob", "precision").out
    assert cli("explain", plan_file).code == 2
    assert "precision='int3' is not a value" in cli("search", "--model", "gpt2").err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[serch]\nbudget = '9m'", "Did you mean [search]?"),
        ("budget = '9m'", "no table of a command"),
        ("[search]\nbugdet = '9m'", "Did you mean budget?"),
        ("[search]\nhelp = true", "on the command line alone"),
        ("[verify]\nmodel = 'theirs.py:f'", "on the command line alone"),
        ("[run]\nunverified-ok = true", "on the command line alone"),
        ("[clean]\nyes = true", "on the command line alone"),
        ("[search", "cannot be read"),
    ],
)
def test_a_settings_file_with_an_unknown_key_is_refused(cli, tmp_path, text: str, words: str) -> None:
    (tmp_path / "autoplan.toml").write_text(text)
    called = text.strip("[").partition("]")[0].partition(" ")[0]
    ended = cli(called if called in COMMANDS else "show")
    assert ended.code == 2 and words in ended.err and "autoplan.toml" in ended.err


def test_no_name_of_an_option_lets_a_settings_file_say_yes(cli, tmp_path: Path) -> None:
    make_study(tmp_path / "store", "found")
    for key in ("y", "yes", '"-y"', '"--yes"', "Yes"):
        (tmp_path / "autoplan.toml").write_text(f"[clean]\n{key} = true")
        ended = cli("clean", "--store", "store")
        assert ended.code == 2 and "autoplan.toml has" in ended.err and Path("store/found").exists(), key
    for command in ("ls", "estimate"):
        for key in ("json", "json_output", "as_json"):
            (tmp_path / "autoplan.toml").write_text(f"[{command}]\n{key} = true")
            assert cli(command).code == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tool]\nautoplan = 3", "3 for tool.autoplan, which is no table"),
        ("[tool.autoplan]\nls = 1", "below [tool.autoplan.ls]"),
        ("[tool.autoplan.lss]", "Did you mean [tool.autoplan.ls]?"),
        ("tool = 3", ""),
        ("[tool.other]", ""),
    ],
)
def test_what_is_no_table_in_a_settings_file_is_said(cli, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    ended = cli("ls")
    assert ended.code == (2 if words else 0) and words in ended.err


def test_a_settings_file_is_read_for_the_command_that_is_called(cli, tmp_path: Path) -> None:
    (tmp_path / "autoplan.toml").write_text("search = 1\n[show]\nbugdet = 1")
    assert cli("ls").code == 0
    ended = cli("search")
    assert ended.code == 2 and "1 for search" in ended.err and "Did you mean" not in ended.err


RIVAL = "[search]\nmodel = 'gpt2'\nnodes = '2x8'\nlauncher = 'slurm'\nout = 'nowhere/plan.json'"


@pytest.mark.parametrize(
    ("text", "given", "words"),
    [
        ("[search]\ntrainer = 't.py:f'", ("search", "--model", "gpt3"), "Did you mean gpt2"),
        ("[search]\nmodel = 'gpt2'", ("search", "--trainer=t.py:f"), "Give file.py:function with a file that exists"),
        ("[search]\nquiet = true", ("search", "--verbose", "--model", "gpt3"), "Did you mean gpt2"),
        ("[ls]\nstorage = 'postgresql://nowhere/x'", ("ls", "--store", "store"), "0 search(es)"),
        (RIVAL, ("search", "--launcher", "local"), "there is no folder nowhere"),
    ],
)
def test_the_command_line_goes_first_where_options_exclude_each_other(
    cli, tmp_path: Path, text: str, given: tuple[str, ...], words: str
) -> None:
    (tmp_path / "autoplan.toml").write_text(text)
    assert words in (err := cli(*given).err), err


def test_a_settings_file_bounds_a_knob_by_a_list(cli, tmp_path: Path) -> None:
    (tmp_path / "autoplan.toml").write_text("[search]\nbound = {precision = ['fp32', 'int3']}")
    assert "precision='int3' is not a value" in (err := cli("search", "--model", "gpt2").err), err


@pytest.mark.parametrize("value", ["'precision=int3'", "['precision=int3']", "{precision = 'int3'}"])
def test_a_settings_file_gives_a_repeated_option(cli, tmp_path: Path, value: str) -> None:
    (tmp_path / "autoplan.toml").write_text(f"[search]\nfix = {value}")
    assert "precision='int3' is not a value" in cli("search", "--model", "gpt2").err


@pytest.mark.parametrize("value", ["'micro_batch=2,precision=int3'", "{micro_batch = 2, precision = 'int3'}"])
def test_a_settings_file_gives_several_knobs_in_one_text(cli, tmp_path: Path, value: str) -> None:
    (tmp_path / "autoplan.toml").write_text(f"[search]\nbaseline = {value}")
    assert "precision='int3' is not a value" in cli("search", "--model", "gpt2").err


def test_a_shell_completes_commands_options_and_values(tmp_path: Path) -> None:
    def complete(words: str) -> str:
        place = str(len(words.split(" ")) - 1)
        asked = {"_AUTOPLAN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": place}
        return subprocess.run(
            [sys.executable, "-m", "autoplan"], cwd=ROOT, env=os.environ | asked, capture_output=True, text=True
        ).stdout

    assert "search" in complete("autoplan se") and "--budget" in complete("autoplan search --bud")
    assert complete("autoplan search --objective ").split() == ["throughput", "memory", "cost"]
    assert "gpt2-medium" in complete("autoplan search --model gpt2-")


@pytest.mark.parametrize("columns", [80, 120])
def test_no_word_of_the_knobs_is_broken(cli, columns: int, monkeypatch) -> None:
    console = Console(width=columns, force_terminal=True, no_color=True)
    monkeypatch.setattr(output, "console", lambda *, stderr=True: console)
    assert (words := set(cli("knobs").out.split())) >= {"scaled_dot_product_attention,", "max-autotune-no-cudagraphs,"}
    assert {"reshard_after_forward", "bf16_stochastic"} < words


def test_knobs(cli) -> None:
    assert "precision" in (text := cli("knobs").out) and "fp32, tf32, bf16" in text
    assert {row["knob"] for row in cli("knobs", "--json").document["knobs"]} > {"compile", "tp"}


def test_an_error_is_wrapped_between_words_on_a_terminal(cli, monkeypatch) -> None:
    monkeypatch.setattr(output, "is_plain", lambda stream: False)
    monkeypatch.setenv("COLUMNS", "80")
    lines = cli("search", "--model", "gpt3").err.splitlines()
    assert len(lines) > 3 and max(map(len, lines)) < 80 and all(line.startswith("  ") for line in lines[1:])
    assert "qwen2.5-0.5b," in " ".join(lines).split()


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="there is a CUDA device")
def test_cuda_without_a_device_ends_with_4(cli) -> None:
    ended = cli("search", "--model", "gpt2", "--device", "cuda")
    assert ended.code == 4 and "cpu" in ended.err


def test_a_bug_of_ours_ends_with_1_and_says_where_the_traceback_is(cli, plan_file, monkeypatch, tmp_path) -> None:
    import platformdirs

    monkeypatch.setattr(platformdirs, "user_log_path", lambda *a, **k: tmp_path)
    monkeypatch.setattr(Plan, "load", lambda path: 1 / 0)
    ended = cli("show", plan_file)
    (written,) = tmp_path.glob("traceback-*.txt")
    assert ended.code == 1 and "bug in autoplan" in ended.err and str(written) in ended.err
    assert "ZeroDivisionError" in written.read_text()


def test_interrupting_ends_with_130(cli, plan_file, monkeypatch) -> None:
    def interrupt(path: object) -> Plan:
        raise KeyboardInterrupt

    monkeypatch.setattr(Plan, "load", interrupt)
    assert cli("show", plan_file).code == 130


def test_show(cli, plan_file) -> None:
    ended = cli("show", plan_file, "--trials")
    for words in ("410 (401 to 418)", "3.20 (3.10 to 3.30)", "31.0 %", "checkpointing", "4 x 4 = 16", "3.1 GiB over"):
        assert words in ended.out, words
    assert "other hardware" in ended.err and "\x1b" not in ended.out + ended.err
    assert "out_of_memory" in ended.out


def test_a_plan_without_a_gain_is_shown_explained_and_reported(cli, tmp_path) -> None:
    plan = make_plain_plan()
    path = plan.save(tmp_path / "plain.json")
    assert Plan.load(path) == plan
    ended = cli("show", path, "--trials")
    assert ended.out.startswith("no gain found in 8 m: the plan is the plain run; go on with: the same search with a")
    assert "time: setup 15 s, plain run 47 s" in ended.out
    document = cli("show", path, "--json").document
    assert [line["kind"] for line in document["plan"]["ledger"]][:3] == ["setup", "baseline", "look"]
    assert "not told apart from precision=bf16" in cli("explain", path).out
    (knob,) = cli("explain", path, "--knob", "precision", "--json").document["knobs"]
    rates = {tried["value"]: round(tried["best_tokens_per_s"]) for tried in knob["tried"]}
    assert rates == {"bf16": 130, "fp32": 137}, "as the rounds measured it, not as the look that chose it"
    assert cli("report", path, "--out", "plain.html").code == 0
    assert "no gain found" in (tmp_path / "plain.html").read_text()


def test_the_end_of_a_search_without_a_gain_names_the_command_that_goes_on(monkeypatch, capsys) -> None:
    from autoplan.cli.search import search_document, show_result
    from autoplan.planner.search.options import SearchResult

    plan = make_plain_plan()
    result = SearchResult(status="plan_found", plan=plan, plan_path="plan.json", budget_s=600.0, ledger=plan.ledger)
    given = ["--trainer", "my train.py:make", "--budget", "10m", "--max-trials=9", "--fresh", "--seed", "1"]
    monkeypatch.setattr(sys, "argv", ["autoplan", "search", *given, "--", "--budget", "3"])
    show_result(result, Path("plan.json"))
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0] == (
        "no gain found in 8 m: the plan is the plain run; go on with: autoplan search --trainer 'my train.py:make' "
        "--seed 1 --budget 20m -- --budget 3"
    )
    assert "next: nothing to apply: the plan is the plain run" in printed.err
    limited = ["--max-device-hours", "0.1", *given]
    monkeypatch.setattr(sys, "argv", ["autoplan", "search", *limited])
    show_result(result.model_copy(update={"budget_s": 360.0, "device_hours": 0.1}), Path("plan.json"))
    assert (
        capsys.readouterr()
        .out.splitlines()[0]
        .endswith("go on with: autoplan search --trainer 'my train.py:make' --seed 1 --max-device-hours 0.2")
    )
    ledger = search_document(result)["ledger"]
    times = {"began_s": 15.0, "seconds": 47.0, "predicted_s": 20.0}
    assert ledger[1] | {"config": None} == {
        "kind": "baseline", "config": None, "gain": 0.04, "why": "", "over": "", "devices": 1, "part": None,
        "with_claim": False, **times
    }  # fmt: skip


def test_the_end_of_a_search_is_a_dozen_lines_and_show_has_the_rest(cli, plan_file, capfd) -> None:
    from autoplan.cli.search import show_result
    from autoplan.planner.search.options import SearchResult

    plan = make_plan()
    plan = plan.model_copy(update={"ledger": make_ledger(plan.config, plan.baseline.config)})
    show_result(SearchResult(status="plan_found", plan=plan, plan_path="my plan.json"), Path("plan.json"))
    printed = capfd.readouterr()
    lines = [*printed.out.splitlines(), *printed.err.strip().splitlines()]
    assert len([part for line in lines for part in textwrap.wrap(line, 80)]) <= 12, lines
    assert lines[0].startswith("speed-up: ") and "(3.10 to 3.30) the plain run" in lines[0]
    assert "\ntime: 9 looks 235 s, claim 4 rounds 142 s, parity 50 s, other 62 s\n" in printed.out
    assert "changed: " in printed.out and "precision=bf16 (fp32)" in printed.out and "\nparity: passed" in printed.out
    assert "plan: 'my plan.json'; autoplan show 'my plan.json' has the reasons" in printed.err
    assert "next: autoplan export 'my plan.json' --to pytorch" in printed.err
    assert "Ruled out" not in printed.out and "Ruled out" in cli("show", plan_file).out
    show_result(SearchResult(status="plan_found", plan=plan), Path("plan.json"), whole=True)
    assert "Ruled out" in capfd.readouterr().out, "with --verbose"


def test_show_json_holds_the_plan(cli, plan_file) -> None:
    document = cli("show", plan_file, "--json").document
    assert Plan.model_validate(document["plan"]) == make_plan() and document["schema_version"] == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[: len(text) // 2], "not JSON"),
        (lambda text: text.replace('"schema_version": 1,', '"schema_version": 99,', 1), "Update autoplan"),
        (lambda text: text.replace('"accumulation"', '"acumulation"', 1), "not a plan"),
        (lambda text: "[]", "not a plan"),
    ],
    ids=["truncated", "newer", "misspelt", "no plan"],
)
def test_plan_files_that_cannot_be_read(cli, plan_file, change, words: str) -> None:
    plan_file.write_text(change(plan_file.read_text()))
    ended = cli("show", plan_file)
    assert ended.code == 2 and words in ended.err


def test_explain(cli, plan_file) -> None:
    told = cli("explain", plan_file)
    assert "matmuls measured 3.9 times" in told.out and "Trials that did not run" in told.out
    document = cli("explain", plan_file, "--knob", "precision", "--json").document
    (knob,) = document["knobs"]
    assert knob["value"] == "bf16" and {tried["value"] for tried in knob["tried"]} == {"bf16", "fp32"}


def test_export_prints_the_files(cli, plan_file, tmp_path) -> None:
    ended = cli("export", plan_file, "--to", "yaml", "--out", "short.yaml")
    assert (ended.code, ended.out) == (0, "short.yaml\n") and (tmp_path / "short.yaml").exists()
    document = cli("export", plan_file, "--to", "json", "--json").document
    assert document["files"] == ["plan-json.json"]
    assert cli("export", plan_file, "--to", "toml").code == 2


def test_an_export_that_cannot_carry_the_plan_ends_with_6(cli, tmp_path) -> None:
    path = make_plan(TrainingConfig(micro_batch=2, pp=2, pp_microbatches=2)).save(tmp_path / "pp.json")
    assert cli("export", path, "--to", "pytorch").code == 6


def test_report(cli, plan_file, tmp_path) -> None:
    ended = cli("report", plan_file, "--out", "page.html")
    assert ended.out == "page.html\n" and "<svg" in (tmp_path / "page.html").read_text()


def test_schema_is_the_plans(cli) -> None:
    schema = cli("schema").document
    assert schema["$schema"].endswith("2020-12/schema")
    assert set(schema["properties"]) == set(Plan.model_fields)


WHY = "the search was interrupted before it had verified a plan"


@pytest.fixture
def unverified_file(tmp_path: Path) -> Path:
    return make_plan(parity=UNCHECKED, unverified=WHY).save(tmp_path / "plan.unverified.json")


@pytest.mark.parametrize("verb", ["export", "run", "verify"])
def test_a_command_refuses_an_unverified_plan_without_the_flag(
    cli, unverified_file: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autoplan.planner.export import run
    from autoplan.planner.plan import prepare
    from autoplan.planner.verify import measure

    ended = cli(verb, unverified_file)
    assert ended.code == 2 and f"error: the plan is unverified: {WHY}" in ended.err and "--unverified-ok" in ended.err

    def past_the_question(plan: Plan, **_: object) -> None:
        raise PlanError(f"asked, and the answer was {plan.unverified_ok}")

    for module in (prepare, run, measure):
        monkeypatch.setattr(module, "check_before_use", past_the_question)
    ended = cli(verb, unverified_file, "--unverified-ok")
    assert "the answer was True" in ended.err


@pytest.mark.parametrize("arguments", [("show",), ("explain",), ("explain", "--knob", "precision")])
def test_the_first_line_about_an_unverified_plan_says_so(cli, unverified_file: Path, arguments: tuple[str]) -> None:
    ended = cli(arguments[0], unverified_file, *arguments[1:])
    assert ended.out.splitlines()[0] == f"UNVERIFIED: {WHY}"


def test_the_page_of_an_unverified_plan_says_so_first(cli, unverified_file: Path, plan_file: Path) -> None:
    assert cli("report", unverified_file, "--out", "r.html").code == 0
    page = Path("r.html").read_text()
    assert page.index(f"UNVERIFIED: {WHY}") < page.index("the speed of the plain baseline")
    cli("report", plan_file, "--out", "r.html")
    assert "UNVERIFIED" not in Path("r.html").read_text() and "UNVERIFIED" not in cli("show", plan_file).out


def make_study(store: Path, name: str, end: dict | None = None) -> Path:
    """The folder of a search as the store leaves it."""
    from autoplan.planner.store.store import Store

    with Store(store / name, name, summary={"model": "gpt2"}) as opened:
        opened.set_budget(60.0)
        if end is not None:
            opened.finish(**end)
    return store / name


def test_searches_are_listed_and_removed_but_never_one_that_runs(cli, tmp_path, monkeypatch) -> None:
    from autoplan.planner.store.store import Store

    store = tmp_path / "store"
    (make_study(store, "found", {"status": "plan_found"}) / "plan.json").write_text(
        '{"speedup": {"median": 2.5, "low": 2.25, "high": 2.75}}'
    )
    make_study(store, "stopped")
    (store / "no search").mkdir()
    with Store(store / "active", "active", summary={"model": "gpt2"}):
        listed = cli("ls", "--store", store)
        assert "2.50 times (2.25 to 2.75)" in listed.out and "running" in listed.out and "no search" not in listed.out
        asked = cli("clean", "--store", store)
        assert asked.code == 2 and "Add --yes" in asked.err and (store / "found").exists()
        assert cli("clean", "--older-than", "1d", "--store", store, "--yes").out.startswith("removed 0")
        assert cli("clean", "missing", "--store", store, "--yes").code == 2
        document = cli("clean", "--store", store, "--yes", "--json").document
    assert sorted(document["removed"]) == ["found", "stopped"]
    assert (store / "active").exists() and (store / "no search").exists()
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdin, "readline", lambda: "n\n", raising=False)
    assert cli("clean", "--store", store).out.endswith("removed 0 search(es), 0 B\n") and (store / "active").exists()
    monkeypatch.setattr(sys.stdin, "readline", lambda: "y\n", raising=False)
    assert cli("clean", "act", "--store", store).code == 0 and not (store / "active").exists()


def test_clean_with_json_prints_one_document(cli, tmp_path: Path, monkeypatch) -> None:
    make_study(tmp_path / "store", "found")
    asked = cli("clean", "--store", "store", "--json")
    assert asked.code == 2 and asked.document["status"] == "error" and "found" in asked.err
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdin, "readline", lambda: "y\n", raising=False)
    assert cli("clean", "--store", "store", "--json").document["removed"] == ["found"]


@pytest.mark.parametrize("more", [(), ("--tokens", "1B")], ids=["without tokens", "to a file as a folder"])
def test_an_estimate_whose_page_cannot_be_written_prints_the_error_alone(cli, tmp_path: Path, more) -> None:
    (tmp_path / "file").touch()
    asked = ("estimate", "--model", "llama2-7b", "--cluster", "8xA100", *more, "--out", "file/page.html")
    ended = cli(*asked)
    assert ended.code == 2 and ended.out == "" and "error: " in ended.err
    assert cli(*asked, "--json").document["status"] == "error"


@pytest.mark.parametrize("function", ["stat", "listdir"])
def test_a_folder_that_cannot_be_read_is_no_bug_of_ours(cli, tmp_path: Path, monkeypatch, function: str) -> None:
    from autoplan.cli.doctor import _size

    make_study(tmp_path / "store", "found")
    read = getattr(os, function)

    def refuse(path: Any, *given: Any, **named: Any) -> Any:
        if not isinstance(path, int) and os.path.abspath(path).startswith(str(tmp_path)):
            raise PermissionError(13, "Permission denied", path)
        return read(path, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, function, refuse)
        assert _size(tmp_path / "store" / "new")
        for command in ("ls", "clean"):  # the settings file of the folder cannot be seen either
            ended = cli(command, "--store", tmp_path / "store")
            assert ended.code == 2 and f"{tmp_path / 'store'} cannot be read: Permission denied" in ended.err, ended.err


def test_clean_takes_the_searches_that_are_named_and_no_other(cli, tmp_path: Path) -> None:
    from autoplan.planner.store.store import Store

    store = tmp_path / "store"
    for name in ("abc1", "abc2", "abc2.old-1", "other"):
        make_study(store, name)
    for name, words in (("", "is empty"), ("abc", "abc1"), ("missing", "no search missing")):
        ended = cli("clean", "other", name, "--store", store, "--yes")
        assert ended.code == 2 and words in ended.err and len(list(store.iterdir())) == 4
    with Store(store / "active", "active", summary={}):
        ended = cli("clean", "other", "act", "--store", store, "--yes")
    assert ended.code == 4 and "active runs" in ended.err and (store / "other").exists()
    document = cli("clean", "abc2", "oth", "--store", store, "--yes", "--json").document
    assert document["removed"] == ["abc2", "other"]


def test_clean_goes_on_past_a_search_that_has_begun_to_run(cli, tmp_path: Path, monkeypatch) -> None:
    from autoplan.planner.store import studies
    from autoplan.planner.store.store import Store

    store = tmp_path / "store"
    make_study(store, "first")
    monkeypatch.setattr(studies, "_runs", lambda folder: False)  # as it was when they were listed
    with Store(store / "active", "active", summary={}):
        make_study(store, "last")
        ended = cli("clean", "--store", store, "--yes")
    assert ended.code == 4 and "active runs" in ended.err and "Removed: last, first" in ended.err
    assert [path.name for path in store.iterdir()] == ["active"]


def test_a_file_that_vanishes_while_searches_are_listed_counts_nothing(cli, tmp_path: Path, monkeypatch) -> None:
    from autoplan.planner.store import studies

    folder = make_study(tmp_path / "store", "found")
    (folder / ".plan.json.tmp").write_text("half")
    measure = os.lstat

    def vanish(path: str) -> os.stat_result:
        if path.endswith(".tmp"):
            Path(path).unlink(missing_ok=True)
        return measure(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", vanish)
        (listed,) = cli("ls", "--store", "store", "--json").document["searches"]
    assert listed["size_bytes"] == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    parse = studies.parse_lines

    def end(content: bytes):
        (folder / "record.jsonl").unlink()
        return parse(content)

    monkeypatch.setattr(studies, "parse_lines", end)
    assert cli("ls", "--store", "store", "--json").document["searches"] == []


def test_doctor_says_what_is_missing_for_which_feature(cli, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    document = cli("doctor", "--json").document
    found = {row["what"]: (row["found"], row["about"]) for row in document["software"]}
    assert found["C++ compiler"] == ("missing", "torch.compile on CPU")
    assert found["torch"][0].startswith("2.") and "fp8" in found["torchao"][1]
    assert "cores" in cli("doctor").out


@pytest.mark.parametrize(
    "options",
    [
        ["nothere.py"],
        [__file__, "--memory-limit", "much"],
        [__file__, "--trace", "no/folder/trace.json"],
        [__file__, "--trace", "."],
    ],
)
def test_doctor_starts_nothing_with_what_it_refuses(cli, options: list[str]) -> None:
    done = cli("doctor", *options)
    assert done.code == 2 and "starting" not in done.err


def test_a_search_answered_from_its_record_has_the_unit_of_its_workload(tmp_path: Path) -> None:
    from autoplan.planner.search.answer import SearchRun, finished_before
    from autoplan.planner.search.options import SearchOptions
    from autoplan.planner.store.store import Store
    from autoplan.report.progress import PlainProgress

    plan, said = make_plan(), io.StringIO()
    unread = plan.workload.model_copy(update={"unit": "samples"})  # as a function is named, before it is called
    with Store(tmp_path / "s", plan.study, summary={}) as store:
        store.set_budget(60.0)
        store.add(plan.evidence[1])
        plan.save(store.folder / "plan.json")
        store.finish("plan_found", ended_by="time")
        run = SearchRun(
            options=SearchOptions(spec=unread),
            observer=PlainProgress(Console(file=said, width=200), unread.unit),
            store=store,
            budget_s=60.0,
        )
        result = finished_before(run)
    assert result is not None and result.unit == "tokens"
    assert "410 tokens/s" in said.getvalue() and "samples/s" not in said.getvalue()
