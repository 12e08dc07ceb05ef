"""The text of the exported PyTorch script: what is refused, and what its own check and a linter see.

That it trains as the plan does is in tests/exports/test_pytorch_trains.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autoplan.errors import ExportError
from autoplan.planner.export.pytorch import ModelSummary, PytorchTarget, _refuse_other_names, settings
from autoplan.planner.export.run import export_plan, load_target
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import make_spec
from tests.recorded import make_plan
from tests.strategies.tiny import GPT2


def test_a_name_that_is_defined_twice_is_refused() -> None:
    plan = make_plan(TrainingConfig(micro_batch=4))
    export = PytorchTarget().render(plan, "train")
    export.files["train.py"] += "\n\ndef shifted_labels():\n    pass\n"
    with pytest.raises(ExportError, match="defines shifted_labels twice"):
        PytorchTarget().check(plan, export)


def test_what_the_script_cannot_carry_is_refused(tmp_path: Path) -> None:
    for plan in (
        make_plan(TrainingConfig(micro_batch=2, pp=2, pp_microbatches=2)),
        make_plan(workload=make_plan().workload.model_copy(update={"kind": "object"})),
    ):
        with pytest.raises(ExportError) as error:
            export_plan(plan, "pytorch", tmp_path / "train.py")
        assert error.value.exit_code == 6 and "plan.prepare" in str(error.value.hint)
    assert not list(tmp_path.iterdir())


def test_a_folder_without_weights_is_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    spec = make_spec(model=str(tmp_path), sequence_length=16, global_batch=16)
    plan = make_plan(TrainingConfig(micro_batch=4), workload=spec)
    assert settings(plan, ModelSummary(has_blocks=True))["MODEL_FOLDER"] == ""
    (tmp_path / "model.safetensors").touch()
    assert settings(plan, ModelSummary(has_blocks=True))["MODEL_FOLDER"] == str(tmp_path)


OTHER_NAMES = ["from autoplan import search", "from autoplan.errors import WorkloadError", "import autoplan.units"]


@pytest.mark.parametrize("line", OTHER_NAMES)
def test_a_file_that_imports_more_than_the_script_has_is_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    needed = "import autoplan\nfrom autoplan import LossSum, Workload\n"
    path.write_text(f"{needed}{line}\n\n\ndef mine():\n    return Workload()\n")
    spec = make_spec(model=f"{path}:mine", global_batch=16)
    with pytest.raises(ExportError, match=f"{path} imports autoplan") as error:
        PytorchTarget().render(make_plan(TrainingConfig(micro_batch=4), workload=spec), "train")
    assert line.split()[-1] in error.value.message and "__main__" in str(error.value.hint)


def test_a_file_that_imports_more_where_it_is_a_program_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def mine():\n    ...\n\n\nif __name__ == '__main__':\n    from autoplan import search\n")
    spec = make_spec(model=f"{path}:mine", global_batch=16)
    _refuse_other_names(make_plan(TrainingConfig(micro_batch=4), workload=spec))


def test_the_check_sees_a_wrong_setting() -> None:
    plan = make_plan(TrainingConfig(micro_batch=4))
    export = PytorchTarget().render(plan, "train")
    export.files["train.py"] = export.files["train.py"].replace("MICRO_BATCH = 4", "MICRO_BATCH = 2")
    with pytest.raises(ExportError, match="MICRO_BATCH reads back as 2"):
        PytorchTarget().check(plan, export)


ON_CUDA: dict[str, dict[str, Any]] = {
    "plain": {},
    "fused": {"loss": "fused", "precision": "bf16"},
    "compiled": {"loss": "fused", "compile": "model"},
    "states": {"offload": "optimizer"},
    "activations": {"offload": "activations", "precision": "bf16"},
    "shards": {"offload": "parameters", "dp_shard": 2},
    "states_of_shards": {"offload": "optimizer", "dp_shard": 2},
    "liger": {"kernels": "liger"},
}


def test_a_script_for_a_gpu_defines_every_name_that_it_uses(tmp_path: Path) -> None:
    for name, knobs in ON_CUDA.items():
        plan = make_plan(TrainingConfig(micro_batch=1, **knobs), device="cuda")
        target = load_target("pytorch")
        export = target.render(plan, "train")
        target.check(plan, export)
        (tmp_path / f"{name}.py").write_text(next(iter(export.files.values())))
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,F811,E9", "."]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
