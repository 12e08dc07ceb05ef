"""The target accelerate: its launcher reads the file back, FSDP2 trains as the plan does, and its companion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from autoplan.planner.export import accelerate
from autoplan.planner.export.run import load_target
from autoplan.planner.export.user_code import read_by_tool
from autoplan.processes import RankContext, Task, Zygote
from tests.exports.six_steps import WORKLOAD, make_plan
from tests.exports.train_export import load_module
from tests.exports.trained import differences, on_gpus

pytest.importorskip("accelerate")


@pytest.mark.exhaustive
@pytest.mark.parametrize("reshard", [True, False], ids=["ZeRO-3", "ZeRO-2"])
def test_its_fsdp2_trains_as_the_plan_does(reshard: bool, tmp_path: Path) -> None:
    """Over gloo, with accelerate told that the CPU is a GPU: it leaves FSDP off on CPUs."""
    knobs = {"dp_shard": 2, "reshard_after_forward": reshard, "checkpointing": "full"}
    found = differences(
        "accelerate", tmp_path, WORKLOAD, interleaved=True, with_prepare=False, pretend_gpus=True, **knobs
    )
    assert found == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "degrees",
    [
        {},
        {"dp_replicate": 8},
        {"dp_shard": 8, "reshard_after_forward": False},
        {"dp_shard": 8, "offload": "parameters"},
    ],
)
def test_the_launcher_finds_the_plan(degrees: dict[str, Any]) -> None:
    plan = on_gpus(micro_batch=1, precision="fp16", **degrees)
    text = next(iter(load_target("accelerate").render(plan, "export").files.values()))
    found = read_by_tool(f"{accelerate.__name__}:read_back_in_rank", (text,), tool="accelerate")
    assert {what: found.get(what) for what in accelerate.expected(plan)} == accelerate.expected(plan)


def test_the_batch_is_not_in_the_file_but_in_the_companion() -> None:
    export = load_target("accelerate").render(make_plan(checkpointing="full", compile="block"), "my-plan")
    text, module = export.files.values()
    assert list(export.files) == ["my-plan.yaml", "my_plan_companion.py"]
    assert not {"gradient_accumulation_steps", "gradient_clipping"} & set(yaml.safe_load(text))
    assert "ACCUMULATION = 4" in module and "MAX_GRAD_NORM = 0.1" in module and "weight_decay': 0.3" in module
    assert "Written for accelerate 1.15.0" in text and "Written for accelerate 1.15.0" in module


def started_by_no_launcher(context: RankContext, companion: str) -> str:
    """What a companion says in a plain process."""
    with pytest.raises(RuntimeError) as error:
        load_module(companion).make_accelerator()
    return str(error.value)


def test_a_companion_started_otherwise_says_so(tmp_path: Path, training_zygote: Zygote) -> None:
    _, module = load_target("accelerate").render(make_plan(dp_replicate=2), "export").files.values()
    companion = tmp_path / "export_companion.py"
    companion.write_text(module)
    task = Task(target=started_by_no_launcher, args=(str(companion),), total_deadline_s=60.0)
    (said,) = training_zygote.run(task).check().results
    assert "accelerate launch --config_file export.yaml" in said
