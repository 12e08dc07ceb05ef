"""Exports to json, yaml and transformers: the other trainer's own loader reads back the values of the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoplan.errors import ExportError, UsageError
from autoplan.planner.export import transformers
from autoplan.planner.export.run import TARGETS, export_plan, load_target
from autoplan.planner.export.transformers import TransformersTarget, read_back_arguments
from autoplan.planner.plan.key_tables import pick_table
from autoplan.strategies.config import TrainingConfig
from tests.exports.train_export import load_module
from tests.planner.export.test_bundle import Block
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


def test_a_file_that_is_there_is_never_overwritten_without_force(tmp_path: Path) -> None:
    plan, other = make_plan(), make_plan(CONFIGS[1])
    path = tmp_path / "args.yaml"
    export_plan(plan, "yaml", path)
    first = path.read_bytes()
    assert export_plan(plan, "yaml", path).paths == (path,), "the same export again changes nothing"
    with pytest.raises(UsageError, match="args.yaml is there already") as error:
        export_plan(other, "yaml", path)
    assert "--force" in error.value.hint and path.read_bytes() == first
    export_plan(other, "yaml", path, force=True)
    assert path.read_bytes() != first
    export_plan(plan, "yaml", "/dev/null")  # no file that could be lost


def test_a_companion_that_is_there_keeps_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransformersTarget, "check", lambda *_: ())
    companion = tmp_path / "args_companion.py"
    companion.write_text("# theirs\n")
    with pytest.raises(UsageError, match="args_companion.py is there already"):
        export_plan(make_plan(), "transformers", tmp_path / "args.json")
    assert [path.name for path in tmp_path.iterdir()] == ["args_companion.py"]
    companion.unlink()
    (tmp_path / "args.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="args.json is there already"):
        export_plan(make_plan(), "transformers", tmp_path / "args.json")
    assert len(export_plan(make_plan(), "transformers", tmp_path / "args.json", force=True).paths) == 2
    assert companion.read_text() != "# theirs\n" and not (tmp_path / "nowhere").exists()


def test_an_export_of_own_has_the_form_in_which_that_optimizer_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other trainers make the optimizer anew; the plan itself stays as it is."""
    monkeypatch.setattr(TransformersTarget, "check", lambda *_: ())
    plan = make_plan(TrainingConfig(micro_batch=2))
    assert plan.training is not None
    optim = {}
    for form in (None, "fused"):
        formed = plan.model_copy(update={"training": plan.training.model_copy(update={"step_form": form})})
        path = export_plan(formed, "transformers", tmp_path / f"{form}.json").paths[0]
        optim[form] = "fused" in path.read_text()
        assert (
            "optimizer_step: fused" not in export_plan(formed, "yaml", tmp_path / f"{form}.yaml").paths[0].read_text()
        )
    assert optim == {None: False, "fused": True}


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

    def read_and_keep(text: str, tool: str) -> dict[str, Any]:
        found[text] = read_back_arguments(text, tool)
        return found[text]

    monkeypatch.setattr(transformers, "read_back_arguments", read_and_keep)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.describe().replace(" ", ","))
def test_training_arguments_are_read_back_by_the_real_class(
    config: TrainingConfig, read_back: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    plan = make_plan(config, device="cuda" if config.precision == "fp16" else "cpu")
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
        exported = export_plan(make_plan(config, device="cuda"), "transformers", tmp_path / f"{sync}.json")
        real = read_back[exported.paths[0].read_text()]
        plugin_options[sync] = real.get("accelerator_config", {}).get("gradient_accumulation_kwargs")
        assert "gradient_sync" not in " ".join(exported.not_carried)
    assert plugin_options == {"last": None, "every": {"sync_each_batch": True}}


def test_what_is_not_carried_is_in_the_companion(tmp_path: Path) -> None:
    export = TransformersTarget().render(make_plan(CONFIGS[3]), "args")
    (_, module) = export.files.values()
    assert "NOT CARRIED: loss=fused: with the Trainer" in module
    assert "THREADS = 2" in module and "torch.set_num_threads(THREADS)" in module


def test_the_companion_prepares_a_model(tmp_path: Path) -> None:
    import torch

    export = TransformersTarget().render(make_plan(), "args")
    path = tmp_path / "args_companion.py"
    path.write_text(export.files["args_companion.py"])
    module = load_module(path)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
            self.config, self._supports_sdpa, self.attention = object(), True, ""

        def set_attn_implementation(self, name: str) -> None:
            self.attention = name

    model = module.prepare_model(Model())
    assert model.attention == "sdpa" and model.blocks[0]._compiled_call_impl is not None


@pytest.mark.slow
def test_a_planted_unknown_key_is_caught() -> None:
    with pytest.raises(ExportError, match="refuses"):
        read_back_arguments(json.dumps({"output_dir": "x", "activation_chekpointing": True}), "transformers")


def test_older_versions_have_the_older_key() -> None:
    assert pick_table("transformers", "5.23.0")["keys"]["checkpointing"] == "activation_checkpointing"
    assert pick_table("transformers", "4.57.1")["keys"]["checkpointing"] == "gradient_checkpointing"
    with pytest.raises(ExportError, match="no key table"):
        pick_table("transformers", "3.0")


@pytest.mark.parametrize("to", ["transformers", "accelerate", "deepspeed", "lightning", "fabric"])
def test_degrees_that_a_tool_cannot_run_are_refused(to: str, tmp_path: Path) -> None:
    for what, degrees in (
        ("tensor parallelism", {"tp": 2}),
        ("pipeline parallelism", {"pp": 2, "pp_microbatches": 2}),
        ("replicas of shards", {"dp_shard": 2, "dp_replicate": 2}),
    ):
        if (to, what) == ("accelerate", "replicas of shards"):
            continue  # which has them
        plan = make_plan(TrainingConfig(micro_batch=2, **degrees), device="cuda")
        with pytest.raises(ExportError, match=f"cannot run {what}") as error:
            export_plan(plan, to, tmp_path / "a.json")
        assert error.value.exit_code == 6 and not list(tmp_path.iterdir())
        assert "plan.prepare()" in str(error.value.hint) and "Or search with fix=" in str(error.value.hint)


def test_the_help_names_every_target() -> None:
    from autoplan.cli import export as command

    assert [name for name in TARGETS if name not in Path(command.__file__).read_text()] == []


@pytest.mark.parametrize("to", ["transformers", "trl", "accelerate", "deepspeed"])
def test_a_companion_can_be_imported_and_finds_its_file(to: str, tmp_path: Path) -> None:
    for stem, module in (("2026-plan.b", "_2026_plan_b_companion.py"), ("plän x", "pl_n_x_companion.py")):
        first, companion = load_target(to).render(make_plan(), stem).files
        assert companion == module and module.removesuffix(".py").isidentifier()
        assert first == stem + load_target(to).suffix
    with pytest.raises(UsageError, match="does not end in") as error:
        export_plan(make_plan(), to, tmp_path / "args.txt")
    assert "args" + load_target(to).suffix in error.value.hint and not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["transformers", "trl", "accelerate"])
def test_shards_on_a_cpu_are_refused_where_accelerate_would_leave_them_out(to: str) -> None:
    with pytest.raises(ExportError, match="shards on a CPU") as error:
        load_target(to).render(make_plan(TrainingConfig(micro_batch=2, dp_shard=2)), "args")
    assert "deepspeed" in error.value.hint


@pytest.mark.parametrize("to", ["transformers", "trl"])
def test_shards_that_the_trainer_sums_in_bf16_are_named(to: str) -> None:
    texts = {}
    for precision in ("fp32", "bf16"):
        config = TrainingConfig(micro_batch=2, dp_shard=2, precision=precision)
        texts[precision] = " ".join(load_target(to).render(make_plan(config, device="cuda"), "args").not_carried)
    assert "gradients that shards sum in fp32" in texts["bf16"] and "sums them in bf16" in texts["bf16"]
    assert "shards sum" not in texts["fp32"]


@pytest.mark.parametrize("to", ["transformers", "trl", "accelerate"])
def test_fp16_on_a_cpu_is_refused_where_accelerate_would_leave_it_out(to: str) -> None:
    plan = TrainingConfig(micro_batch=2, precision="fp16")
    with pytest.raises(ExportError, match="leaves fp16 out on a CPU") as error:
        load_target(to).render(make_plan(plan), "args")
    assert "precision=bf16" in error.value.flag_hint and "pytorch" in error.value.hint
    settings = yaml.safe_load(next(iter(load_target(to).render(make_plan(plan, device="cuda"), "args").files.values())))
    assert settings.get("fp16") is True or settings["mixed_precision"] == "fp16"


@pytest.mark.parametrize("to", ["transformers", "trl", "accelerate"])
def test_an_fp32_plan_compiles_where_accelerate_does_not_switch_tf32_on(to: str) -> None:
    """accelerate does so for a compiler among its own settings, without mixed precision, on CUDA."""
    fp32, bf16 = (TrainingConfig(micro_batch=2, compile="model", precision=p) for p in ("fp32", "bf16"))
    first, module = load_target(to).render(make_plan(fp32, device="cuda"), "args").files.values()
    settings = yaml.safe_load(first)  # which reads JSON too
    assert not settings.get("torch_compile") and "dynamo_config" not in settings
    assert "model.compile(" in module
    if to != "accelerate":
        other = next(iter(load_target(to).render(make_plan(bf16), "args").files.values()))
        assert yaml.safe_load(other)["torch_compile"]


def test_the_head_says_what_the_workload_trains_with() -> None:
    for to in ("transformers", "trl", "accelerate", "deepspeed"):
        text = " ".join(list(load_target(to).render(make_plan(), "args").files.values())[-1].split("\n#  "))
        for said in ("clipping norm 1.0", "schedule none", "seed 0", "weight decay by parameter group", "dropout"):
            assert said in text, (to, said)
        assert f"Written for {to}" in text
