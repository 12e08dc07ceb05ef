"""A plan whose ranks were on two nodes: what refuses it, and how it runs. Here each node is an agent of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autoplan import run_plan, verify
from autoplan.errors import PlanError, UsageError
from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.plan import PlanNodes, broken_rules
from autoplan.planner.search.nodes import options_for
from autoplan.planner.verify.climb import staircase
from autoplan.planner.verify.steps import StepRecord
from autoplan.probes.run import read_host_profile
from autoplan.processes.engines import ENGINES
from autoplan.report import facts
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import make_spec
from tests.processes.test_nodes import Apart, Here
from tests.recorded import make_plan

WORKLOAD = f"{Path(__file__).parents[3] / 'examples' / 'image_classifier.py'}:tiny_classifier"
TWO = TrainingConfig(micro_batch=4, dp_replicate=2)
NODES = PlanNodes(count=2, ranks_per_node=1, launcher="slurm", kind="0123456789abcdef")


def plan_of(**given: Any) -> Plan:
    return make_plan(TWO, **{"nodes": NODES, **given})


def test_it_needs_a_launcher_and_enough_nodes() -> None:
    plan = plan_of()
    with pytest.raises(PlanError, match="measured on 2 nodes with up to 1 rank"):
        options_for(plan)
    assert options_for(plan, "ray").layout == (2, 1), "as it was measured"
    assert options_for(plan, "ray", "1x8").layout == (1, 8)
    assert options_for(plan, "local").nodes is None
    assert options_for(make_plan(TWO)).launcher == "local"
    with pytest.raises(UsageError, match='2 ranks, and nodes="1x1" have 1'):
        options_for(plan, "ray", "1x1")
    with pytest.raises(UsageError, match="launcher was given alone"):
        options_for(make_plan(TWO), "ray")
    with pytest.raises(UsageError, match="elastic, slurm or ray"):
        options_for(plan, "ssh")
    for call in (verify, staircase, run_plan):
        with pytest.raises(PlanError, match="2 nodes"):
            call(plan, changed_ok=True)


def test_it_says_where_it_was_measured(tmp_path: Path) -> None:
    plan = plan_of()
    assert Plan.load(plan.save(tmp_path / "plan.json")) == plan
    assert facts.hardware_line(plan).startswith("2 nodes with up to 1 rank(s) on each (slurm), each node: Test CPU")
    assert not broken_rules(plan_of(device="cuda"))
    too_few = NODES.model_copy(update={"count": 1})
    assert "its nodes have 1 x 1" in broken_rules(plan_of(nodes=too_few))[0]
    wide = NODES.model_copy(update={"ranks_per_node": 2})
    assert "2 ranks on each node, and its hardware has 1 GPU(s)" in broken_rules(plan_of(nodes=wide, device="cuda"))[0]
    text = (tmp_path / "plan.json").read_text().replace('"launcher": "slurm"', '"launcher": "ray"')
    (tmp_path / "edited.json").write_text(text)
    assert Plan.load(tmp_path / "edited.json").edited == ("nodes",)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    engine = Here()
    monkeypatch.setitem(ENGINES, "slurm", lambda gpus: engine)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return engine


def measured_here() -> Plan:
    """Of the hardware of this machine."""
    spec = make_spec(model=WORKLOAD, global_batch=16)
    return plan_of(workload=spec, hardware=read_host_profile())


@pytest.mark.slow
def test_its_steps_run_over_the_nodes_as_on_one(here: Here) -> None:
    plan, told = measured_here(), list[StepRecord]()
    found = run_plan(plan, steps=3, launcher="slurm", workload=WORKLOAD, on_step=told.append)
    assert [record.step for record in found.steps] == [1, 2, 3]
    assert told[-1] == found.steps[-1] and here.left
    assert found.items_per_s > 0 and found.steps[0].items == 16
    alone = run_plan(plan, steps=3, launcher="local", workload=WORKLOAD)
    assert [record.loss for record in found.steps] == pytest.approx([record.loss for record in alone.steps], rel=1e-5)


@pytest.mark.exhaustive
def test_it_is_verified_over_the_nodes(here: Here) -> None:
    found = verify(measured_here(), budget=2.0, launcher="slurm", workload=WORKLOAD)
    assert found.parity.passed, found.parity
    assert found.trial.tokens_per_s is not None, found.text
    assert here.left is (found.exit_code == 0)


@pytest.mark.exhaustive
def test_its_steps_run_where_this_machine_is_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a login node of SLURM: what is read of the machine is the first node's."""
    engine = Apart()
    monkeypatch.setitem(ENGINES, "slurm", lambda gpus: engine)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    plan = measured_here()
    found = run_plan(plan, steps=3, launcher="slurm", workload=WORKLOAD)
    alone = run_plan(plan, steps=3, launcher="local", workload=WORKLOAD)
    assert [record.loss for record in found.steps] == pytest.approx([record.loss for record in alone.steps], rel=1e-5)
    assert engine.left and all(process.poll() == 0 for process in engine.running)
