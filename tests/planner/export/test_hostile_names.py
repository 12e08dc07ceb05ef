"""Names and values from a plan or a downloaded config.json stay data in every export: nothing of them runs."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoplan.planner.export.base import comment
from autoplan.planner.export.run import export_plan, load_target
from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.plan import Environment
from autoplan.planner.records.plan_file import shown_text
from autoplan.report.html import SORT, render_page
from autoplan.strategies.analysis.training_facts import GroupFacts, ScheduleFacts, TrainingFacts
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import make_spec
from tests.recorded import make_plan
from tests.strategies.tiny import GPT2

MARK = "__import__('pathlib').Path('MARK').touch()"
NAMES = {
    "quotes": f'x"""\n{MARK}\n"""',
    "single quotes": f"x'''\n{MARK}\n'''",
    "backslash": "x\\",
    "newline": f"x\n{MARK}",
    "carriage return": f"x\r{MARK}\r",
    "form feed": f"x\x0c{MARK}",
    "line separator": f"x\u2028{MARK}\u2029{MARK}",
    "next line": f"x\x85{MARK}",
    "yaml": "x\u2028injected: 1\u2028\x85injected: 1\ninjected: 1",
    "null": "x\x00",
    "percent": "100%(prog)s %s %d",
    "braces": "{MARK}{0}{{",
    "coding": "x coding: utf-7 +AAo-" + MARK.replace("'", "+ACc-"),
    "html": "</title><script>alert(1)</script>\"'><img src=x onerror=alert(1)>",
    "escape": "\x1b]0;title\x07\x1b[2J",
    "right to left": "x\u202e}\u2066",
}


def plan_named(name: str, folder: Path, fields: dict[str, Any] | None = None, **given: Any) -> Plan:
    path = folder / "config.json"
    path.write_text(json.dumps(GPT2 | {"n_layer": 2, "n_embd": 16, "n_head": 2} | (fields or {})))
    spec = make_spec(model=str(path), sequence_length=16, global_batch=16).model_copy(update={"name": name})
    environment = Environment(autoplan=name, torch=name, python=name, transformers=None, platform=name)
    config = TrainingConfig(micro_batch=4, checkpointing="full")
    return make_plan(config, workload=spec, environment=environment, study=name, created=name, **given)


@pytest.fixture(scope="module")
def model_summary_once(tmp_path_factory: pytest.TempPathFactory):
    """The summary of the tiny model, made once: names do not change it."""
    from autoplan.planner.export import pytorch as pytorch_script

    found = pytorch_script.summarize_model(plan_named("x", tmp_path_factory.mktemp("model")).workload)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pytorch_script, "summarize_model", lambda spec: found)
        yield


ALL = ("pytorch", "ray", "transformers", "trl", "accelerate", "deepspeed", "lightning", "fabric", "yaml", "json")


def as_read(plan: Plan, target: str) -> dict[str, Any]:
    """The files of an export as Python reads them (their encoding comments count, other comments do not), or YAML."""
    return {
        file: ast.dump(ast.parse(text.encode())) if file.endswith(".py") else yaml.safe_load(text)  # JSON too
        for file, text in load_target(target).render(plan, "out").files.items()
    }


@pytest.fixture(scope="module")
def plain(model_summary_once: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By target, what is read where the names are plain."""
    plan = plan_named("plain", tmp_path_factory.mktemp("plain"))
    return {target: as_read(plan, target) for target in ALL}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_name_stays_in_its_comment_and_changes_no_setting(
    name: str, plain: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    plan = plan_named(name, tmp_path)
    for target in ALL:
        found = as_read(plan, target)
        if target not in ("yaml", "json"):
            assert found == plain[target]
            continue
        ((file, document),) = found.items()
        assert document.keys() == plain[target][file].keys()
        assert (document["workload"]["name"], document["plan"]["study"]) == (shown_text(name),) * 2


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_comment_is_a_comment_in_every_language(name: str) -> None:
    lines = comment([name, f"{name} " * 20]).splitlines()
    assert all(line.startswith("# ") or line == "#" for line in lines)
    assert all(ord(character) >= 32 and character.isprintable() for line in lines for character in line)


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_the_page_has_names_as_text(name: str, tmp_path: Path) -> None:
    from html.parser import HTMLParser

    class Tags(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[str] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.found += [tag, *(key for key, _ in attrs)]

    page = render_page(plan_named(name, tmp_path, notes=(name,)))
    parser = Tags()
    parser.feed(page)
    assert not {"img", "onerror", "onload", "iframe"} & set(parser.found)
    assert parser.found.count("script") == 1 and f"<script>{SORT}</script>" in page, "the page's own, and no other"


def test_values_of_a_downloaded_configuration_are_data(tmp_path: Path) -> None:
    """Each of them as a field of config.json: the script trains, and nothing of them runs."""
    fields = {f"field_{number}": name for number, name in enumerate(NAMES.values())}
    fields |= {"injected": f"'''+str({MARK})+'''", "quote'\"\n\\": "'\"\n\\", "limit": float("inf")}
    plan = plan_named("x", tmp_path, fields)
    (script,) = export_plan(plan, "pytorch", tmp_path / "out.py").paths
    command = [sys.executable, str(script), "--steps", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "step 1: loss" in done.stdout, done.stderr[-2000:]
    assert not (tmp_path / "MARK").exists()


def training(**given: Any) -> TrainingFacts:
    group = GroupFacts(tensors=2, elements=10, options={"lr": 0.1, "weight_decay": 0.1, "betas": [0.9, 0.99]})
    facts = {
        "optimizer": "torch.optim.adamw.AdamW",
        "groups": (group,),
        "max_grad_norm": 1.0,
        "schedule": None,
        "seed": 0,
    }
    return TrainingFacts(**(facts | given))


def schedule(**given: Any) -> ScheduleFacts:
    facts = {"kind": "torch.optim.lr_scheduler.StepLR", "options": {"step_size": 1}, "learning_rates": ((0.1,),)}
    return ScheduleFacts(**(facts | given))


HOSTILE_TRAINING = {
    "optimizer": training(optimizer=f"torch.optim.x.SGD({MARK})#"),
    "optimizer's end": training(optimizer=f"torch.optim.adamw.AdamW\n{MARK}"),
    "schedule": training(schedule=schedule(kind=f"torch.optim.lr_scheduler.StepLR({MARK})#")),
    "schedule's option": training(schedule=schedule(options={f"step_size=1, x={MARK}, y": 1})),
    "schedule's function": training(
        schedule=schedule(kind="torch.optim.lr_scheduler.LambdaLR", function=f"x({MARK})#")
    ),
    "schedule's value": training(schedule=schedule(options={"step_size": f"1)\n{MARK}\n("})),
    "group's name": training(groups=(training().groups[0].model_copy(update={"names": (f"'))\n{MARK}\n",)}),)),
    "group's option": training(
        groups=(training().groups[0].model_copy(update={"options": {"lr": 0.1, f"'\n{MARK}": 1}}),)
    ),
}


@pytest.mark.parametrize("to", ["transformers", "trl", "accelerate", "deepspeed"])
@pytest.mark.parametrize("case", HOSTILE_TRAINING)
def test_the_companion_calls_no_name_from_a_plan(case: str, to: str, tmp_path: Path) -> None:
    plan = plan_named("x", tmp_path, training=HOSTILE_TRAINING[case])
    _, module = load_target(to).render(plan, "out").files.values()
    tree = ast.parse(module.encode())
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert "__import__" not in names
    called = {node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and hasattr(node.func, "attr")}
    assert "touch" not in called
