"""The modules for Lightning's Trainer and for Fabric: real ones train as a plain loop, and read back the plan."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from autoplan.planner.export.run import load_target
from autoplan.planner.plan.plan import Plan
from autoplan.strategies.config import TrainingConfig
from tests import recorded
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


CHECKS = r"""
import json, sys
from autoplan.errors import ExportError
from autoplan.planner.export.base import Export
from autoplan.planner.export.run import load_target
from autoplan.planner.plan.plan import Plan

found = {}
for name, path, target, old, new in json.load(open(sys.argv[1])):
    plan, one = Plan.load(path), load_target(target)
    (text,) = one.render(plan, "plan").files.values()
    assert old in text, (name, old)
    try:
        found[name] = list(one.check(plan, Export(files={"plan.py": text.replace(old, new)})))
    except ExportError as error:
        found[name] = str(error)
print(json.dumps(found))
"""


def test_a_real_trainer_and_fabric_read_the_plan_back_and_planted_mistakes_are_caught(tmp_path: Path) -> None:
    plans = {
        "one": make_plan(precision="bf16"),
        "ddp": make_plan(dp_replicate=2, micro_batch=4),
        "shard": make_plan(dp_shard=2),
        "fp16": make_plan(precision="fp16"),
    }
    plans["cuda"] = recorded.make_plan(TrainingConfig(micro_batch=2, precision="fp16"), device="cuda")
    for name, plan in plans.items():
        plan.save(tmp_path / f"{name}.json")
    right = [(f"{target} {name}", name, target, "", "") for target in TARGETS.values() for name in plans]
    wrong = [
        ("key", "one", "lightning", "'accumulate_grad_batches'", "'accumulate_gradient_batches'"),
        ("value", "one", "lightning", "'accumulate_grad_batches': 4", "'accumulate_grad_batches': 3"),
        ("precision", "one", "lightning", "'bf16-mixed'", "'bf16-mix'"),
        ("clipping", "one", "lightning", "'gradient_clip_val': 0.1", "'gradient_clip_val': 1.0"),
        ("constant", "one", "fabric", "MAX_GRAD_NORM = 0.1", "MAX_GRAD_NORM = 1.0"),
        ("option", "ddp", "fabric", "'broadcast_buffers'", "'broadcasts_buffers'"),
        ("degree", "shard", "fabric", "'data_parallel_size': 2", "'data_parallel_size': 1"),
        ("plugin", "fp16", "lightning", "[MixedPrecision(**PLUGIN_OPTIONS)]", "[]"),
    ]
    rows = [(name, str(tmp_path / f"{plan}.json"), *rest) for name, plan, *rest in [*right, *wrong]]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "checks.py").write_text(CHECKS)
    done = run_python("lightning", [tmp_path / "checks.py", tmp_path / "rows.json"])
    found = json.loads(done.stdout.splitlines()[-1])
    assert [found[name] for name, *_ in right] == [[]] * len(right), found
    said = {
        "key": "refuses the arguments",
        "value": "accumulate_grad_batches reads back as 3",
        "precision": "refuses the arguments",
        "clipping": "gradient_clip_val reads back as 1.0",
        "constant": "MAX_GRAD_NORM reads back as 1.0",
        "option": "DDPStrategy.broadcast_buffers reads back as None",
        "degree": "data_parallel_size reads back as 1",
        "plugin": "precision reads back as '32-true'",
    }
    for name, text in said.items():
        assert text in found[name], (name, found[name])
