"""The library call: what it takes, what it refuses, and that it works from an unguarded script and a closure."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import pkgutil
import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

import autoplan
from autoplan import api
from autoplan import errors as errors_module
from autoplan.errors import (
    AutoplanError,
    ConfigError,
    PlanError,
    UsageError,
    WorkloadError,
    as_keywords,
)
from autoplan.planner.search import run as search_run
from autoplan.planner.search.options import SearchKeywords, SearchObserver, SearchOptions, SearchResult
from autoplan.planner.space.bounds import Bound
from autoplan.strategies.workloads.sources import make_spec
from tests.recorded import make_plan

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import torch
from torch import nn

import autoplan
from autoplan.strategies.workloads.workload import LossSum
from tests.time_box import set_time_box

set_time_box()
width = 24


def build():
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))


def make_batch(count, index):
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(count, width, generator=generator)
    return {"x": x, "y": (x[:, 0] > 0).long()}


def loss(model, batch):
    return LossSum(nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"]))


plan = autoplan.search(
    model=build, make_batch=make_batch, loss=loss, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01),
    global_batch=16, budget="60s", max_trials=2, fix={"compile": "off"}, device="cpu", quiet=True,
)
run = plan.prepare(build, lambda p: torch.optim.AdamW(p, lr=0.01), loss)
losses = [float(run.step(make_batch(run.local_batch, n)).loss) for n in range(30)]
print("LEARNED", losses[-1] < losses[0] - 0.1, plan.parity.passed)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("probed_machine")
def test_a_search_from_an_unguarded_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    home = {"XDG_STATE_HOME": str(tmp_path / "state"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=os.environ | home, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "LEARNED True True", done.stdout + done.stderr[-3000:]


def test_options_are_checked_and_read() -> None:
    spec = make_spec(model="gpt2", sequence_length=128)
    options = SearchOptions(
        spec=spec,
        budget="90s",
        fix={"micro_batch": "4", "precision": "bf16"},
        bound={"threads": (1, 2), "attention": ["own", "sdpa"], "tp": "1..2", "pp": (None, 2)},
        memory_limit="2GiB",
    )
    assert options.budget_s == 90 and options.memory_limit_bytes(None) == 2 * 2**30
    assert options.fix == {"micro_batch": 4, "precision": "bf16"}
    assert options.spec.options["fixed_micro_batch"] == 4
    assert options.bound["threads"] == Bound(low=1, high=2) and options.bound["attention"].values == ("own", "sdpa")
    assert options.bound["tp"] == Bound(low=1, high=2) and options.bound["pp"] == Bound(high=2)
    again = SearchOptions(**dict(options) | {"budget": 10})
    assert again.budget_s == 10 and again.bound == options.bound and again.fix == options.fix


def test_a_share_of_memory_is_of_all_there_is() -> None:
    spec = make_spec(model="gpt2")
    assert SearchOptions(spec=spec, memory_limit="25%").memory_limit_bytes(2.0**30) == 2**28
    assert SearchOptions(spec=spec).memory_limit_bytes(2.0**30) is None
    with pytest.raises(UsageError, match="the device has 1.00 GiB"):
        SearchOptions(spec=spec, memory_limit="800GiB").memory_limit_bytes(2.0**30)
    with pytest.raises(UsageError, match="memory of the device is not known"):
        SearchOptions(spec=spec, memory_limit="25%").memory_limit_bytes(None)


WRONG: dict[str, tuple[Any, type[Exception]]] = {
    "budget": ("soon", UsageError),
    "max_trials": (1.5, UsageError),
    "max_device_hours": (0.0, UsageError),
    "fix": ({"precison": "bf16"}, ConfigError),
    "bound": ({"precision": ["fp32", "int2"]}, ConfigError),
    "baseline": ({"micro_batch": 0}, ConfigError),
    "device": ("tpu", UsageError),
    "memory_limit": ("120%", UsageError),
    "nproc": (0, UsageError),
    "side_by_side": (0, UsageError),
    "launcher": ("ssh", UsageError),
    "nodes": ("2by8", UsageError),
    "sampler": ("grid", UsageError),
    "out": (3, UsageError),
    "store": ("", UsageError),
    "storage": ("sqlite:///here", UsageError),
    "fresh": ("yes", UsageError),
    "wait": ("yes", UsageError),
    "numerics": ("rough", UsageError),
    "objective": ("speed", UsageError),
    "min_throughput": (1.5, UsageError),
    "price_per_hour": (-1, UsageError),
    "loader": (3, WorkloadError),
    "dry_run": (1, UsageError),
    "seed": (-1, UsageError),
}


@pytest.mark.parametrize("name", SearchOptions.flags())
def test_every_option_is_checked_and_its_error_names_it_as_a_keyword_and_as_a_flag(name: str) -> None:
    value, kind = WRONG[name]
    with pytest.raises(kind) as caught:
        SearchOptions(spec=make_spec(model="gpt2"), **{name: value})
    error = caught.value
    assert isinstance(error, AutoplanError) and error.hint
    if kind is UsageError:  # the others name the knob that is wrong
        assert error.message.startswith(f"{name} is "), error.message
        assert error.flag_message.startswith(f"--{name.replace('_', '-')} is "), error.flag_message
    assert "--" not in str(error)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"fix": {"precision": "int2"}}, ConfigError),
        ({"fix": "precision=bf16"}, UsageError),
        ({"bound": {"nothing": (1, 2)}}, ConfigError),
        ({"bound": {"micro_batch": (8, 1)}}, ConfigError),
        ({"bound": 3}, UsageError),
        ({"nproc": True}, UsageError),
        ({"budget": 0}, UsageError),
        ({"memory_limit": 0}, UsageError),
        ({"sampler": 3}, UsageError),
    ],
    ids=str,
)
def test_wrong_options_are_refused(given: dict, kind: type[Exception]) -> None:
    with pytest.raises(kind) as error:
        SearchOptions(spec=make_spec(model="gpt2"), **given)
    assert error.value.hint  # type: ignore[attr-defined]


def test_an_error_shows_the_line_of_the_caller_and_no_line_inside() -> None:
    with pytest.raises(UsageError) as raised:
        autoplan.search("gpt2", budget="soon")
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert [frame.name for frame in frames] == [frames[0].name, "checked"]


def test_search_takes_every_option_under_its_one_name() -> None:
    options = SearchOptions.model_fields.keys() - {"spec", "dry_run"}
    assert SearchKeywords.__annotations__.keys() == options, "what type checkers know"
    taken = inspect.signature(autoplan.search).parameters
    assert {name: one.default for name, one in taken.items() if name in options} == {
        name: field.get_default(call_default_factory=True)
        for name, field in SearchOptions.model_fields.items()
        if name in options
    }
    assert autoplan.search.__doc__ and all(f"\n        {name}: " in autoplan.search.__doc__ for name in taken)
    for wrong, right in {"bugdet": "budget", "batch_size": "global_batch", "seq_len": "sequence_length"}.items():
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{wrong}'; did you mean {right}[?]"):
            autoplan.search("gpt2", **{wrong: 10})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--nproc is 0", "nproc is 0"),
        ("For example --budget 10m", 'For example budget="10m"'),
        ("--max-trials 20, --max-trials", "max_trials=20, max_trials"),
        ("use --fix precision=bf16.", 'use fix={"precision": "bf16"}.'),
        ("--fix tp=1 --bound micro_batch=1..8", 'fix={"tp": 1} bound={"micro_batch": "1..8"}'),
        ("--seq-len 1024 or --memory-limit 8GiB.", 'sequence_length=1024 or memory_limit="8GiB".'),
        ("--device cuda or --store DIR", 'device="cuda" or store=DIR'),
        ("find one: autoplan search --nproc 4.", "find one: autoplan search --nproc 4."),
        ("torchrun --nproc-per-node 4 train.py, --json", "torchrun --nproc-per-node 4 train.py, --json"),
    ],
)
def test_what_a_flag_is_in_python(text: str, words: str) -> None:
    assert as_keywords(text) == words
    error = UsageError(text, hint=text)
    copied = pickle.loads(pickle.dumps(error))
    for one in (error, copied):
        assert (one.message, one.hint, one.flag_message, one.flag_hint) == (words, words, text, text)


# Names.

DOCUMENTS = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *(ROOT / "examples").glob("*.py")]


def public_names(text: str) -> set[str]:
    """The names of autoplan that a text uses: `autoplan.X`, outside links and file names; and errors by their name."""
    errors = {name for name in vars(errors_module) if name.endswith("Error")}
    dotted = set(re.findall(r"(?<![\w/.])autoplan\.([A-Za-z_]\w*)\b(?!\.(?:md|py|json))", text))
    return dotted - {"md", "json"} | {name for name in errors if re.search(rf"\b{name}\b", text)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_that_the_docs_use_is_there(path: Path) -> None:
    modules = {module.name for module in pkgutil.iter_modules(autoplan.__path__)} | {"toml"}  # autoplan.toml is a file
    missing = {name for name in public_names(path.read_text()) if name not in modules and not hasattr(autoplan, name)}
    assert not missing, f"{path.name} names {missing}, which autoplan does not have"


def test_the_check_of_names_sees_a_wrong_one_and_every_error_is_public() -> None:
    assert public_names("call `autoplan.serach(x)`; see autoplan.Plan, [x](autoplan.md), a BudgetEndedError") == {
        "serach",
        "Plan",
        "BudgetEndedError",
    }
    public = {name for name, member in vars(errors_module).items() if isinstance(member, type)}
    assert public == {name for name in autoplan.__all__ if name.endswith("Error")}
    named = public_names((ROOT / "docs" / "errors.md").read_text())
    assert public <= named, "docs/errors.md lists every error"


def test_a_named_workload_and_parts_together_are_refused() -> None:
    with pytest.raises(UsageError, match="make_batch"):
        autoplan.search("gpt2", make_batch=lambda count, index: None)


@pytest.mark.parametrize("status", api.ENDINGS)
def test_a_search_without_a_plan_raises_the_error_of_its_end(status: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    result = SearchResult(status=status, reason="this is why", hint="Do that.")
    monkeypatch.setattr(search_run, "run_search", lambda options, **given: result)
    with pytest.raises(api.ENDINGS[status], match="this is why") as error:
        autoplan.search("gpt2", quiet=True)
    assert error.value.hint == "Do that." and error.value.exit_code == result.exit_code


def test_an_observer_is_told_instead_of_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {}

    def run_search(options, *, observer=None):
        given["observer"] = observer

    monkeypatch.setattr(search_run, "run_search", run_search)
    mine = SearchObserver()
    options = SearchOptions(spec=make_spec(model="gpt2"))
    api.run(options, observer=mine)
    assert given["observer"] is mine
    api.run(options, quiet=True)
    assert given["observer"] is None
    api.run(options)
    assert given["observer"] is not None


def test_a_plan_of_other_hardware_loads_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_plan().save(tmp_path / "plan.json")
    assert autoplan.load_plan(path) == make_plan()
    assert "other hardware" in capsys.readouterr().err
    with pytest.raises(PlanError):
        autoplan.load_plan(tmp_path / "none.json")


def test_a_plan_of_before_a_knob_was_there_loads(tmp_path: Path) -> None:
    path = make_plan().save(tmp_path / "plan.json")
    older = json.loads(path.read_text(), object_hook=lambda entry: {k: entry[k] for k in entry if k != "gradient_sync"})
    assert "gradient_sync" not in older["config"]
    del older["seal"]  # its digests were made without the knob
    path.write_text(json.dumps(older))
    assert autoplan.load_plan(path).config == make_plan().config


def test_export_takes_a_plan_or_its_file(tmp_path: Path) -> None:
    path = make_plan().save(tmp_path / "plan.json")
    for given in (path, make_plan()):
        (written,) = autoplan.export(given, "json", tmp_path / "out.json").paths
        assert written.exists()


def test_an_estimate_takes_a_path_and_tokens_as_they_are_written(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    size = {"nodes": 256, "gpus_per_node": 8, "inter_gbits_per_s_per_gpu": 400}
    file.write_text(json.dumps({"chip": "H100"} | size))
    written = autoplan.estimate("llama2-70b", file, tokens="2T")
    wanted = autoplan.estimate("llama2-70b", str(file), tokens=2e12)
    took = {"total_s": None, "estimating_s": None}
    assert written | took == wanted | took
    for tokens in (0, -5.0, "many", "0T"):
        with pytest.raises(autoplan.UsageError, match="is no number of tokens"):
            autoplan.estimate("llama2-70b", "256x8xH100", tokens=tokens)
