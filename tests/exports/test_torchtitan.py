"""The recipe is read by torchtitan's own ConfigManager, which builds the model; planted mistakes are caught."""

from __future__ import annotations

import json
from pathlib import Path

from tests.exports.environments import needs_environment, run_python
from tests.planner.export.test_pretraining import plan_of

pytestmark = needs_environment("torchtitan")

CHECKS = r"""
import json, sys
from autoplan.errors import ExportError
from autoplan.planner.export.base import Export
from autoplan.planner.export.run import load_target
from autoplan.planner.plan.plan import Plan

found, target = {}, load_target("torchtitan")
for name, document, old, new in json.load(open(sys.argv[1])):
    plan = Plan.model_validate_json(document)
    files = target.render(plan, "recipe").files
    assert old in files["recipe.py"], (name, old)
    try:
        changed = files | {"recipe.py": files["recipe.py"].replace(old, new)}
        found[name] = list(target.check(plan, Export(files=changed)))
    except ExportError as error:
        found[name] = str(error)
print(json.dumps(found))
"""


def test_the_real_config_manager_reads_the_plan_back(tmp_path: Path) -> None:
    sharded = plan_of(tmp_path, dp_shard=4, precision="bf16", checkpointing="selective", compile="block")
    staged = {"pp": 2, "pp_microbatches": 2, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2, "tp": 2}
    one, other = sharded.model_dump_json(), plan_of(tmp_path, **staged).model_dump_json()
    rows = [
        ("sharded", one, "", ""),
        ("staged", other, "", ""),
        ("key", one, "max_norm=", "max_norms="),
        ("value", one, "seq_len=32", "seq_len=2048"),
        ("choice", one, "'always'", "'allways'"),
        ("optimizer", one, "'weight_decay': 0.0", "'weight_decay': 0.1"),
        ("graphs", other, "disable_cuda_graphs=True", "disable_cuda_graphs=False"),
        ("model", one, "recipe_model.json", "recipe.json"),
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "checks.py").write_text(CHECKS)
    done = run_python("torchtitan", [tmp_path / "checks.py", tmp_path / "rows.json"])
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["sharded"] == found["staged"] == []
    said = {
        "key": "refuses the recipe",
        "value": "training.seq_len reads back as 2048",
        "choice": "parallelism.fsdp_reshard_after_forward reads back as 'allways'",
        "optimizer": "optimizer_kwargs.weight_decay reads back as 0.1",
        "graphs": "CUDA graphs do not support pipeline parallelism",
        "model": "refuses the recipe",
    }
    for name, text in said.items():
        assert text in found[name], (name, found[name])
