"""What a plan can run: nothing of what it carries, and the file that it names only for who trusts it."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import NamedTuple

import cloudpickle
import pytest
import torch

from autoplan.errors import ExportError, PlanError, UsageError, WorkloadError
from autoplan.planner.export.run import TARGETS, export_plan
from autoplan.planner.plan.plan import Plan
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import make_spec, spec_from_objects
from autoplan.strategies.workloads.spec import WorkloadSpec
from tests.recorded import make_plan
from tests.strategies.tiny import Classifier, classifier, image_batch, image_loss, sgd

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.filterwarnings("ignore:the plan was found on other hardware")

# A workload that leaves a mark where it is imported.
SOURCE = """
from pathlib import Path

import torch
from torch import nn

import autoplan
from autoplan.strategies.workloads.workload import LossSum

Path(__file__).with_name("MARK").touch()
WIDTH, RATE = 8, 0.01


def workload(global_batch: int = 16) -> autoplan.Workload:
    def make_batch(count, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(count, 12, generator=generator)
        return {"image": image, "label": (image.sum(1) > 0).long()}

    def loss(model, batch):
        logits = model(batch["image"])
        return LossSum(nn.functional.cross_entropy(logits, batch["label"], reduction="sum"), len(batch["label"]))

    return autoplan.Workload(
        name="tiny",
        build_model=lambda: nn.Sequential(nn.Linear(12, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)),
        make_batch=make_batch,
        loss=loss,
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
        global_batch=global_batch,
    )
"""


class Case(NamedTuple):
    """A plan file that names code, and the mark that the code leaves."""

    plan: Path
    source: Path
    mark: Path

    def load(self) -> Plan:
        return Plan.load(self.plan)


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """A plan from elsewhere, in a folder with the file that it names; the user's state is empty."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "train.py"
    source.write_text(SOURCE)
    spec = make_spec(model=f"{source}:workload", global_batch=16)
    plan = make_plan(TrainingConfig(micro_batch=4), workload=spec)
    return Case(plan.save(tmp_path / "plan.json"), source, tmp_path / "MARK")


VERBS = {
    "verify": ("verify", "plan.json", "--budget", "1s"),
    "run": ("run", "plan.json", "--steps", "1"),
    "export": ("export", "plan.json", "--to", "pytorch", "--out", "out.py"),
}


class Touch:
    """Unpickles as a call of a command."""

    def __init__(self, path: Path) -> None:
        self.command = f"touch {path}"

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (self.command,)


def with_payload(path: Path, payload: str) -> None:
    document = json.loads(path.read_text())
    document["workload"] |= {"kind": "object", "reference": "x", "payload": payload}
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("form", ["inline", "file"])
def test_a_pickle_in_a_plan_is_refused(named: Case, cli, tmp_path: Path, form: str) -> None:
    data = cloudpickle.dumps(Touch(named.mark))
    (tmp_path / "data").write_bytes(data)
    with_payload(
        named.plan, f"inline:{base64.b64encode(data).decode()}" if form == "inline" else f"file:{tmp_path}/data"
    )
    for command in (*VERBS.values(), ("show", "plan.json"), ("report", "plan.json")):
        ended = cli(*command)
        assert ended.code == 2 and "payload" in ended.err, command
    with pytest.raises(PlanError, match="payload"):
        named.load()
    with pytest.raises(ValueError, match="payload"):
        Plan.model_validate_json(named.plan.read_text())
    assert not named.mark.exists()


@pytest.mark.parametrize("verb", VERBS)
def test_a_file_that_a_plan_names_does_not_run(named: Case, cli, verb: str) -> None:
    ended = cli(*VERBS[verb])
    assert ended.code == 2 and "code that would run here" in ended.err
    assert "--model train.py:workload" in ended.err and not named.mark.exists()


def test_showing_and_the_exports_of_data_run_nothing(named: Case, cli) -> None:
    commands = [("show", "plan.json", "--trials"), ("explain", "plan.json"), ("report", "plan.json")]
    commands += [("export", "plan.json", "--to", to, "--out", f"out.{to}") for to in ("json", "yaml")]
    for command in commands:
        assert cli(*command).code == 0, command
    assert not named.mark.exists()


def test_a_function_that_the_user_names_runs(named: Case, cli) -> None:
    assert cli(*VERBS["run"], "--model", "train.py").code == 2
    assert not named.mark.exists()
    ended = cli(*VERBS["run"], "--model", "train.py:workload")
    assert ended.code == 0, ended.err
    assert named.mark.exists()


def test_prepare_runs_what_the_call_names(named: Case) -> None:
    with pytest.raises(PlanError, match='workload="train.py:workload"'):
        named.load().prepare()
    with pytest.raises(PlanError, match='workload="train.py:workload"'):
        named.load().prepare(workload=named.source)
    assert not named.mark.exists()
    assert named.load().prepare(workload=f"{named.source}:workload").workload.name == "tiny"


def test_the_named_file_may_be_elsewhere_and_must_be_the_same(named: Case, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    named.source.rename(moved / "train.py")
    plan = named.load()
    with pytest.raises(PlanError, match="not here"):
        plan.prepare()
    with pytest.raises(PlanError, match="not here"):
        export_plan(plan, "pytorch", tmp_path / "out.py")
    assert plan.prepare(workload=f"{moved / 'train.py'}:workload").workload.name == "tiny"
    (moved / "train.py").write_text(SOURCE.replace("WIDTH, RATE = 8", "WIDTH, RATE = 128"))
    with pytest.raises(PlanError, match="changed"):
        plan.prepare(workload=f"{moved / 'train.py'}:workload")
    with pytest.raises(WorkloadError, match="Path"):
        plan.prepare(workload=f"{moved / 'train.py'}:Path")
    with pytest.raises(UsageError, match="no file"):
        make_plan().prepare(workload="train.py")


@pytest.mark.parametrize("optimizer", [sgd, None], ids=["every part", "no optimizer"])
def test_with_every_part_handed_in_nothing_is_imported(named: Case, optimizer) -> None:
    parts = {"model": Classifier(), "loss": image_loss, "schedule": None, "max_grad_norm": None}
    if optimizer is None:
        with pytest.raises(PlanError, match="code that would run"):
            named.load().prepare(**parts)
    else:
        run = named.load().prepare(**parts, optimizer=optimizer)
        assert torch.isfinite(run.step(image_batch(16, 0)).loss)
        with pytest.raises(PlanError, match="code that would run"):
            run.workload.make_batch(2, 0)  # that one is the file's
    assert not named.mark.exists()


# The user's own searches.


def remember(named: Case, **changes: object) -> str:
    from autoplan.planner.records.trust import remember_code

    plan = named.load()
    remember_code(plan.workload.model_copy(update=changes), plan.study)
    return plan.study


def test_a_search_notes_the_file_that_it_ran(named: Case, tmp_path: Path) -> None:
    study = remember(named)
    (note,) = (tmp_path / "state" / "autoplan" / "code").iterdir()
    assert note.name == f"{study}.json" and note.stat().st_mode & 0o777 == 0o600
    assert WorkloadSpec.model_validate_json(note.read_text()).reference == f"{named.source}:workload"


@pytest.mark.parametrize("what", ["source", "options", "study", "reference"])
def test_another_source_or_study_is_not_what_was_searched(named: Case, tmp_path: Path, what: str) -> None:
    from autoplan.planner.records.trust import own_workload

    study = remember(named)
    plan = named.load()
    spec = plan.workload
    if what == "source":  # the plan's own digests say nothing: whoever made it wrote them
        named.source.write_text(SOURCE + "\n")
        spec = make_spec(model=f"{named.source}:workload", global_batch=16)
    elif what == "options":
        spec = spec.model_copy(update={"options": {"folder": "/"}})
    elif what == "study":
        study = f"../code/{study}"
    else:
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "train.py").write_text(SOURCE)
        spec = spec.model_copy(update={"reference": f"{tmp_path}/other/train.py:workload"})
    with pytest.raises(PlanError, match="your search was of" if what == "options" else "code that would run"):
        own_workload(spec, study)


# Digests: the same question wherever a plan meets code.


@pytest.mark.parametrize("verb", VERBS)
def test_changed_training_code_is_named(named: Case, cli, verb: str) -> None:
    remember(named)
    named.source.write_text(SOURCE.replace("WIDTH, RATE = 8, 0.01", "WIDTH, RATE = 128, 10.0"))
    ended = cli(*VERBS[verb], "--model", "train.py")
    assert ended.code == 2 and "code of" in ended.err and "changed" in ended.err and "--changed-ok" in ended.err
    assert not named.mark.exists()


def test_changed_code_runs_where_the_user_says_so(named: Case, cli) -> None:
    named.source.write_text(SOURCE + "\nX = 1\n")
    assert cli(*VERBS["run"], "--changed-ok").code == 2  # nobody named it yet
    assert cli(*VERBS["run"], "--changed-ok", "--model", "train.py:workload").code == 0


@pytest.mark.parametrize("verb", ["run", "verify", "export"])
def test_a_changed_configuration_of_a_model_is_named(tmp_path: Path, cli, monkeypatch, verb: str) -> None:
    from tests.strategies.tiny import GPT2

    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    spec = make_spec(model=str(path), sequence_length=16, global_batch=16)
    make_plan(TrainingConfig(micro_batch=4), workload=spec).save(tmp_path / "plan.json")
    path.write_text(json.dumps(GPT2 | {"n_embd": 128}))
    ended = cli(*VERBS[verb])
    assert ended.code == 2 and "model" in ended.err and "changed" in ended.err


@pytest.mark.parametrize("reference", ["/dev/zero", "/dev/zero.py:f", "pipe", "pipe.py:f"])
def test_a_workload_that_is_no_file_is_not_read(tmp_path: Path, monkeypatch, reference: str) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("pipe", "pipe.py"):
        os.mkfifo(tmp_path / name)
    kind = "function" if ".py:" in reference else "config"
    spec = WorkloadSpec(
        kind=kind,
        reference=reference,
        name="x",
        sequence_length=16,
        global_batch=4,
        identity="x",
        digests={"code": "x"},
    )
    plan = make_plan(TrainingConfig(micro_batch=4), workload=spec)
    with pytest.raises((PlanError, WorkloadError)):
        plan.prepare(workload=reference if kind == "function" else None)


def test_no_place_is_made_of_the_name_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"config": {"model_type": "gpt2"}}')
    spec = make_plan().workload.model_copy(update={"reference": f"../../../../../../../../..{tmp_path}/x"})
    with pytest.raises(WorkloadError, match="no built-in model"):
        make_plan(workload=spec).prepare()


# What was edited, and what failed parity.


def test_an_edited_plan_is_shown_and_not_used(tmp_path: Path, cli, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = make_plan().save(tmp_path / "plan.json")
    document = json.loads(path.read_text())
    document["measurement"]["tokens_per_s"] = {"median": 4096.0, "low": 4000.0, "high": 4100.0, "samples": 9}
    path.write_text(json.dumps(document))
    assert Plan.load(path).edited == ("measurement",)
    without = [trial | {"tokens_per_s": None} for trial in document["evidence"]]
    (tmp_path / "without.json").write_text(json.dumps(document | {"evidence": without}))
    assert cli("explain", "without.json").code == 0
    ended = cli("show", "plan.json")
    assert ended.code == 0 and "edited" in ended.err and "measurement" in ended.err
    for command in (*VERBS.values(), ("export", "plan.json", "--to", "json")):
        ended = cli(*command)
        assert ended.code == 2 and "measurement" in ended.err, command
    assert cli("export", "plan.json", "--to", "json", "--changed-ok").code == 0


def test_a_plan_that_failed_parity_is_not_exported(tmp_path: Path) -> None:
    plan = make_plan()
    failed = plan.model_copy(update={"parity": plan.parity.model_copy(update={"passed": False})})
    for to in TARGETS:
        with pytest.raises(ExportError, match="parity"):
            export_plan(failed, to, tmp_path / "out")
    with pytest.raises(PlanError, match="parity"):
        failed.prepare()
    assert not list(tmp_path.iterdir())


def test_verify_says_of_python_objects_what_to_do(tmp_path: Path, cli, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_plan(TrainingConfig(micro_batch=4), workload=spec_from_objects(classifier(), global_batch=16)).save(
        "plan.json"
    )
    ended = cli(*VERBS["verify"])
    assert ended.code == 2 and "Python objects" in ended.err
