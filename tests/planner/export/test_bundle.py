"""What an export takes of autoplan's own source, and the kit as code."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
import torch

from autoplan.planner.export.bundle import Bundle, fold, parse_module
from autoplan.planner.export.companion import plain_settings, plan_settings
from autoplan.planner.export.kit import settings
from autoplan.planner.export.kit.loop import loader_arguments, steps
from autoplan.planner.export.kit.model import find_blocks, prepare_module, require_blocks
from autoplan.planner.export.run import load_target
from autoplan.strategies.config import TrainingConfig
from tests.recorded import make_plan

TEXT = """
def train(x):
    # what is always done
    if COMPILE == "block":
        # by blocks
        x.compile(
            mode=MODE,
        )
    elif COMPILE == "model":
        x.compile_all()
    else:
        x.nothing()
    if x.large and RANKS > 1:
        x.exchange()
    return x.sum() if RANKS > 1 else x
"""


def folded(**values: object) -> str:
    return fold(TEXT, {"COMPILE": "off", "RANKS": 1} | values)


def test_an_if_of_settings_leaves_one_branch_as_it_is_written() -> None:
    assert folded().count("x.nothing()") == 1 and "compile" not in folded()
    assert "    x.compile(\n        mode=MODE,\n    )\n" in folded(COMPILE="block")
    assert "compile_all" in folded(COMPILE="model") and "nothing" not in folded(COMPILE="model")
    assert folded().endswith("    return x\n") and folded(RANKS=2).endswith("    return x.sum()\n")
    for value in ("off", "block", "model"):
        text = folded(COMPILE=value)
        assert "# what is always done" in text and "if x.large and RANKS > 1:" in text, "asks something else too"
        ast.parse(text)


def test_every_constant_has_a_value_of_each_plan() -> None:
    assert plan_settings(make_plan()).keys() == plain_settings().keys()
    assert {name for name in vars(settings) if name.isupper()} == set(plain_settings())


@pytest.mark.parametrize("target", ["pytorch", "accelerate", "lightning", "fabric"])
def test_ddp_looks_for_parameters_without_a_gradient_where_the_search_saw_some(target: str) -> None:
    plan = make_plan(TrainingConfig(micro_batch=4, dp_replicate=2))
    for unused in (False, True):
        spec = plan.workload.model_copy(update={"find_unused_parameters": unused})
        export = load_target(target).render(plan.model_copy(update={"workload": spec}), "plan")
        text = "\n".join(export.files.values())
        told = re.search(r"^FIND_UNUSED = True|'find_unused_parameters': True", text, re.MULTILINE)
        assert (told is not None) is unused


def test_a_bundle_has_what_its_code_uses_and_no_more() -> None:
    plain = Bundle(plain_settings(), "script:main")
    assert "import autoplan" not in plain.source() and "def wrap(" not in plain.source()
    wrapped = Bundle(plain_settings() | {"CHECKPOINTING": "full", "BLOCKS": True}, "script:main")
    assert "def wrap(" in wrapped.source() and "CHECKPOINT_EVERY" in wrapped.asked - plain.asked
    defined = parse_module("\n".join(wrapped.imports()) + "\n\n" + wrapped.source())
    assert {"Stepper", "LossSum", "WorkloadError", "main"} <= defined.definitions.keys()


def test_a_definition_that_is_gone_is_named() -> None:
    with pytest.raises(AssertionError, match="no longer defines prepare_it: change the export too"):
        Bundle(plain_settings(), "model:prepare_it")


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(2, 4), torch.nn.Linear(4, 2)


def test_the_kit_is_code_that_runs() -> None:
    """With the constants of the plain run; the exports of other plans run it in the tests of each target."""
    model = torch.nn.Sequential(*(Block() for _ in range(3)))
    assert prepare_module(model.eval()) is model and model.training
    find_blocks(model)
    assert model.plan_stacks == [["0", "1", "2"]]
    plain: Any = torch.nn.Linear(2, 2)
    find_blocks(plain)
    with pytest.raises(ValueError, match="no repeated blocks"):
        require_blocks(plain)
    assert loader_arguments() == {"batch_size": 1, "drop_last": True} and list(steps("ab")) == [["a"], ["b"]]


def test_a_bundle_is_the_same_whatever_other_settings_were_folded_before() -> None:
    """The files of the kit are folded once for the settings that they ask."""
    one, other = ({**plain_settings(), "COMPILE": value} for value in ("off", "model"))

    def source(values: dict[str, Any]) -> str:
        return Bundle(values, "model:prepare_module").source()

    first, second = source(one), source(other)
    assert first != second and [source(one), source(other)] == [first, second]
