"""A plan never chooses what is called: the user names it, or the note of their own search does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import autoplan
from autoplan.errors import AutoplanError, PlanError, UsageError, WorkloadError
from autoplan.planner.export.run import export_plan
from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.trust import Call, own_workload, remember_code, secrets_note
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.function_file import check_function, import_function
from autoplan.strategies.workloads.sources import changed_parts, load_workload, make_spec, spec_from_objects
from autoplan.strategies.workloads.spec import WorkloadSpec
from tests.cases import some
from tests.planner.records.test_trust import SOURCE
from tests.recorded import make_plan
from tests.strategies.tiny import classifier

ROOT = Path(__file__).resolve().parents[3]
TRAIN = (
    SOURCE.replace('Path(__file__).with_name("MARK").touch()\n', "")
    + """

import functools
import os
import subprocess
import sys
from os import system
from subprocess import Popen

alias = os.system
part = functools.partial(os.system)
method = Path.home


def clean(folder: str = ""):
    Path(folder, "MARK").touch()


def with_arguments(rate: float = 0.0) -> autoplan.Workload:
    global RATE
    RATE = rate or float(sys.argv[sys.argv.index("--lr") + 1])
    return workload()
"""
)
END = """
if __name__ == "__main__":
    own, other = map(autoplan.load_plan, sys.argv[1:])
    print(own.prepare(workload=workload()).workload.name, flush=True)
    other.prepare()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own train.py; their state is empty."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def save_plan(folder: Path, function: str, file: Path | None = None, **fields: Any) -> Path:
    """A plan as somebody else may write it: any function, no digests, and a seal that fits."""
    spec = make_spec(model=f"{folder / 'train.py'}:workload", global_batch=16)
    known = {"reference": f"{file or folder / 'train.py'}:{function}", "digests": {}, "sources": {}}
    plan = make_plan(TrainingConfig(micro_batch=4), workload=spec.model_copy(update=known | fields))
    return plan.save(folder / "plan.json")


def touching(folder: Path) -> dict[str, Any]:
    return {"options": {"command": f"touch {folder / 'MARK'}"}}


# The five that ran a command.


@pytest.mark.parametrize("verb", [("verify", "--budget", "1s"), ("export", "--to", "pytorch", "--out", "out.py")])
def test_a_named_file_runs_no_imported_function(folder: Path, cli, verb: tuple[str, ...]) -> None:
    save_plan(folder, "system", **touching(folder))
    ended = cli(verb[0], "plan.json", *verb[1:], "--model", "train.py")
    assert ended.code == 2 and "system" in ended.err and "imported from os" in ended.err
    assert not (folder / "MARK").exists() and not (folder / "out.py").exists()


def test_run_starts_no_imported_class(folder: Path, cli) -> None:
    save_plan(folder, "Popen", options={"args": f"touch {folder / 'MARK'}", "shell": True})
    for named in ((), ("--model", "train.py"), ("--model", "train.py:workload"), ("--model", "train.py:Popen")):
        ended = cli("run", "plan.json", "--steps", "1", *named)
        assert ended.code == 2 and ("Popen" in ended.err), named
    assert not (folder / "MARK").exists()


@pytest.mark.parametrize("function", some(["system", "clean"], ["clean"]))
def test_a_running_program_hands_over_its_own_workload_and_calls_nothing_that_a_plan_chose(
    folder: Path, function: str
) -> None:
    (folder / "train.py").write_text(TRAIN + END)
    digests = make_spec(model="train.py:workload", global_batch=16).digests
    own = save_plan(folder, "workload", digests=digests).rename(folder / "own.json")
    given = touching(folder) if function == "system" else {"options": {"folder": str(folder)}}
    other = save_plan(folder, function, **given)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder)}
    command = [sys.executable, "train.py", str(own), str(other)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.stdout == "tiny\n", done.stderr
    assert done.returncode == 1 and ("imported from os" if function == "system" else "train.py:clean") in done.stderr
    assert not (folder / "MARK").exists()


def test_autoplans_own_files_are_nobodys_workload(folder: Path, cli: Any) -> None:
    main = ROOT / "autoplan" / "__main__.py"
    save_plan(folder, "main", main, arguments=("export", "plan.json", "--to", "json", "--out", "MARK"))
    for named in ((), ("--model", str(main)), ("--model", f"{main}:main")):
        done = cli("run", "plan.json", "--steps", "1", *named)
        assert done.code == 2 and "autoplan's own" in done.err, done.err
    assert not (folder / "MARK").exists()
    for file in ("planner/records/trust.py", "autoplan/strategies/workloads/sources.py", "probes/run.py"):
        with pytest.raises(WorkloadError, match="nobody's workload"):
            check_function(f"{ROOT / file}:make_spec")


# Who names it.


@pytest.mark.parametrize("name", ["system", "Popen", "alias", "part", "method"])
def test_what_a_file_imports_is_not_its_own(folder: Path, name: str) -> None:
    with pytest.raises(WorkloadError, match="only a function"):
        import_function(f"{folder / 'train.py'}:{name}")


def test_functions_of_the_users_own_count_however_they_are_written(folder: Path) -> None:
    (folder / "helper.py").write_text("def training():\n    return 1\n")
    (folder / "own.py").write_text(
        "import functools\nfrom contextlib import contextmanager\nfrom helper import training\n"
        "def workload(size=1):\n    return size\n"
        "partial = functools.partial(workload, size=2)\n"
        "inline = lambda: 3\n"
        "@functools.cache\ndef cached():\n    return 4\n"
        "class Made:\n    def __call__(self):\n        return 5\n"
        "made = Made()\n"
        "def bare(function):\n    return functools.partial(print)\n"
        "@bare\ndef decorated():\n    return 6\n"
    )
    for name in ("training", "workload", "partial", "inline", "cached", "Made", "made", "decorated"):
        assert callable(import_function(f"{folder / 'own.py'}:{name}")), name
    (folder / "star.py").write_text("from os import *\nfrom helper import *\n")
    assert import_function(f"{folder / 'star.py'}:training")() == 1
    with pytest.raises(WorkloadError, match="only a function"):
        import_function(f"{folder / 'star.py'}:popen")


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        ({"function": "clean"}, "train.py:workload"),
        ({"function": "workload"}, "train.py:clean"),
        ({"function": "workload", "options": {"folder": "/"}}, "train.py:workload"),
        ({"function": "workload", "options": {"folder": "/"}}, "train.py:workload folder=/tmp"),
        ({"function": "workload", "arguments": ("--out", "/")}, "train.py:workload"),
        ({"function": "workload", "arguments": ("--out", "/")}, "train.py:workload -- --out /tmp"),
        ({"function": "workload"}, "train.py:workload folder=/"),
    ],
)
def test_another_call_than_the_named_one_is_refused_with_both(folder: Path, cli, plan: dict, named: str) -> None:
    save_plan(folder, **plan)
    said = Call.of(Plan.load("plan.json").workload)
    for verb in (("verify", "--budget", "1s"), ("run",), ("export", "--out", "x.py"), ("export", "--to", "json")):
        ended = cli(verb[0], "plan.json", *verb[1:], "--model", named)
        assert ended.code == 2 and f"the plan is of {said}" in ended.err, verb
        assert f"what you named is {named}" in ended.err and "A plan does not choose" in ended.err
    with pytest.raises(PlanError, match="what you named is"):
        Plan.load("plan.json").prepare(workload=named)
    with pytest.raises(PlanError, match="what you named is"):
        autoplan.verify("plan.json", workload=named, budget="1s")
    with pytest.raises(PlanError, match="what you named is"):
        export_plan(Plan.load("plan.json"), "ray", "x.py", workload=named)


def test_the_error_says_what_to_type_and_that_works(folder: Path, cli) -> None:
    spec = make_spec(model="train.py:with_arguments", global_batch=16, arguments=("--lr", "0.5"), options={"seed": 3})
    given = {"options": {"rate": 0.25}, "arguments": ("--lr", "0.5"), "digests": spec.digests}
    save_plan(folder, "with_arguments", **given)
    ended = cli("run", "plan.json", "--steps", "1")
    typed = "--model 'train.py:with_arguments rate=0.25 -- --lr 0.5'"
    assert ended.code == 2 and typed in " ".join(ended.err.split())
    assert cli("run", "plan.json", "--steps", "1", "--model", "train.py").code == 2
    ended = cli("run", "plan.json", "--steps", "1", "--model", "train.py:with_arguments rate=0.25 -- --lr 0.5")
    assert ended.code == 0, ended.err


@pytest.mark.parametrize(
    "call",
    [
        Call("a b/train.py", "f", {}, ()),
        Call("train.py", "f", {"seed": 3, "rate": 0.5, "norm": None, "on": True}, ()),
        Call("train.py", "f", {"name": "a b", "number": "3", "none": "null", "list": "[1]"}, ("--", "--x", "a 'b'")),
        Call("/x.py dir/train.py", "f", {}, ("other.py:g",)),
    ],
)
def test_a_call_reads_back_as_it_was_written(call: Call) -> None:
    assert Call.parse(str(call)) == call


def test_a_module_of_the_users_own_may_be_named(folder: Path, cli) -> None:
    (folder / "mine" / "sub").mkdir(parents=True)
    for file in ("mine/__init__.py", "mine/sub/__init__.py"):
        (folder / file).write_text("")
    (folder / "mine" / "rates.py").write_text("RATE = 0.25\n")
    (folder / "mine" / "sub" / "train.py").write_text(TRAIN + "from ..rates import RATE\n")
    spec = make_spec(model="mine.sub.train:workload", global_batch=16)
    assert spec.reference == f"{folder / 'mine' / 'sub' / 'train.py'}:workload"
    save_plan(folder, "workload", folder / "mine" / "sub" / "train.py", digests=spec.digests)
    assert cli("run", "plan.json", "--steps", "1", "--model", "mine.sub.train:clean").code == 2
    ended = cli("run", "plan.json", "--steps", "1", "--model", "mine.sub.train:workload")
    assert ended.code == 0, ended.err
    for name in ("os:system", "subprocess:Popen", "torch.hub:load"):
        assert "no module" in cli("verify", "plan.json", "--model", name).err, name
    assert "nobody's workload" in cli("verify", "plan.json", "--model", "autoplan.cli:main").err


@pytest.mark.parametrize("text", ["train.py:workload seed", "train.py:workload 'seed=3"])
def test_a_call_that_cannot_be_read_says_the_form(folder: Path, text: str) -> None:
    save_plan(folder, "workload")
    with pytest.raises(UsageError) as failed:
        Plan.load("plan.json").prepare(workload=text)
    assert "NAME=VALUE" in str(failed.value.hint)


def test_the_error_of_the_users_own_function_is_said(folder: Path, cli: Any) -> None:
    """It was hidden: 'the workload lacks model, optimizer'."""
    reads = "\n\ndef reads():\n    Path('data.bin').read_bytes()\n    return workload()\n"
    (folder / "train.py").write_text(TRAIN + reads)
    save_plan(folder, "reads", digests=make_spec(model="train.py:reads", global_batch=16).digests)
    with pytest.raises(WorkloadError, match="train.py:reads raised FileNotFoundError"):
        Plan.load("plan.json").prepare(workload="train.py:reads")
    ended = cli("run", "plan.json", "--steps", "1", "--model", "train.py:reads")
    assert ended.code == 2 and "raised FileNotFoundError" in ended.err
    (folder / "train.py").unlink()
    with pytest.raises(PlanError, match="not here"):
        Plan.load("plan.json").prepare()


def test_a_plan_of_objects_does_not_run_by_itself(folder: Path, cli: Any) -> None:
    make_plan(TrainingConfig(micro_batch=2), workload=spec_from_objects(classifier())).save(folder / "plan.json")
    ended = cli("run", "plan.json", "--steps", "1")
    assert ended.code == 2 and "made of Python objects, which a plan does not carry" in " ".join(ended.err.split())


# The user's own search.


def noted(folder: Path, **given: Any) -> WorkloadSpec:
    plan = Plan.load(folder / "plan.json")
    spec = make_spec(model="train.py:with_arguments", global_batch=16, **given)
    remember_code(spec, plan.study)
    return spec


def test_a_search_of_the_users_own_names_all(folder: Path, cli) -> None:
    save_plan(folder, "workload")
    spec = noted(folder, arguments=("--lr", "0.5"))
    save_plan(folder, "with_arguments", arguments=("--lr", "0.5"), digests=spec.digests)
    for named in ((), ("--model", "train.py"), ("--model", "train.py:with_arguments")):
        assert cli("run", "plan.json", "--steps", "1", *named).code == 0, named
    (folder / "moved").mkdir()
    (folder / "train.py").rename(folder / "moved" / "train.py")
    assert "not here" in cli("run", "plan.json", "--steps", "1").err
    assert cli("run", "plan.json", "--steps", "1", "--model", "moved/train.py").code == 0


@pytest.mark.parametrize("fields", [{"arguments": ("--lr", "9")}, {"options": {"rate": 9.0}}, {"function": "clean"}])
def test_a_plan_that_says_otherwise_than_the_search_is_refused_with_both(folder: Path, cli, fields: dict) -> None:
    save_plan(folder, "workload")
    spec = noted(folder, arguments=("--lr", "0.5"))
    given = {"function": "with_arguments", "arguments": spec.arguments, "digests": spec.digests} | fields
    save_plan(folder, **given)
    said = Call.of(Plan.load("plan.json").workload)
    for named in ((), ("--model", "train.py")):
        ended = cli("run", "plan.json", "--steps", "1", *named)
        assert ended.code == 2 and f"the plan is of {said}" in ended.err
        assert "your search was of train.py:with_arguments -- --lr 0.5" in ended.err


def test_a_note_of_somebody_else_names_nothing(folder: Path) -> None:
    path = save_plan(folder, "workload")
    spec = noted(folder)
    path = save_plan(folder, "with_arguments", digests=spec.digests)
    (note,) = (folder / "state" / "autoplan" / "code").iterdir()
    note.chmod(0o666)
    with pytest.raises(PlanError, match="code that would run"):
        Plan.load(path).prepare()


# Digests and the seal.


def test_a_missing_digest_is_a_changed_one(folder: Path, cli) -> None:
    spec = make_spec(model="train.py:workload", global_batch=16)
    assert changed_parts(spec) == ()
    assert changed_parts(spec.model_copy(update={"digests": {}})) == ("code", "versions")
    save_plan(folder, "workload")
    ended = cli("run", "plan.json", "--model", "train.py:workload", "--steps", "1")
    assert ended.code == 2 and "code of" in ended.err and "changed" in ended.err
    ended = cli("run", "plan.json", "--model", "train.py:workload", "--steps", "1", "--changed-ok")
    assert ended.code == 0, ended.err


@pytest.mark.parametrize("section", ["claim", "hand", "environment"])
def test_the_seal_covers_the_claim_the_hand_setting_and_the_environment(folder: Path, section: str) -> None:
    from autoplan.planner.records.plan import HandSetting
    from autoplan.planner.records.trials import Claim

    plan = make_plan()
    claim = Claim(claimed=True, rounds=3, spread=0.01, spread_repeats=12)
    hand = HandSetting(config=plan.config, measurement=plan.measurement, speedup=plan.speedup, claim=claim)
    path = plan.model_copy(update={"claim": claim, "hand": hand}).save(folder / "plan.json")
    document = json.loads(path.read_text())
    assert Plan.load(path).edited == ()
    if section == "environment":
        document["environment"]["variables"]["OMP_NUM_THREADS"] = "64"
    else:
        (document[section] if section == "claim" else document["hand"]["claim"])["claimed"] = False
    path.write_text(json.dumps(document))
    assert Plan.load(path).edited == (section,)
    document["seal"].pop(section)
    path.write_text(json.dumps(document))
    assert Plan.load(path).edited == (section,), "a missing digest is a changed one"


def test_threads_that_no_machine_has_are_refused(folder: Path) -> None:
    plan = make_plan(TrainingConfig(micro_batch=4, threads=5000))
    with pytest.raises(PlanError, match="5000 threads"):
        plan.prepare()
    with pytest.raises(PlanError, match="5000 threads"):
        export_plan(plan, "torchrun", folder / "x.sh")
    with pytest.raises(PlanError, match="5000 threads"):
        autoplan.verify(plan, budget="1s")


@pytest.mark.parametrize(("value", "taken"), [("2", True), ("3", False), ("5000", False), ("0", False), ("2,2", False)])
def test_threads_of_the_environment_are_those_of_the_machine(value: str, taken: bool) -> None:
    from autoplan.planner.plan.current import variables_for

    plan = make_plan()
    environment = plan.environment.model_copy(update={"variables": {"OMP_NUM_THREADS": value}})
    made = variables_for(plan.model_copy(update={"environment": environment}), Path("p"), {}, 2)
    assert ("OMP_NUM_THREADS" in made) == taken


# Arguments, in exports and in plans.

LOSSES = """
import json, sys
import plan_pytorch as script
print(json.dumps([script.the_workload().build_optimizer([__import__("torch").zeros(1)]).defaults["lr"], sys.argv[1:]]))
"""


@pytest.mark.slow
def test_an_exported_script_keeps_the_arguments(folder: Path) -> None:
    """It trained with another learning rate, and said nothing."""
    named = "train.py:with_arguments -- --lr 0.5"
    spec = make_spec(model="train.py:with_arguments", global_batch=16, arguments=("--lr", "0.5"))
    assert load_workload(spec).build_optimizer([torch.zeros(1)]).defaults["lr"] == 0.5
    save_plan(folder, "with_arguments", arguments=spec.arguments, digests=spec.digests)
    export_plan(Plan.load("plan.json"), "pytorch", "plan_pytorch.py", workload=named)
    environment = {**os.environ, "PYTHONPATH": ""}
    command = [sys.executable, "-c", LOSSES, "--steps", "2"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0.5, ["--steps", "2"]]
    export_plan(Plan.load("plan.json"), "ray", "on_ray.py", workload=named)
    assert "USER_ARGUMENTS = ['--lr', '0.5']" in (folder / "on_ray_training.py").read_text()


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("--hf-token", "abc"), "--hf-token"),
        (("--api_key=abc",), "--api_key"),
        (("--x", "hf_" + "a" * 20), "--x"),
        (("ghp_" + "a" * 30,), "argument 1"),
        (("--data", "postgres://me:word@host/db"), "--data"),
        (("--wandb", "0123456789abcdef" * 3), "--wandb"),
        (("--lr", "0.5", "--max_tokens", "512", "--pad-token", "<p>", "--tokenizer", "gpt2", "--out", "/a/b"), None),
    ],
)
def test_arguments_that_look_like_secrets_are_named(folder: Path, cli, arguments, names) -> None:
    spec = make_spec(model="train.py:workload", global_batch=16, arguments=arguments)
    said = secrets_note(spec)
    assert (said is None) if names is None else said is not None and said.startswith(f"{names} of")
    save_plan(folder, "workload", arguments=arguments, digests=spec.digests)
    err = cli("export", "plan.json", "--to", "json", "--out", "x.json").err
    assert ("may be a secret" in err) == (names is not None)
    assert all(len(word) < 15 or word not in err for word in arguments), "the value itself is not shown"


def test_a_search_names_secrets_before_it_begins(folder: Path, cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from autoplan.planner.search import run

    def begin(*given: Any, **named: Any) -> Any:
        raise UsageError("the search would begin here")

    monkeypatch.setattr(run, "run_search", begin)
    ended = cli("search", "--model", "train.py:workload", "--global-batch", "16", "--", "--hf-token", "abc")
    assert ended.err.index("--hf-token of the workload may be a secret") < ended.err.index("would begin here")


# Scripts that start `autoplan run`.


@pytest.mark.parametrize("to", ["torchrun", "slurm"])
def test_exported_scripts_leave_the_naming_to_the_user(folder: Path, cli: Any, to: str) -> None:
    save_plan(folder, "clean", options={"folder": str(folder)})
    plan = Plan.load("plan.json")
    export_plan(plan, to, "start.sh", changed_ok=True)
    text = (folder / "start.sh").read_text()
    assert "clean" not in text.replace(f"Workload: {plan.workload.name}", "")
    begin = text.index("export AUTOPLAN_PLAN")
    lines = f'PLAN=p.json\n{text[begin : text.index("fi", begin)]}fi; printf "%s " "$@"'
    for given, wanted in (
        ((), "-m autoplan run p.json "),
        (("--model", "train.py:workload"), "-m autoplan run p.json --model train.py:workload "),
        (("train.py", "--lr", "1"), "train.py --lr 1 "),
    ):
        done = subprocess.run(["bash", "-c", lines, "bash", *given], capture_output=True, text=True, check=True)
        assert done.stdout == wanted
    ended = cli("run", "start.plan.json")
    assert ended.code == 2 and "code that would run here" in ended.err
    assert not (folder / "MARK").exists()


@pytest.mark.parametrize("kind", ["model", "config", "folder", "function", "object"])
def test_no_command_waits_for_a_pipe_that_a_plan_names(folder: Path, cli, kind: str) -> None:
    """A reference of one kind under the name of another was read as the file that it names."""

    def end(number: int, frame: object) -> None:
        raise TimeoutError("it waits for a pipe")

    before = signal.signal(signal.SIGALRM, end)
    for name in ("pipe.json", "pipe.py", "pipe"):
        os.mkfifo(folder / name)
    try:
        for reference in ("pipe.json", "pipe.py:f", "pipe.py", "pipe"):
            spec = make_plan().workload.model_copy(update={"kind": kind, "reference": f"{folder}/{reference}"})
            make_plan(TrainingConfig(micro_batch=4), workload=spec).save(folder / "plan.json")
            signal.alarm(20)
            verify = [] if kind == "model" else [("verify", "--budget", "1s")]  # whose ranks say that there is none
            for verb in (*verify, ("run", "--steps", "1"), ("export", "--to", "pytorch")):
                ended = cli(verb[0], "plan.json", *verb[1:])
                assert ended.code in (2, 6), (reference, verb, ended.err)
            with pytest.raises(AutoplanError):
                Plan.load("plan.json").prepare()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_what_is_no_code_is_named_by_its_place_alone(folder: Path) -> None:
    plan = make_plan()
    assert own_workload(plan.workload, plan.study) == plan.workload
    with pytest.raises(AutoplanError, match="no file"):
        own_workload(plan.workload, plan.study, "train.py:workload")
