"""The modules for Lightning's Trainer and for Fabric: real ones train as a plain loop."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from autoplan.planner.export.run import load_target
from autoplan.planner.plan.plan import Plan
from tests.exports.environments import needs_environment, run_python
from tests.exports.six_steps import BATCH_NORM, WORKLOAD, SixSteps, compare, make_plan, plain_loop, prepared

pytestmark = needs_environment("lightning")
TARGETS = {"trainer": "lightning", "fabric": "fabric"}


def trained(plan: Plan, kind: str, folder: Path, *options: str) -> SixSteps:
    """What a script of a user's records, which trains with the exported module."""
    plan.save(folder / "plan.json")
    (text,) = load_target(TARGETS[kind]).render(plan, "exported").files.values()
    (folder / "exported.py").write_text(text)
    script = ["tests/exports/train_lightning.py", kind, folder / "exported.py", folder / "plan.json"]
    run_python("lightning", [*script, folder / "steps.pt", *options])
    return SixSteps.load(folder / "steps.pt")


CASES: list[tuple[str, str, dict[str, Any], list[str]]] = [
    ("trainer", WORKLOAD, {"checkpointing": "selective", "threads": 2}, []),
    ("trainer", BATCH_NORM, {}, []),
    ("trainer", BATCH_NORM, {"dp_replicate": 2}, []),
    ("trainer", WORKLOAD, {"dp_shard": 2, "checkpointing": "every_2"}, []),
    ("trainer", WORKLOAD, {"dp_shard": 2, "gradient_sync": "every"}, []),
    ("fabric", WORKLOAD, {"attention": "sdpa", "optimizer_step": "foreach"}, []),
    ("fabric", BATCH_NORM, {"dp_replicate": 2}, []),
    ("fabric", WORKLOAD, {"dp_replicate": 2, "micro_batch": 1, "threads": 2}, ["interleaved"]),
    ("fabric", WORKLOAD, {"dp_shard": 2, "reshard_after_forward": False, "checkpointing": "full"}, []),
]


@pytest.mark.parametrize(("kind", "workload", "knobs", "options"), CASES)
def test_six_steps_are_those_of_a_plain_loop(
    kind: str, workload: str, knobs: dict[str, Any], options: list[str], tmp_path: Path
) -> None:
    plan = make_plan(workload, **knobs)
    assert compare(trained(plan, kind, tmp_path, *options), plain_loop(plan)) == []


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_reduced_precision_is_that_of_prepare(kind: str, precision: str, tmp_path: Path) -> None:
    """fp16 on a CPU, too, where Lightning by itself would take bf16 in its place.

    The first forward is the same. The gradients are rounded at another scale: to a number of a few digits.
    """
    plan = make_plan(precision=precision)
    wanted = dataclasses.replace(prepared(plan), start=plain_loop(plan).start)
    found = trained(plan, kind, tmp_path)
    assert found.losses[0] == pytest.approx(wanted.losses[0], rel=1e-6)
    assert compare(found, wanted, relative=0.01) == []


def test_without_global_mean_it_is_another_loss(tmp_path: Path) -> None:
    """What the module says of the Trainer's own way: a mean of means."""
    plan = make_plan()
    differences = compare(trained(plan, "trainer", tmp_path, "mean"), plain_loop(plan))
    assert any(text.startswith("grad_norms") for text in differences) and any("off by" in text for text in differences)
