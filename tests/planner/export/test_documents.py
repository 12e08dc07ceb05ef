"""Exports to json, yaml and transformers: the other trainer's own loader reads back the values of the plan."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoplan.errors import ExportError, UsageError
from autoplan.planner.export import transformers_arguments
from autoplan.planner.export.run import TARGETS, export_plan
from autoplan.planner.export.transformers_arguments import TransformersTarget, key_table, read_back_arguments
from autoplan.strategies.config import TrainingConfig
from tests.recorded import make_plan


@pytest.mark.parametrize(("to", "load"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_documents_read_back(to, load, tmp_path: Path) -> None:
    plan = make_plan()
    (path,) = export_plan(plan, to, tmp_path / "out").paths
    document = load(path.read_text())
    assert TrainingConfig.model_validate(document["config"]) == plan.config
    assert document["accumulation"] * document["config"]["micro_batch"] == document["workload"]["global_batch"]
    assert document["measured"]["tokens_per_s"]["median"] == plan.measurement.tokens_per_s.median


def test_the_yaml_has_the_origin_of_the_plan(tmp_path: Path) -> None:
    (path,) = export_plan(make_plan(), "yaml", tmp_path / "plan.yaml").paths
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any("409.6 tokens/s" in line for line in head) and any("Test CPU" in line for line in head)


def test_an_unknown_target_names_the_most_similar_one() -> None:
    with pytest.raises(UsageError) as error:
        export_plan(make_plan(), "pytorhc")
    assert error.value.hint.startswith("Did you mean pytorch?") and all(name in error.value.hint for name in TARGETS)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        export_plan(make_plan(), "json", blocked / "plan.json")


CONFIGS = [
    TrainingConfig(micro_batch=4, precision="bf16", compile="block", attention="sdpa", checkpointing="every_2"),
    TrainingConfig(micro_batch=2, compile="model", compile_mode="default", optimizer_step="fused"),
    TrainingConfig(micro_batch=16, checkpointing="full", precision="fp16"),
    TrainingConfig(micro_batch=8, checkpointing="selective", loss="fused", threads=2),
]


@pytest.fixture
def read_back(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """What the real class read in the check of an export: text to values. The class is loaded once per export."""
    found: dict[str, dict[str, Any]] = {}

    def read_and_keep(text: str) -> dict[str, Any]:
        found[text] = read_back_arguments(text)
        return found[text]

    monkeypatch.setattr(transformers_arguments, "read_back_arguments", read_and_keep)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.describe().replace(" ", ","))
def test_training_arguments_are_read_back_by_the_real_class(
    config: TrainingConfig, read_back: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    plan = make_plan(config)
    exported = export_plan(plan, "transformers", tmp_path / "args.json")
    real = read_back[exported.paths[0].read_text()]
    assert real["per_device_train_batch_size"] == config.micro_batch
    assert real["gradient_accumulation_steps"] == plan.accumulation
    assert (real["bf16"], real["fp16"]) == (config.precision == "bf16", config.precision == "fp16")
    assert real["activation_checkpointing"] == (config.checkpointing != "none")
    assert real["torch_compile"] == (config.compile == "model")
    assert real["learning_rate"] == 0.0005 and real["max_grad_norm"] == 1.0
    assert ("fused" in real["optim"]) == (config.optimizer_step == "fused")
    if config.checkpointing == "every_2":
        assert real["activation_checkpointing_kwargs"]["every_n_layers"] == 2
    not_carried = " ".join(exported.not_carried)
    assert ("selective" in not_carried) == (config.checkpointing == "selective")
    assert ("fused loss" in not_carried) == (config.loss == "fused")


@pytest.mark.slow
def test_gradient_sync_at_every_micro_step_is_set_in_accelerate(
    read_back: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """What the real class hands to accelerate's GradientAccumulationPlugin."""
    plugin_options = {}
    for sync in ("last", "every"):
        config = TrainingConfig.model_validate({"micro_batch": 2, "dp_shard": 2, "gradient_sync": sync})
        exported = export_plan(make_plan(config), "transformers", tmp_path / f"{sync}.json")
        real = read_back[exported.paths[0].read_text()]
        plugin_options[sync] = real.get("accelerator_config", {}).get("gradient_accumulation_kwargs")
        assert "gradient_sync" not in " ".join(exported.not_carried)
    assert plugin_options == {"last": None, "every": {"sync_each_batch": True}}


def test_what_is_not_carried_is_in_the_companion(tmp_path: Path) -> None:
    export = TransformersTarget().render(make_plan(CONFIGS[3]), "args")
    (_, module) = export.files.values()
    assert "NOT CARRIED: the fused loss" in module and "set_num_threads(2)" in module


def test_the_companion_prepares_a_model(tmp_path: Path) -> None:
    import torch

    export = TransformersTarget().render(make_plan(), "args")
    path = tmp_path / "args_companion.py"
    path.write_text(export.files["args_companion.py"])
    spec = importlib.util.spec_from_file_location("args_companion", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
            self.attention = ""

        def set_attn_implementation(self, name: str) -> None:
            self.attention = name

    model = module.prepare_model(Model())
    assert model.attention == "sdpa" and model.blocks[0]._compiled_call_impl is not None


@pytest.mark.slow
def test_a_planted_unknown_key_is_caught() -> None:
    with pytest.raises(ExportError, match="refuses"):
        read_back_arguments(json.dumps({"output_dir": "x", "activation_chekpointing": True}))


def test_older_versions_have_the_older_key() -> None:
    assert key_table("5.23.0")["keys"]["checkpointing"] == "activation_checkpointing"
    assert key_table("4.57.1")["keys"]["checkpointing"] == "gradient_checkpointing"
    with pytest.raises(ExportError, match="no key table"):
        key_table("3.0")


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"pp": 2}, {"dp_shard": 2, "dp_replicate": 2}])
def test_degrees_that_training_arguments_cannot_express_are_refused(degrees: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(ExportError) as error:
        export_plan(make_plan(TrainingConfig(micro_batch=2, **degrees)), "transformers", tmp_path / "a.json")
    assert error.value.exit_code == 6 and not list(tmp_path.iterdir())
