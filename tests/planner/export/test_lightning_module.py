"""The modules for Lightning: what is refused, what they say is not carried, and what the translation gives."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from autoplan.errors import ExportError
from autoplan.planner.export.run import export_plan, load_target
from autoplan.planner.plan.key_tables import installed_version, pick_table
from autoplan.planner.plan.lightning_arguments import LightningArguments, lightning_arguments
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import spec_from_objects
from tests.recorded import make_plan
from tests.strategies.tiny import classifier


def text_of(target: str, device: str = "cpu", **knobs: Any) -> tuple[str, str]:
    """The module, and what is not carried."""
    config = TrainingConfig(**({"micro_batch": 2} | knobs))
    export = load_target(target).render(make_plan(config, device=device), "plan")
    (text,) = export.files.values()
    ast.parse(text)
    return text, " ".join(export.not_carried)


def arguments(device: str = "cpu", kind: Any = "trainer", norm: float | None = 1.0, **knobs: Any) -> LightningArguments:
    config = TrainingConfig(**({"micro_batch": 2} | knobs))
    return lightning_arguments(config, device=device, accumulation=3, max_grad_norm=norm, kind=kind)


def test_the_arguments_of_a_trainer_and_of_fabric() -> None:
    several = arguments("cuda", precision="tf32", dp_replicate=4, batch_norm="sync")
    assert several.strategy == "DDPStrategy" and not several.plugin_options
    assert several.strategy_options == {"gradient_as_bucket_view": True, "broadcast_buffers": False}
    assert several.values == {
        "accelerator": "cuda",
        "devices": 4,
        "precision": "32-true",
        "accumulate_grad_batches": 3,
        "gradient_clip_val": 1.0,
        "gradient_clip_algorithm": "norm",
        "sync_batchnorm": True,
    }
    assert arguments(kind="fabric", norm=None).values == {
        "accelerator": "cpu",
        "devices": 1,
        "strategy": "auto",
        "precision": "32-true",
    }
    assert arguments(precision="fp16").plugin_options == {"precision": "16-mixed", "device": "cpu"}
    assert arguments("cuda", precision="fp16").values["precision"] == "16-mixed"


@pytest.mark.parametrize("target", ["lightning", "fabric"])
def test_shards_in_fp16_are_refused(target: str) -> None:
    with pytest.raises(ExportError, match="no fp16 autocast") as error:
        text_of(target, dp_shard=2, precision="fp16")
    assert "plan.prepare()" in error.value.hint


def test_what_is_not_carried_is_said_in_the_file() -> None:
    for target in ("lightning", "fabric"):
        text, not_carried = text_of(target, "cuda", loss="fused", precision="fp16", optimizer_step="fused")
        for part in ("the fused loss", "a step that fp16 skips", "does not clip fp16 gradients for fused optimizers"):
            assert part in not_carried
        assert text.count("# NOT CARRIED: ") == 3
        assert "'fused': True" not in text
    text, not_carried = text_of("lightning", compile="model")
    assert "model.compile(**compile_options())" in text and "and not its loss" in not_carried
    assert text_of("fabric")[1] == ""


def test_a_plan_that_does_not_know_what_it_trains_with_says_so() -> None:
    plan = make_plan(TrainingConfig(micro_batch=2), workload=spec_from_objects(classifier()), accumulation=4)
    export = load_target("lightning").render(plan, "plan")
    assert "which this plan does not know" in export.not_carried[0]
    (text,) = export.files.values()
    assert "make_optimizers" not in text and "gradient_clip_val" not in text and '{"interval": "step"}' in text


def test_the_default_file_can_be_imported(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exported = export_plan(make_plan(), "fabric")
    assert [path.name for path in exported.paths] == ["plan_fabric.py"]
    if installed_version("lightning") is None:
        assert "install lightning" in exported.notes[0]


def test_a_version_outside_the_tables_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_table("lightning", "2.6.6")["trainer"]["accumulation"] == "accumulate_grad_batches"
    assert pick_table("lightning", None)["verified"] == "2.6.6"
    with pytest.raises(ExportError, match="no key table fits lightning 2.1"):
        pick_table("lightning", "2.1.4")
    monkeypatch.setattr("autoplan.planner.export.lightning.installed_version", lambda package: "2.7.0")
    assert "; 2.7.0 is installed where it was written" in text_of("lightning")[0]
