"""The exported Ray Train script trains as a plain loop does; Ray is in an environment of its own."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from autoplan.errors import ExportError
from autoplan.planner.export import ray as ray_script
from autoplan.planner.export.base import Export
from autoplan.planner.export.run import export_plan, load_target
from autoplan.strategies.config import TrainingConfig
from tests.exports.environments import needs_environment, run_python
from tests.exports.six_steps import BATCH_NORM, WORKLOAD, SixSteps, compare, make_plan, plain_loop
from tests.exports.workloads import STEPS
from tests.recorded import make_plan as make_recorded_plan
from tests.recorded import named

# What is asked of the file alone; the other file is a script, whose own tests are beside this one.
CHECK = """
import ast, json, sys
from autoplan.planner.export.ray import read_in_rank
given = json.loads(sys.argv[1])
print(json.dumps(read_in_rank(None, given["SCALING"], given["TORCH"], given["MAX_FAILURES"])))
"""


def trained(folder: Path, **knobs: Any) -> SixSteps:
    """Six steps of an export with the workload, as its checkpoint has them."""
    workload = knobs.pop("workload", WORKLOAD)
    plan = make_plan(workload, **knobs)
    driver, _ = export_plan(plan, "ray", folder / "plan-ray.py", workload=named(plan)).paths
    arguments = [driver, "--steps", str(STEPS), "--storage", folder / "results"]
    done = run_python("ray", arguments, cwd=folder, timeout_s=170, env={"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"})
    found = re.search(r"the model is in (\S+)", done.stdout)
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    steps = json.loads(Path(found[1], "steps.json").read_text())
    state = torch.load(Path(found[1], "model.pt"))
    buffers = {name: value for name, value in state.items() if "running_" in name or "num_batches" in name}
    return SixSteps(
        losses=[step["loss"] for step in steps],
        grad_norms=[step["grad_norm"] for step in steps],
        learning_rates=[step["learning_rate"] for step in steps],
        parameters={name: value for name, value in state.items() if name not in buffers},
        buffers=buffers,
    )


@pytest.mark.parametrize(
    "knobs",
    [{}, {"dp_replicate": 2}, {"dp_shard": 2}, {"workload": BATCH_NORM, "dp_replicate": 2}],
    ids=["one", "ddp", "fsdp", "batch_norm"],
)
class TestTrains:
    pytestmark = needs_environment("ray")

    def test_as_a_plain_loop_does(self, knobs: dict[str, Any], tmp_path: Path) -> None:
        got = trained(tmp_path, **knobs)
        knobs = dict(knobs)
        assert compare(got, plain_loop(make_plan(knobs.pop("workload", WORKLOAD), **knobs))) == []


class TestRead:
    pytestmark = needs_environment("ray")

    def test_rays_own_classes_read_the_settings(self) -> None:
        settings = ray_script.settings(make_recorded_plan(TrainingConfig(micro_batch=2, dp_replicate=2)))
        given = {name: settings[name] for name in ("SCALING", "TORCH", "MAX_FAILURES")}
        read = json.loads(run_python("ray", ["-c", CHECK, json.dumps(given)]).stdout.splitlines()[-1])
        wanted = {**given["SCALING"], **given["TORCH"], "max_failures": 0}
        assert {name: read[name] for name in wanted} == wanted
        given["SCALING"]["workers"] = given["SCALING"].pop("num_workers")
        refused = run_python("ray", ["-c", CHECK, json.dumps(given)], check=False)
        assert refused.returncode != 0 and "workers" in refused.stderr


def test_the_check_sees_a_wrong_value() -> None:
    plan = make_recorded_plan(TrainingConfig(micro_batch=2, dp_replicate=2))
    export = load_target("ray").render(plan, "a")
    ast.parse(export.files["a.py"])
    for right, wrong in (
        ("'num_workers': 2", "'num_workers': 1"),
        ("'gloo'", "'mpi'"),
        ("MAX_FAILURES = 0", "MAX_FAILURES = 1"),
        ("GLOBAL_BATCH = 16", "GLOBAL_BATCH = 8"),
    ):
        assert export.files["a.py"].count(right) == 1
        changed = {**export.files, "a.py": export.files["a.py"].replace(right, wrong)}
        with pytest.raises(ExportError, match="reads back as"):
            load_target("ray").check(plan, Export(files=changed))
    changed = {**export.files, "a_training.py": export.files["a_training.py"].replace("RANKS = 2", "RANKS = 1")}
    with pytest.raises(ExportError, match="RANKS reads back as 1"):
        load_target("ray").check(plan, Export(files=changed))


def test_what_the_script_cannot_carry_is_refused(tmp_path: Path) -> None:
    plan = make_recorded_plan(TrainingConfig(micro_batch=2, pp=2, pp_microbatches=2))
    with pytest.raises(ExportError, match="pp=2") as error:
        export_plan(plan, "ray", tmp_path / "a.py")
    assert "torchrun" in str(error.value.hint) and not list(tmp_path.iterdir())
