"""An unverified plan: each verb refuses it, says why, and takes it where the user says so."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import autoplan
from autoplan.errors import PlanError
from autoplan.planner.plan.plan import Plan
from autoplan.planner.search.plan_maker import UNCHECKED
from autoplan.planner.verify import measure
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import make_spec, spec_from_objects
from tests.recorded import make_plan
from tests.strategies.loops import Points, Regressor

WHY = "the search was interrupted before it had verified a plan"
WORKLOAD = f"{Path(__file__).parents[1] / 'data' / 'faulty.py'}:make_sound"

pytestmark = pytest.mark.filterwarnings("ignore:the plan was found on other hardware")


def unverified(**given: Any) -> Plan:
    facts: dict[str, Any] = {"workload": make_spec(model=WORKLOAD), "accumulation": 16}
    return make_plan(TrainingConfig(micro_batch=2), parity=UNCHECKED, unverified=WHY, **(facts | given))


def loop() -> tuple[Any, ...]:
    model = Regressor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, DataLoader(Points(), batch_size=8), torch.nn.CrossEntropyLoss()


def of_loop() -> Plan:
    workload = autoplan.from_loop(*loop())
    return unverified(workload=spec_from_objects(workload), accumulation=4)


VERBS: dict[str, Callable[..., Any]] = {
    "prepare": lambda folder, **ok: unverified().prepare(workload=WORKLOAD, **ok),
    "loader": lambda folder, **ok: unverified().loader(Points(400), **ok),
    "apply_to": lambda folder, **ok: of_loop().apply_to(*loop(), **ok),
    "export": lambda folder, **ok: autoplan.export(unverified(), "json", folder / "x.json", **ok),
    "verify": lambda folder, **ok: autoplan.verify(unverified(), workload=WORKLOAD, **ok),
}


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_refuses_it_without_the_flag_and_takes_it_with_it(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "verify_plan", lambda *_, **__: "verified")
    with pytest.raises(PlanError) as refused:
        VERBS[verb](tmp_path)
    assert refused.value.message == f"the plan is unverified: {WHY}"
    assert "autoplan search" in str(refused.value.hint) and "unverified_ok=True" in str(refused.value.hint)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert VERBS[verb](tmp_path, unverified_ok=True) is not None
    if verb in ("prepare", "apply_to", "verify"):
        assert any(f"unverified: {WHY}" in str(one.message) for one in said)


def test_it_is_refused_before_the_training_is_read() -> None:
    with pytest.raises(PlanError, match="unverified"):
        of_loop().apply_to(Regressor(), None, None)


@pytest.mark.filterwarnings("ignore:the plan is unverified")
def test_the_word_of_one_call_is_not_that_of_the_next() -> None:
    plan = unverified()
    plan.prepare(workload=WORKLOAD, unverified_ok=True)
    with pytest.raises(PlanError, match="unverified"):
        plan.loader(Points(400))


def test_a_plan_that_failed_its_check_is_refused_as_before() -> None:
    plan = make_plan(parity=UNCHECKED)
    with pytest.raises(PlanError, match="failed its parity check"):
        plan.prepare(unverified_ok=True)


def test_the_field_is_sealed(tmp_path: Path) -> None:
    path = unverified().save(tmp_path / "plan.json")
    assert Plan.load(path).edited == ()
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"unverified": None}))
    assert Plan.load(path).edited == ("unverified",)
    with pytest.raises(PlanError, match="edited"):
        Plan.load(path).prepare(unverified_ok=True)
