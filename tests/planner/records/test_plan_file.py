"""What is refused of a plan's file before anything is made of it, its arithmetic, and the digests that show an edit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoplan.errors import PlanError
from autoplan.planner.plan.plan import Plan
from autoplan.strategies.analysis.training_facts import GroupFacts, TrainingFacts
from tests.recorded import make_plan

RECORDED = Path(__file__).resolve().parents[3] / "benchmarks" / "results"

Change = Callable[[dict[str, Any]], object]


def saved(folder: Path, change: Change | None = None) -> Path:
    """A plan's file, changed."""
    path = make_plan().save(folder / "plan.json")
    if change is not None:
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))
    return path


def test_a_saved_plan_loads_as_it_was(tmp_path: Path) -> None:
    plan = make_plan()
    loaded = Plan.load(plan.save(tmp_path / "plan.json"))
    assert loaded == plan and loaded.edited == () and loaded.load_notes == ()


# Files.

TEXTS = {
    "empty": b"",
    "cut short": b'{"schema_version": 1, "created"',
    "a list": b"[]",
    "a number": b"1",
    "null": b"null",
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep and whole": b'{"notes":' + b"[" * 200 + b"]" * 200 + b"}",
    "not a number": b'{"accumulation": NaN}',
    "infinity": b'{"accumulation": -Infinity}',
    "an overflow": b'{"accumulation": 1e999}',
    "a huge number": b'{"accumulation": ' + b"9" * 100_000 + b"}",
    "repeated": b'{"study": "a", "study": "b"}',
    "latin": '{"study": "\xe9"}'.encode("latin-1"),
    "binary": bytes(range(256)) * 10,
    "utf-16": '{"study": "a"}'.encode("utf-16"),
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_what_is_no_plan_is_said_to_be_none(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(text)
    with pytest.raises(PlanError, match="is not (a plan|JSON)|is empty") as error:
        Plan.load(path)
    assert len(str(error.value)) < 1000


def test_a_file_without_an_end_is_not_read_to_it() -> None:
    with pytest.raises(PlanError, match="64 MiB"):
        Plan.load("/dev/zero")


def test_a_key_that_is_repeated_is_found_at_once(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    names = [f'"{number}":0' for number in range(300_000)]
    for repeated in (names[:1], names[-1:]):
        path.write_text("{" + ",".join(names + repeated) + "}")
        began = time.process_time()
        with pytest.raises(PlanError, match="twice in one object"):
            Plan.load(path)
        assert time.process_time() - began < 10, "each key was counted for each other"


@pytest.mark.parametrize("path", ["", ".", "/", "nowhere/plan.json", "a\0b", "x" * 5000])
def test_a_path_that_is_no_file(path: str) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        Plan.load(path)


# Texts.


@pytest.mark.parametrize(
    ("name", "text", "error", "hint"),
    [
        ("train.py", "import torch", "is not a plan: a plan is a JSON file", "Name the file"),
        ("empty.json", "", "is empty", "Name the file"),
        ("cut.json", '{"schema_version": 1, "created"', "is not JSON", "may be cut short"),
        ("missing.json", None, "cannot be read", "--model gpt2 writes plan.json"),
        ("", None, "cannot be read", "the plan file in it"),
    ],
)
def test_the_next_step_is_said_for_what_was_given(
    name: str, text: str | None, error: str, hint: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(PlanError, match=error) as caught:
        Plan.load(path)
    assert hint in str(caught.value.hint)


def test_no_text_of_a_plan_commands_the_terminal(tmp_path: Path, cli: Callable[..., Any]) -> None:
    hostile = "\x1b]0;gone\x07\x1b[2J\u202e\x9b1m\r\x00\x08"

    def change(document: dict[str, Any]) -> None:
        document["workload"]["name"] = hostile
        document["notes"] = [hostile]
        document["choices"][0]["reason"] = hostile
        document["evidence"][3]["reason"] = hostile
        document["evidence"][3]["last_lines"] = f"one\ntwo\t{hostile}"

    path = saved(tmp_path, change)
    assert Plan.load(path).evidence[3].last_lines.startswith("one\ntwo\t\\x1b]0;gone")
    for command in (["show", "--trials"], ["explain"], ["show", "--json"], ["report", "--out", str(tmp_path / "x")]):
        ended = cli(command[0], path, *command[1:])
        assert ended.code == 0
        assert not set(hostile) & set(ended.out + ended.err) - set("]0;gone[2J1m")


def test_half_a_character_is_written_out(tmp_path: Path) -> None:
    path = saved(tmp_path)
    path.write_text(path.read_text().replace('"gpt2"', r'"\ud800"'))
    assert Plan.load(path).workload.name == r"\ud800"


# Arithmetic.


def at(*place: str | int, value: Any) -> Change:
    def change(document: dict[str, Any]) -> None:
        inner: Any = document
        for part in place[:-1]:
            inner = inner[part]
        inner[place[-1]] = value

    return change


BROKEN: dict[str, tuple[Change, str]] = {
    "accumulation": (at("accumulation", value=5), "micro_batch 4 x accumulation 5"),
    "no accumulation": (at("accumulation", value=0), "accumulation is 0"),
    "ranks": (at("config", "dp_replicate", value=2), "2 data-parallel"),
    "global batch": (at("workload", "global_batch", value=17), "the global batch is 17"),
    "negative batch": (at("workload", "global_batch", value=-16), "global_batch is -16"),
    "huge batch": (at("workload", "global_batch", value=2**60), "at most 2"),
    "a baseline of another batch": (at("baseline", "config", "micro_batch", value=3), "baseline.config"),
    "huge degree": (at("config", "tp", value=2**62), "config.tp"),
    "a device it lacks": (at("device", value="cuda"), "no such device"),
    "parity": (at("parity", "failures", value=["the loss differs"]), "the loss differs"),
    "a negative time": (at("measurement", "step_time_s", "low", value=-1.0), "above 0"),
    "an interval": (at("speedup", "low", value=4.0), "is not between"),
    "a huge rate": (at("measurement", "tokens_per_s", "high", value=1e300), "so large"),
    "an option": (at("workload", "options", "learning_rate", value="x"), "learning_rate"),
    "a seed": (at("workload", "options", "seed", value=0.5), "seed"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_plan_that_does_not_add_up_is_refused(name: str, tmp_path: Path) -> None:
    change, says = BROKEN[name]
    with pytest.raises(PlanError, match="does not add up") as error:
        Plan.load(saved(tmp_path, change))
    assert says in str(error.value)


def test_more_ranks_than_gpus(tmp_path: Path) -> None:
    from autoplan.strategies.config import TrainingConfig

    path = make_plan(TrainingConfig(micro_batch=4, dp_shard=2), device="cuda", accumulation=2).save(tmp_path / "p.json")
    with pytest.raises(PlanError, match=r"2 ranks, and its hardware has 1 GPU"):
        Plan.load(path)


@pytest.mark.parametrize(
    "options", [{"lr": "x"}, {"lr": True}, {"betas": []}, {"betas": 0.9}, {"betas": ["a", "b"]}, {"nesterov": "x"}]
)
def test_an_optimizer_that_is_none(options: dict[str, Any], tmp_path: Path) -> None:
    group = GroupFacts(tensors=1, elements=1, options=options)
    facts = TrainingFacts(optimizer="torch.optim.sgd.SGD", groups=(group,), max_grad_norm=None, schedule=None, seed=0)
    with pytest.raises(PlanError, match="training.groups"):
        Plan.load(make_plan(training=facts).save(tmp_path / "plan.json"))


# Digests.

EDITS: dict[str, tuple[Change, tuple[str, ...]]] = {
    "a knob": (at("config", "precision", value="fp32"), ("config",)),
    "the rate": (at("workload", "options", "learning_rate", value=0.5), ("workload",)),
    "the speed-up": (at("speedup", value={"median": 9.0, "low": 8.0, "high": 10.0, "samples": 9}), ("speedup",)),
    "a trial": (at("evidence", 1, "seconds_spent", value=1.0), ("evidence",)),
    "a section that is gone": (lambda document: document["seal"].pop("parity"), ("parity",)),
    "the reasons": (at("choices", 0, "reason", value="because"), ()),
    "a name": (at("workload", "name", value="mine"), ()),
    "a place": (at("workload", "reference", value="elsewhere/config.json"), ()),
    "notes": (at("notes", value=[]), ()),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_of_what_was_measured_shows(name: str, tmp_path: Path) -> None:
    change, sections = EDITS[name]
    plan = Plan.load(saved(tmp_path, change))
    assert plan.edited == sections
    assert all(section in plan.load_notes[0] for section in sections)
    again = Plan.load(plan.save(tmp_path / "again.json"))
    assert again.edited == sections  # saving it does not make it right


@pytest.mark.parametrize("maker", ["Adafactor", "ASGD", "Rprop", "LBFGS"])
def test_the_groups_of_any_optimizer_load(maker: str, tmp_path: Path) -> None:
    """Their options are not all numbers: Adafactor's eps is (None, 0.001)."""
    import torch

    from autoplan.strategies.analysis.training_facts import class_name, read_groups

    model = torch.nn.Linear(2, 2)
    optimizer = getattr(torch.optim, maker)(model.parameters())
    found = {"groups": read_groups(optimizer, model), "max_grad_norm": None, "schedule": None, "seed": 0}
    facts = TrainingFacts(optimizer=class_name(type(optimizer)), **found)
    plan = make_plan().model_copy(update={"training": facts}).sealed()
    assert Plan.load(plan.save(tmp_path / "plan.json")).training == facts


def test_a_file_that_was_only_written_otherwise_is_not_edited(tmp_path: Path) -> None:
    path = saved(tmp_path)
    document = json.loads(path.read_text())

    def as_other_programs(value: Any) -> Any:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, dict):
            return {key: as_other_programs(value[key]) for key in sorted(value)}
        return [as_other_programs(item) for item in value] if isinstance(value, list) else value

    path.write_text(json.dumps(as_other_programs(document)))
    assert Plan.load(path).edited == ()


def test_a_plan_of_an_earlier_version_loads_with_a_note(tmp_path: Path) -> None:
    plan = Plan.load(saved(tmp_path, lambda document: document.pop("seal")))
    assert plan.edited == () and "earlier version" in plan.load_notes[0]
    assert Plan.load(plan.save(tmp_path / "again.json")).load_notes == ()


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*/plan.json")), ids=lambda path: path.parent.name)
def test_the_recorded_plans_load_and_their_digests_hold(path: Path) -> None:
    sealed = json.loads(path.read_text()).get("seal", {})  # fewer sections than now, or none
    assert not sealed.keys() & set(Plan.load(path).edited)
