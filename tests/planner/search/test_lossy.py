"""--numerics: lossy choices are in a search by the user's word alone, and the plan names what its check cannot show."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import autoplan
from autoplan.errors import ConfigError, UsageError
from autoplan.planner.search.options import SearchOptions
from autoplan.planner.search.run import run_search
from autoplan.planner.space.generate import without_lossy
from autoplan.strategies.analysis.facts import Choices, offer
from autoplan.strategies.config import LOSSY, TrainingConfig, knob_values, knobs
from autoplan.strategies.workloads.sources import make_spec
from tests.strategies.tiny import GPT2

TINY = GPT2 | {"n_embd": 32, "n_layer": 2, "n_positions": 16}


@pytest.fixture
def spec(tmp_path: Path) -> Any:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return make_spec(model=str(path), global_batch=8)


@pytest.mark.parametrize(
    ("asked", "installed", "needs"),
    [
        ({"fix": {"parameters": "bf16"}}, False, False),
        ({"bound": {"parameters": ["own", "bf16_stochastic"]}}, False, False),
        ({"fix": {"optimizer_state": "8bit"}}, False, True),
        ({"fix": {"optimizer_state": "8bit"}}, True, False),
        ({"fix": {"fp8": "tensorwise"}}, False, True),
        ({"bound": {"optimizer_state": ["own", "8bit"]}}, False, True),
    ],
    ids=str,
)
def test_a_lossy_value_without_the_word_is_an_error_that_says_so_and_what_it_needs_installed(
    spec, monkeypatch, asked, installed, needs
):
    assert SearchOptions(spec=spec, numerics="lossy", **asked).numerics == "lossy"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace() if installed else None)
    with pytest.raises(ConfigError, match="loses bits at each step") as caught:
        SearchOptions(spec=spec, **asked)
    hint = caught.value.flag_hint or ""
    assert 'numerics="lossy"' in (caught.value.hint or "") and "--numerics lossy" in hint
    assert ('needs torchao, which is not installed here: pip install "autoplan[cuda]"' in hint) is needs


def test_in_python_and_on_the_command_line(spec, tmp_path, cli):
    with pytest.raises(ConfigError, match="parameters=bf16"):
        autoplan.search("gpt2", fix={"parameters": "bf16"}, store=tmp_path / "s", quiet=True)
    with pytest.raises(UsageError, match="numerics"):
        SearchOptions(spec=spec, numerics="fewer")
    done = cli("search", "--model", tmp_path / "tiny.json", "--fix", "parameters=bf16")
    assert done.code == 2 and "Add --numerics lossy" in done.err


def test_values_that_are_left_out_say_how_to_get_them():
    choices = [
        offer("parameters", ("own",), {"bf16": None, "bf16_stochastic": "no parameter is in fp32"}),
        Choices(knob="precision", values=("fp32", "bf16")),
    ]
    parameters, precision = without_lossy(choices)
    assert parameters.values == ("own",) and precision == choices[1]
    reasons = {found.value: found.reason for found in parameters.left_out}
    assert "--numerics lossy" in reasons["bf16"] and reasons["bf16_stochastic"] == "no parameter is in fp32"


def test_every_lossy_value_has_a_risk_and_counts_as_a_change():
    for knob, values in LOSSY.items():
        assert knobs()[knob].numerics == "changes"
        for value in values:
            assert value in (knob_values(knob) or ())
            (risk,) = TrainingConfig.model_validate({"micro_batch": 1, knob: value}).risks()
            assert risk.startswith(f"{knob}={value}: ") and "show" in risk


@pytest.mark.usefixtures("quick_searches")
def test_a_dry_run_has_them_with_the_word(spec, tmp_path):
    """Products in 8 bits, which this machine lacks, are left out with the reason, and an error if they are fixed."""
    fixed = {"compile": "off", "threads": 1, "checkpointing": "none", "loss": "full", "allocator": "own"}
    fixed |= {"micro_batch": 4, "attention": "own", "optimizer_step": "own"}
    fixed["precision"] = "bf16"  # not every processor would take it by itself
    given = {"spec": spec, "budget": 60.0, "device": "cpu", "store": tmp_path / "s", "dry_run": True}
    found = {name: run_search(SearchOptions(**given, fix=fixed, numerics=name)) for name in ("kept", "lossy")}
    for result in found.values():
        assert result.status == "dry_run"
        times = [c.prediction.step_time_s for c in result.candidates]
        assert times and times == sorted(times)
    assert not (tmp_path / "s").exists(), "it keeps nothing"
    kept, lossy = ({c.config for c in result.candidates} for result in found.values())
    assert kept < lossy
    assert {c.parameters for c in kept} == {"own"} and {c.optimizer_state for c in kept} == {"own"}
    assert {c.parameters for c in lossy} == {"own", "bf16", "bf16_stochastic"}
    left_out, of_lossy = ({one.family: one.limit for one in result.left_out} for result in found.values())
    assert "--numerics lossy" in left_out["parameters=bf16"]
    assert any(family.startswith("optimizer_state=bf16") for family in of_lossy)
    assert "compute capability 8.9" in of_lossy["fp8=tensorwise"] and "9.0" in of_lossy["fp8=rowwise"]
    with pytest.raises(ConfigError, match="fp8=rowwise is not possible here: .*compute capability 9.0") as caught:
        run_search(SearchOptions(**given, numerics="lossy", fix={"fp8": "rowwise", "precision": "bf16"}))
    missing = importlib.util.find_spec("torchao") is None
    assert ("pip install" in str(caught.value)) is missing


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_searches")
def test_a_plan_with_master_copies_is_found_verified_and_prepared(spec, tmp_path):
    fixed = {"parameters": "bf16", "precision": "bf16", "compile": "off", "threads": 1, "optimizer_state": "bf16"}
    options = SearchOptions(
        spec=spec, budget=90.0, device="cpu", store=tmp_path / "s", max_trials=3, fix=fixed, numerics="lossy"
    )
    result = run_search(options)
    assert result.status == "plan_found", result.reason
    plan = result.plan
    assert plan is not None and plan.parity.passed and plan.parity.changes_numerics
    assert plan.config.parameters == "bf16"
    assert {note for note in plan.notes if note.startswith(("parameters=", "optimizer_state="))} == set(
        plan.config.risks()
    )
    run = plan.prepare()
    batch = run.workload.make_batch(run.local_batch, 0)
    losses = [float(run.step(batch).loss) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert {str(p.dtype) for p in run.parameters} == {"torch.bfloat16"}
    state = run.state_dict()
    assert {str(tensor.dtype) for tensor in state["model"].values() if tensor.is_floating_point()} == {"torch.float32"}
