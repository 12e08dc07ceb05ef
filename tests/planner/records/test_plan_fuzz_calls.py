"""Plans that name something to call, at each field that names anything, by each verb; and changed plans by verify and
prepare. What they name is there, in the user's own folder, and leaves a mark where it is called or imported."""

from __future__ import annotations

import json
import os
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from autoplan.errors import AutoplanError, NoFeasiblePlanError
from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.loading import Loading
from autoplan.planner.records.plan_file import digests_of_document
from autoplan.planner.records.trust import remember_code
from autoplan.planner.verify import measure
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.loading.settings import LoaderSetting
from autoplan.strategies.workloads.sources import make_spec
from tests.planner.records import test_plan_fuzz as fuzz
from tests.recorded import make_plan
from tests.strategies.tiny import GPT2, Classifier, image_batch, image_loss, sgd

ROOT = Path(__file__).resolve().parents[3]
TRAIN = """
from os import system
from pathlib import Path
from subprocess import Popen

import autoplan
from tests.strategies.tiny import classifier


def workload(**given) -> autoplan.Workload:
    return classifier()


def clean(command="", **given):
    Path(__file__).with_name("MARK").touch()
"""
MODEL = GPT2 | {"n_embd": 16, "n_layer": 2, "n_head": 2}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's folder: a training, code that nobody named, and a model's folder that names that code."""
    folder = tmp_path_factory.mktemp("calls")
    (folder / "train.py").write_text(TRAIN)
    for file in (folder / "evil.py", folder / "model" / "modeling_evil.py"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"from pathlib import Path\nPath({str(folder / 'MARK')!r}).touch()\n\n\ndef workload(): ...\n")
    hostile = MODEL | {"auto_map": {"AutoConfig": "modeling_evil.X", "AutoModelForCausalLM": "modeling_evil.X"}}
    (folder / "model" / "config.json").write_text(json.dumps(hostile))
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(folder / "evil.py"), "auto_mapping": {"x": "evil.X"}}
    (folder / "model" / "adapter_config.json").write_text(json.dumps(adapter))
    (folder / "config.json").write_text(json.dumps(MODEL))
    os.mkfifo(folder / "pipe")
    return folder


@pytest.fixture(scope="module")
def witness(place: Path) -> fuzz.Witness:
    return fuzz.Witness(place)


@pytest.fixture(autouse=True)
def own_place(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fuzz.stay_in(place, monkeypatch)


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that `verify` takes is handed to its ranks, which are left out here."""

    def start(*given: Any, **named: Any) -> Any:
        raise NoFeasiblePlanError("the ranks would start here")

    monkeypatch.setattr(measure, "verify_plan", start)


def sound(place: Path) -> dict[str, Plan]:
    """Plans that run here: of a config.json, of a model's folder, and of a function that the user searched."""
    config = TrainingConfig(micro_batch=4)
    setting = LoaderSetting(workers=0)
    loading = Loading(source="Rows", identity="0" * 16, setting=setting)
    facts = Plan.model_validate(fuzz.base_documents(place)[0]).training
    made = {}
    for kind, name in (("config", "config.json"), ("folder", "model")):
        spec = make_spec(model=str(place / name), sequence_length=16, global_batch=16)
        made[kind] = make_plan(config, workload=spec, training=facts, loading=loading)
    spec = make_spec(model=f"{place / 'train.py'}:workload", global_batch=16)
    made["function"] = make_plan(config, workload=spec, loading=loading)
    remember_code(spec, made["function"].study)
    return made


FIELDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "function": (
        "workload.reference",
        ("PLACE/train.py:clean", "PLACE/train.py:system", "PLACE/train.py:Popen", "PLACE/evil.py:workload"),
    ),
    "options": ("workload.options", ({"command": "touch MARK"}, {"args": "touch MARK", "shell": True})),
    "arguments": ("workload.arguments", (["--clean"], ["-c", "import evil"])),
    "kind": ("workload.kind", ("object", "model", "config", "folder")),
    "taken from": ("workload.taken_from", ("evil.Trainer", "PLACE/evil.py:workload")),
    "sources": (
        "workload.sources",
        (
            {"files": {"evil.py": "0" * 16}, "data files": {"PLACE/pipe": "stat:1-1", "/dev/zero": "stat:1-1"}},
            {"model": {"evil.workload": "0"}, "loss": {"os.system": "0"}, "data": {"PLACE/evil.py:workload": "0"}},
        ),
    ),
    "digests": ("workload.digests", ({}, {"code": "0" * 16})),
    "counted": ("workload.counted", ({"unit": "tokens", "by": "function", "fields": ["evil.workload"]},)),
    "loader": ("loading.source", ("PLACE/evil.py:workload", "evil.workload")),
    "dataset": ("loading.identity", ("PLACE/evil.py:workload", "../evil")),
    "optimizer": ("training.optimizer", ("evil.workload", "os.system", "torch.optim.__import__")),
    "schedule": ("training.schedule.kind", ("evil.workload", "torch.optim.lr_scheduler.os.system")),
    "schedule's function": ("training.schedule.function", ("evil.workload", "os.system")),
    "model folder": ("workload.reference", ("PLACE/model", "PLACE/evil.py", "../evil.py")),
    "study": ("study", ("../../evil", "PLACE/evil.py", "evil.py:workload")),
    "environment": (
        "environment.variables",
        ({"LD_PRELOAD": "PLACE/evil.so", "PYTHONSTARTUP": "PLACE/evil.py", "OMP_NUM_THREADS": "99999"},),
    ),
    "threads": ("config.threads", (2**31, 10**6)),
}


def sealed(document: dict[str, Any], changes: Iterable[tuple[str, Any]], place: Path) -> bytes:
    """The file of a plan's document with other values, and a seal that fits; what is in nothing changes nothing."""
    for path, value in changes:
        parent: Any = document
        *names, last = path.split(".")
        for name in names:
            parent = parent[name] if isinstance(parent.get(name), dict) else {}
        parent[last] = json.loads(json.dumps(value).replace("PLACE", str(place)))
    document["seal"] = digests_of_document(document)
    return json.dumps(document).encode()


EXPORTS = ("json", "torchrun", "transformers", "pytorch")  # names in the others: test_hostile_names.py
COMMANDS = (
    *(("show", "--trials"), ("explain",), ("report", "--out", "report.html"), ("run", "--steps", "1")),
    *(("verify", "--budget", "1s"), ("verify", "--budget", "1s", "--model", "train.py")),
    *(("export", "--to", to, "--force", "--out", f"out-{to}") for to in EXPORTS),
)


def from_python(path: Path) -> list[Callable[[], Any]]:
    """What a program does with a plan: with nothing, with its own parts, and on its own loop."""
    data = [image_batch(1, index) for index in range(32)]
    loop = torch.utils.data.DataLoader(data, batch_size=16, collate_fn=lambda rows: image_batch(len(rows), 0))
    model = Classifier()
    return [
        lambda: Plan.load(path).prepare(),
        lambda: Plan.load(path).prepare(Classifier(), sgd, image_loss, schedule=None, max_grad_norm=None),
        lambda: Plan.load(path).apply_to(model, sgd(model.parameters()), loop, image_loss),
        lambda: Plan.load(path).loader(data),
    ]


def seen_by(witness: fuzz.Witness, place: Path, searched: bool) -> list[str]:
    """What ran or was written; the file that the user searched may be imported, and nothing of it called but that."""
    may_run = (f"ran {ROOT}", *([f"ran {place / 'train.py'}"] if searched else []))
    found = [text for text in witness.seen if not text.startswith(may_run)]
    witness.seen.clear()
    return found + (["MARK"] if (place / "MARK").exists() else [])


@pytest.mark.parametrize("field", FIELDS)
def test_nothing_that_a_field_names_is_called(field: str, place: Path, witness: fuzz.Witness, monkeypatch) -> None:
    fuzz._keep_to_this_process(monkeypatch)
    path, values = FIELDS[field]
    file, ends = place / "plan.json", Counter[str]()
    plans = sound(place)
    for number, value in enumerate(values):
        kind = ("function", "config", "folder")[number % 3] if field != "model folder" else "folder"
        plan = plans["function" if field in ("function", "options", "arguments") else kind]
        if path.startswith("training") and plan.training is None:
            plan = plans["config"]
        file.write_bytes(sealed(json.loads(plan.file_text()), [(path, value)], place))
        for command in COMMANDS:
            if command[-1] == "out-pytorch" and plan.workload.kind == "function":
                continue  # it builds the model in a rank
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                code, text = fuzz.run(witness, command[0], str(file), *command[1:])
            ends[fuzz.ALLOWED.get(code, "wrong")] += 1
            assert fuzz.wrong_end(code, text) is None, (command, value)
            assert not seen_by(witness, place, plan.workload.kind == "function"), (command, value)
        for call in from_python(file):
            with warnings.catch_warnings(), witness.watching():
                warnings.simplefilter("ignore")
                try:
                    call()
                    ends["right"] += 1
                except AutoplanError:
                    ends["refused"] += 1
            assert not seen_by(witness, place, plan.workload.kind == "function"), value
    assert ends["wrong"] == 0 and ends["refused"] > 0


def changed_file(plans: list[Plan], place: Path, chance: random.Random) -> bytes:
    """A changed plan; the half of them are changed where a workload is named, and all the seals fit what they can."""
    if chance.random() < 0.5:
        return fuzz.mutated_file([json.loads(plan.file_text()) for plan in plans], chance)
    document = json.loads(chance.choice(plans).file_text())
    fields = (FIELDS[chance.choice(list(FIELDS))] for _ in range(chance.choice((1, 1, 2, 3))))
    return sealed(document, [(path, chance.choice(values)) for path, values in fields], place)


def changed_plans(place: Path, witness: fuzz.Witness, seed: int, use: Callable[[Path], str]) -> None:
    chance, ends, count = random.Random(seed), Counter[str](), 120
    plans, file = list(sound(place).values()), place / "plan.json"
    for number in range(count):
        data = changed_file(plans, place, chance)
        file.write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            end = use(file)
        ends[end if end in ("right", "refused") else "wrong"] += 1
        found = seen_by(witness, place, searched=True)
        if found or end not in ("right", "refused"):
            (place / f"wrong-{number}.json").write_bytes(data)
        assert not found, (number, found)
        assert end in ("right", "refused"), (number, end)
    assert ends["right"] > count // 20 and ends["refused"] > count // 3
    print(f"{count} changed plans: {dict(ends)}")


def test_changed_plans_are_verified(place: Path, witness: fuzz.Witness) -> None:
    def verify(file: Path) -> str:
        code, text = fuzz.run(witness, "verify", str(file), "--budget", "1s")
        return fuzz.wrong_end(code, text) or ("right" if "the ranks would start here" in text else "refused")

    changed_plans(place, witness, 21, verify)


def test_changed_plans_are_prepared(place: Path, witness: fuzz.Witness) -> None:
    def prepare(file: Path) -> str:
        with witness.watching():
            try:
                Plan.load(file).prepare()
            except AutoplanError:
                return "refused"
        return "right"

    changed_plans(place, witness, 23, prepare)
