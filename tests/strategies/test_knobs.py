"""The metadata of the knobs is whole and true, and every list that is made from it follows."""

from __future__ import annotations

import ast
import functools
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autoplan.errors import ConfigError
from autoplan.strategies.analysis.structure import find_structure
from autoplan.strategies.config import (
    DEGREES,
    EXCHANGE_KNOBS,
    KNOBS,
    MEMORY_ONLY,
    NUMBERS,
    PLAIN,
    RANK_COUNTS,
    TrainingConfig,
    knob_values,
    knobs,
)
from autoplan.strategies.knob_text import check_knob
from autoplan.strategies.prepare import STRATEGIES, prepare
from autoplan.strategies.techniques.rules import RULES
from tests.contracts.knob_cases import needed_by, tried_values
from tests.recorded import make_hardware
from tests.strategies.tiny import GPT2, language

ROOT = Path(__file__).resolve().parents[2]
BATCH = 8


def attributes_of(file: Path) -> set[str]:
    """The names of all attributes that a source file reads."""
    return {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("knob", KNOBS)
def test_each_knob_has_a_technique_that_reads_it(knob: str) -> None:
    file = ROOT / "strategies" / "techniques" / f"{knobs()[knob].technique}.py"
    assert file.exists()
    assert knob in attributes_of(file), f"{file.name} never reads {knob}"
    assert TrainingConfig.model_fields[knob].description


def test_the_check_of_techniques_sees_a_knob_in_the_wrong_file() -> None:
    assert "gradient_sync" not in attributes_of(ROOT / "strategies" / "techniques" / "loss.py")


def test_the_lists_follow_from_the_metadata() -> None:
    everything = TrainingConfig(micro_batch=1, **dict.fromkeys(RANK_COUNTS, 2))  # type: ignore[arg-type]
    assert everything.world_size == 2 ** len(RANK_COUNTS)
    assert set(RANK_COUNTS) | set(EXCHANGE_KNOBS) < set(DEGREES) < set(KNOBS)
    assert set(NUMBERS) == {
        knob for knob in KNOBS if isinstance(getattr(PLAIN, knob), int | None) and knob_values(knob) is None
    }
    assert set(MEMORY_ONLY) <= {knob for knob in KNOBS if not knobs()[knob].unpriced and knob_values(knob)}
    # a strategy's name is the knob whose values it offers one by one
    assert {strategy.name for strategy in STRATEGIES} - set(DEGREES) == set(KNOBS) - set(DEGREES)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_knob_of_one_device_has_its_plain_value_alone_on_the_other(device: str) -> None:
    workload = language(GPT2)
    with torch.device("meta"):
        structure = find_structure(workload.build_model())
    checked = 0
    for strategy in STRATEGIES:
        if knobs()[strategy.name].device not in (None, device):
            choices = strategy.choices(workload, structure, make_hardware(), device)
            assert choices.values == (getattr(PLAIN, strategy.name),)
            assert choices.left_out
            checked += 1
    assert checked


def test_what_a_knob_needs_is_a_knob_and_a_value_of_it() -> None:
    for knob in KNOBS:
        for need in knobs()[knob].needs:
            example = needed_by(knob)[need.knob]
            assert check_knob(need.knob, example) == example
            assert need.is_met(example) and not need.is_met(getattr(PLAIN, need.knob))
    assert needed_by("gradient_sync") == {"dp_shard": 2}
    assert needed_by("compile_mode") == {"compile": "model"}


@functools.cache
def some_configs() -> list[TrainingConfig]:
    """Every value of every pair of knobs: alone, with what the two need, and in a pipeline with a zero bubble."""
    zero_bubble = {"pp": 2, "pp_microbatches": BATCH, "pp_schedule": "zero_bubble", "virtual_stages": 2}
    found = []
    for first, second in itertools.combinations(KNOBS, 2):
        for a, b in itertools.product(tried_values(first), tried_values(second)):
            for beside in ({}, needed_by(first) | needed_by(second), zero_bubble):
                found.append(PLAIN.model_copy(update=beside | {first: a, second: b}))
    return found


class Watched:
    """A configuration that notes which knobs are read."""

    def __init__(self, config: TrainingConfig, read: set[str]) -> None:
        self._config = config
        self._read = read

    def __getattr__(self, name: str) -> Any:
        if isinstance(found := getattr(TrainingConfig, name, None), property):
            return found.fget(self)  # type: ignore[misc]
        self._read.add(name)
        return getattr(self._config, name)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.technique}-{rule.reads[0]}")
def test_a_rule_reads_what_it_says(rule: Any) -> None:
    read: set[str] = set()
    for config in some_configs():
        rule.incompatible(Watched(config, read), BATCH)
    assert read == set(rule.reads)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"compile_mode": "max-autotune"}, "nothing is compiled"),
        ({"compile_mode": "max-autotune", "compile": "block"}, "needs compile=model"),
    ],
)
def test_prepare_refuses_what_does_not_go_together(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        prepare(language(GPT2), TrainingConfig(**({"micro_batch": 2} | values)))


@pytest.mark.parametrize(("knob", "least"), [("micro_batch", 1), ("threads", 1)])
def test_the_smallest_value_of_a_number_is_the_fields(knob: str, least: int) -> None:
    assert check_knob(knob, least) == least
    with pytest.raises(ConfigError) as caught:
        check_knob(knob, least - 1)
    assert caught.value.hint is not None and f"at least {least}" in caught.value.hint


def test_a_plan_with_a_knob_that_is_gone_loads_where_it_did_nothing() -> None:
    assert TrainingConfig.model_validate({"micro_batch": 2, "gelu": "own", "ddp_bucket_mb": 25}) == TrainingConfig(
        micro_batch=2
    )
    with pytest.raises(ConfigError, match="ddp_bucket_mb=50: there is no such knob any more"):
        TrainingConfig.model_validate({"micro_batch": 2, "ddp_bucket_mb": 50})


def test_the_space_and_the_table_load_no_torch() -> None:
    modules = ("strategies.knob_text", "strategies.techniques.rules", "strategies.techniques.degrees")
    given = [f"autoplan.{module}" for module in (*modules, "planner.space.generate")]
    load_each = "for name in sys.argv[1:]: importlib.import_module(name); assert 'torch' not in sys.modules, name"
    subprocess.run([sys.executable, "-c", f"import importlib, sys\n{load_each}", *given], cwd=ROOT, check=True)
