"""The recipe for torchtitan and the flags for Megatron: what they say, refuse and do not carry; planted mistakes."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from autoplan.errors import ExportError
from autoplan.planner.export.base import Export
from autoplan.planner.export.megatron import MegatronTarget, flags, read_flags
from autoplan.planner.export.run import load_target
from autoplan.planner.plan.key_tables import pick_table
from autoplan.planner.plan.plan import Plan
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import make_spec, spec_from_objects
from tests.recorded import LANGUAGE_TRAINING, make_plan
from tests.strategies.tiny import classifier

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "tie_word_embeddings": False,
    "auto_map": {"AutoConfig": "downloaded.Code"},
}
TARGETS = ["torchtitan", "megatron"]


def plan_of(folder: Path, fields: dict[str, Any] | None = None, device: str = "cuda", **knobs: Any) -> Plan:
    path = folder / "config.json"
    path.write_text(json.dumps(LLAMA | (fields or {})))
    spec = make_spec(model=str(path), sequence_length=32, global_batch=32)
    config = TrainingConfig(**({"micro_batch": 1} | knobs))
    accumulation = config.accumulation(32)
    return make_plan(config, workload=spec, device=device, accumulation=accumulation, training=LANGUAGE_TRAINING)


def text_of(target: str, plan: Plan) -> tuple[str, str]:
    """The first file, and what is not carried."""
    export = load_target(target).render(plan, "plan")
    return next(iter(export.files.values())), " ".join(export.not_carried)


@pytest.mark.parametrize("target", TARGETS)
def test_only_language_models_for_gpus(target: str, tmp_path: Path) -> None:
    plan = make_plan(TrainingConfig(micro_batch=2), workload=spec_from_objects(classifier()), accumulation=4)
    bert = make_spec(model="bert-base", sequence_length=32, global_batch=32)
    cases = {
        "is Python code": plan,
        "is a masked model": make_plan(TrainingConfig(micro_batch=2), workload=bert, device="cuda"),
        "the plan is for cpu": plan_of(tmp_path, device="cpu"),
    }
    for rule, refused in cases.items():
        with pytest.raises(ExportError, match=rule) as error:
            text_of(target, refused)
        assert "Nearest targets: pytorch, lightning" in error.value.hint


def test_torchtitan_has_no_tied_head_and_not_every_model(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="torchtitan trains two"):
        text_of("torchtitan", plan_of(tmp_path, {"tie_word_embeddings": True}))
    gpt2 = make_spec(model="gpt2", sequence_length=32, global_batch=32)
    with pytest.raises(ExportError, match="does not build models of type gpt2"):
        text_of("torchtitan", make_plan(TrainingConfig(micro_batch=2), workload=gpt2, device="cuda"))
    with pytest.raises(ExportError, match="no Python name"):
        load_target("torchtitan").render(plan_of(tmp_path), "plan-titan")


def test_a_recipe_says_the_plan(tmp_path: Path) -> None:
    knobs = {"pp": 2, "pp_microbatches": 4, "micro_batch": 2, "precision": "bf16", "checkpointing": "full"}
    plan = plan_of(tmp_path, **knobs)
    export = load_target("torchtitan").render(plan, "recipe")
    text, model = export.files["recipe.py"], json.loads(export.files["recipe_model.json"])
    ast.parse(text)
    assert "auto_map" not in model and model["architectures"] == ["LlamaForCausalLM"] and model["vocab_size"] == 128
    for part in (
        "local_batch_size=8,",  # which torchtitan splits into micro-batches
        "pipeline_parallel_microbatch_size=2,",
        "disable_cuda_graphs=True,",  # they are on by default, and pipelines refuse them
        "activation_checkpoint=FullAC.Config()",
        "Written for torchtitan 0.3.0",
    ):
        assert part in text
    graphs, not_carried = text_of("torchtitan", plan_of(tmp_path, compile="model", compile_mode="reduce-overhead"))
    assert "disable_cuda_graphs=False," in graphs and "its own CUDA graphs" in not_carried


def test_versions_outside_the_tables_are_refused() -> None:
    assert pick_table("torchtitan", "0.3.1") == pick_table("torchtitan", None)
    for version in ("0.2.2", "0.4.0"):
        with pytest.raises(ExportError, match=f"no key table fits torchtitan {version}"):
            pick_table("torchtitan", version)


def test_megatron_flags_are_read_back_and_a_planted_mistake_is_caught(tmp_path: Path) -> None:
    plan, target = plan_of(tmp_path, dp_shard=2, precision="bf16", checkpointing="every_2"), MegatronTarget()
    (text,) = target.render(plan, "plan").files.values()
    target.check(plan, Export(files={"plan.sh": text}))
    for old, new, rule in [
        ("--clip-grad 1.0", "--clip-grad 0.0", "--clip-grad reads back as 0.0"),
        ("--clip-grad 1.0", "", "--clip-grad reads back as None"),
        ("--micro-batch-size", "--micro-batch-sise", "--micro-batch-sise is no flag of Megatron"),
        ("--num-layers 4", "--num-layers four", "--num-layers takes int"),
        ("--position-embedding-type rope", "--position-embedding-type ropes", "takes one of"),
        ("--bf16", "--fp16", "--fp16 reads back as True|--bf16 reads back as None"),
    ]:
        assert old in text
        with pytest.raises(ExportError, match=rule):
            target.check(plan, Export(files={"plan.sh": text.replace(old, new)}))


def test_bash_reads_the_array_of_flags(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, tp=2)
    text, _ = text_of("megatron", plan)
    path = tmp_path / "plan.sh"
    path.write_text(text)
    command = f'source {path}; printf "%s\\n" "${{MEGATRON_FLAGS[@]}}" "$CUDA_DEVICE_MAX_CONNECTIONS"'
    words = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout.split()
    assert words.pop() == "1" and words[words.index("--tensor-model-parallel-size") + 1] == "2"
    table = pick_table("megatron", None)["flags"]
    assert read_flags("\nMEGATRON_FLAGS=(\n" + " ".join(words) + "\n)", table) == flags(plan)[0]


def test_megatron_keeps_the_model_and_its_defaults_do_not_creep_in(tmp_path: Path) -> None:
    given, _ = flags(plan_of(tmp_path, dp_shard=2))
    assert given["--use-torch-fsdp2"] is True and given["--untie-embeddings-and-output-weights"] is True
    tied, not_carried = flags(plan_of(tmp_path, {"tie_word_embeddings": True}, dp_shard=2))
    assert "--use-torch-fsdp2" not in tied and tied["--use-distributed-optimizer"] is True
    assert "--untie-embeddings-and-output-weights" not in tied
    assert any("an output head that is the embedding" in text for text in not_carried)
    table = pick_table("megatron", None)["flags"]
    for flag in ("--clip-grad", "--attention-dropout", "--hidden-dropout", "--weight-decay"):
        assert table[flag]["default"] and flag in given, "a default that is not nothing is written over"
    model, _ = flags(make_plan(TrainingConfig(micro_batch=2), device="cuda"))
    assert model["--hidden-dropout"] == 0.1 and model["--openai-gelu"] is True and model["--ffn-hidden-size"] == 3072
    for fields, rule in [
        ({"model_type": "phi3"}, "no flags of Megatron are known for models of type phi3"),
        ({"hidden_act": "gelu"}, "another activation than SiLU"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "type yarn"),
    ]:
        with pytest.raises(ExportError, match=rule):
            flags(plan_of(tmp_path, fields))
