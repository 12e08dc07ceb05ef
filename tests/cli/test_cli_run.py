"""`autoplan run plan.json script.py`: real scripts in real ranks; how they are started, told to end, and do end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoplan.cli import ends
from autoplan.cli import run as cli_run
from autoplan.planner.search.plan_maker import UNCHECKED
from autoplan.processes import linux
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import make_spec, spec_from_objects
from tests.cases import some
from tests.processes.helpers import wait_until
from tests.recorded import make_plan
from tests.strategies.tiny import classifier

ROOT = Path(__file__).resolve().parents[2]
ONE = TrainingConfig(micro_batch=4, threads=1, allocator="keep")
TWO = TrainingConfig(micro_batch=4, dp_replicate=2)

SCRIPT = """
import json, os, signal, subprocess, sys, time
import autoplan

def say(facts):  # in one piece: two ranks write at once
    os.write(1, (json.dumps(facts) + "\\n").encode())

plan = None if "wait" in sys.argv else autoplan.current_plan()  # seconds of imports, for nothing there
rank = os.environ.get("RANK", "0")
names = ("OMP_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_", "WORLD_SIZE", "LD_PRELOAD")
facts = {"rank": rank, "pid": os.getpid(), "argv": sys.argv[1:], "plan": plan and plan.config.describe()}
facts |= {"env": {name: os.environ[name] for name in names if name in os.environ}}
if "spawn" in sys.argv:  # in a session of its own, where no signal to a group reaches it
    facts["child"] = subprocess.Popen(["sleep", "300"], start_new_session=True).pid
if "save" in sys.argv:
    def save(number, frame):
        time.sleep(0.5)
        say({"saved": rank, "by": number})
        sys.exit(5 if rank == os.environ.get("FAILS", "0") else 0)
    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGINT, save)
say(facts)
open(f"said-{rank}", "w").close()
if "exit" in sys.argv:
    while rank == "0" and os.environ.get("WORLD_SIZE") == "2" and not os.path.exists("said-1"):
        time.sleep(0.01)  # the first to end ends the others
    sys.exit(int(sys.argv[-1]) if rank == "0" else 0)
if "kill" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
if "wait" in sys.argv:
    time.sleep(300)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_plan(ONE).save(tmp_path / "one.json")
    make_plan(TWO).save(tmp_path / "two.json")
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def start(folder: Path, *arguments: str, **env: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "state")} | env
    command = [sys.executable, "-m", "autoplan", "run", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(folder: Path, *arguments: str, **env: str) -> tuple[int, list[dict[str, Any]], str]:
    process = start(folder, *arguments, **env)
    out, err = process.communicate(timeout=120)
    return process.returncode, [json.loads(line) for line in out.splitlines() if line.startswith('{"')], err


def read(process: subprocess.Popen[str], lines: int) -> list[dict[str, Any]]:
    assert process.stdout is not None
    return [json.loads(process.stdout.readline()) for _ in range(lines)]


@pytest.fixture
def command(cli: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`autoplan run` in this process; where it would become the only rank, that is a child of it."""

    def execve(path: str, words: list[str], environment: dict[str, str]) -> None:
        cli_run._end(subprocess.run(words, env=environment, timeout=120).returncode)

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.setenv("AUTOPLAN_PLAN_ASKED", "")  # the command sets it
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(ends, "said", [])
    return lambda *arguments: cli("run", *arguments)


def wait_until_gone(*pids: int) -> None:
    assert wait_until(lambda: all(linux.start_ticks(pid) is None for pid in pids), 20.0), f"still there: {pids}"


def test_one_rank_takes_the_place_of_the_command(folder: Path) -> None:
    given = ["--lr", "1", "--", "x", "exit", "9"]
    process = start(folder, "one.json", "train.py", "--", *given)
    (facts,) = read(process, 1)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 9, err
    assert facts["pid"] == process.pid and facts["argv"] == given
    assert facts["plan"] == ONE.describe()
    assert facts["env"]["OMP_NUM_THREADS"] == "1" and "WORLD_SIZE" not in facts["env"]
    assert facts["env"]["MALLOC_TRIM_THRESHOLD_"] == str(2**31 - 1)


def test_a_script_takes_an_unverified_plan_where_the_command_did(folder: Path, command: Any) -> None:
    make_plan(ONE, parity=UNCHECKED, unverified="the search was interrupted").save(folder / "best.json")
    (folder / "asks.py").write_text(
        "import json, autoplan; print(json.dumps({'ok': autoplan.current_plan().unverified_ok}))"
    )
    code, said, err = command("best.json", "asks.py")
    assert code == 2 and not said and "unverified: the search was interrupted" in err
    code, said, _ = command("--unverified-ok", "best.json", "asks.py")
    assert code == 0 and json.loads(said) == {"ok": True}


def test_the_allocator_of_the_environment_keeps_what_is_freed(folder: Path, command: Any) -> None:
    (folder / "train.py").write_text(
        "import os\n"
        "def resident(): return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "block = bytearray(200 << 20)\n"
        "before = resident(); del block\n"
        "print('{\"kept\": %d}' % (before - resident() < 50 << 20))\n"
    )
    assert json.loads(command("one.json", "train.py").out) == {"kept": 1}
    make_plan(ONE.model_copy(update={"allocator": "own"})).save(folder / "own.json")
    assert json.loads(command("own.json", "train.py").out) == {"kept": 0}


def test_two_ranks_are_started_and_the_first_exit_code_is_the_answer(folder: Path) -> None:
    code, facts, err = run(folder, "two.json", "train.py", "--", "exit", "7")
    assert code == 7 and sorted(fact["rank"] for fact in facts) == ["0", "1"], err
    assert all(fact["env"]["WORLD_SIZE"] == "2" and int(fact["env"]["OMP_NUM_THREADS"]) >= 1 for fact in facts)
    assert "rank 0 ended with exit status 7" in err


BLAME = """
import os, signal, sys, time

way, first = sys.argv[1], int(sys.argv[2])
rank = int(os.environ["RANK"])
if way == "group":
    import torch, torch.distributed as dist  # which takes seconds, and the other ways need none
    dist.init_process_group("gloo")
if way == "saves":  # as many trainings do at SIGTERM
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
open(f"began-{rank}", "w").close()
while not os.path.exists(f"began-{1 - rank}"):
    time.sleep(0.01)
if rank == first:
    time.sleep(0.3)
    raise ValueError("the batch is empty")
if way == "group":
    dist.all_reduce(torch.zeros(1))
time.sleep(60)
"""


BLAMED = [(way, first) for way in ("alone", "saves", "group") for first in ("0", "1")]


@pytest.mark.parametrize(("way", "first"), some(BLAMED, (("saves", "1"),)))
def test_the_rank_that_raised_is_named_and_gives_the_exit_code(folder: Path, way: str, first: str) -> None:
    (folder / "blame.py").write_text(BLAME)
    code, _, err = run(folder, "two.json", "blame.py", "--", way, first)
    assert f"autoplan run: rank {first} ended with exit status 1, and so the others were ended" in err
    assert code == 1


@pytest.mark.exhaustive
def test_the_exit_code_of_a_rank_that_was_killed_is_that_of_a_shell(folder: Path) -> None:
    assert run(folder, "two.json", "train.py", "--", "kill")[0] == 137


SIGNALS = [(signal.SIGTERM, "1", 5), (signal.SIGINT, "none", 0)]


@pytest.mark.parametrize(("number", "fails", "code"), some(SIGNALS, SIGNALS[:1]))
def test_ranks_are_told_of_a_signal_once_and_end_as_they_like(folder: Path, number: int, fails: str, code: int) -> None:
    process = start(folder, "two.json", "train.py", "--", "save", "wait", FAILS=fails)
    read(process, 2)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    saved = [json.loads(line) for line in out.splitlines()]
    assert sorted((line["saved"], line["by"]) for line in saved) == [("0", number), ("1", number)], err
    assert process.returncode == code


def test_ranks_that_do_not_handle_a_signal_end_by_it(folder: Path) -> None:
    process = start(folder, "two.json", "train.py", "--", "wait", "spawn")
    facts = read(process, 2)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGHUP
    wait_until_gone(*(fact[name] for fact in facts for name in ("pid", "child")))


def test_nothing_outlives_a_killed_command(folder: Path) -> None:
    process = start(folder, "two.json", "train.py", "--", "wait", "spawn", "save")
    facts = read(process, 2)
    process.kill()
    process.communicate(timeout=60)
    wait_until_gone(*(fact[name] for fact in facts for name in ("pid", "child")))


@pytest.mark.slow
def test_without_a_script_the_ranks_are_started_too(folder: Path, command: Any) -> None:
    spec = make_spec(model=f"{ROOT / 'examples' / 'image_classifier.py'}:tiny_classifier", global_batch=16)
    cores = len(os.sched_getaffinity(0))
    make_plan(TWO.model_copy(update={"threads": cores}), workload=spec).save(folder / "images.json")
    assert command("images.json", "--steps", "2").code == 2, "nobody trusts the file yet"
    process = start(folder, "images.json", "--steps", "2", "--model", spec.reference, "--json")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert len(json.loads(out)["steps"]) == 2, "the first rank alone prints"
    assert err.count(f"the plan runs 2 ranks of {cores} threads each") == 1, "the command says it, and no rank again"


WORKLOAD = """
import autoplan, torch

def loss(model, batch):
    print("a loss")
    {fails}
    return autoplan.LossSum(model(batch["x"]).square().sum(), len(batch["x"]))

def workload(global_batch=4):
    return autoplan.Workload(
        name="mine", build_model=lambda: torch.nn.Linear(2, 1), loss=loss, global_batch=global_batch,
        make_batch=lambda samples, index: {{"x": torch.ones(samples, 2)}},
        build_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
"""


@pytest.mark.parametrize(
    ("fails", "code", "words"),
    [
        (
            "raise ValueError('no such label')",
            2,
            "ValueError: no such label\nraised by the run of mine:workload, in mine.py, line 6",
        ),
        (
            "raise torch.OutOfMemoryError('CUDA out of memory')",
            3,
            "the plan does not fit here: mine:workload ran",
        ),
        ("", 0, "step 2: loss"),
    ],
    ids=["user's", "memory", "ok"],
)
def test_a_run_of_the_plans_own_workload_ends_with_one_document(
    folder: Path, command: Any, fails: str, code: int, words: str
) -> None:
    (folder / "mine.py").write_text(WORKLOAD.format(fails=fails))
    spec = make_spec(model=f"{folder / 'mine.py'}:workload", global_batch=4)
    make_plan(TrainingConfig(micro_batch=4), workload=spec).save(folder / "mine.json")
    ended = command("mine.json", "--steps", "2", "--model", spec.reference, "--json")
    assert ended.code == code and words in ended.err and "a loss" in ended.err, ended.err
    assert ended.document["status"] == ("error" if code else "ok")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("one.json", "none.py"), "there is no script"),
        (("train.py",), "plan comes first"),
        (("one.json", "train.py", "--steps", "3"), "--steps"),
        (("one.json", "train.py", "--json"), "--json"),
    ],
)
def test_what_makes_no_sense_is_refused(command: Any, arguments: tuple[str, ...], words: str) -> None:
    code, _, err = command(*arguments)
    assert code == 2 and words in err


def test_a_rank_of_another_world_is_refused(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    code, _, err = command("two.json", "train.py")
    assert code == 2 and "2 rank(s)" in err and "of 3" in err


PREPARES = """
import autoplan
from tests.strategies.tiny import Classifier, image_loss, sgd

print(type(autoplan.current_plan().prepare(Classifier(), sgd, image_loss).model).__name__)
"""


def test_a_script_takes_an_edited_plan_where_the_command_did(folder: Path, command: Any) -> None:
    plan = make_plan(TrainingConfig(micro_batch=2), workload=spec_from_objects(classifier()))
    document = json.loads(plan.save(folder / "edited.json").read_text())
    document["measurement"]["mfu"] = 0.3
    (folder / "edited.json").write_text(json.dumps(document))
    (folder / "prepares.py").write_text(PREPARES)
    assert command("edited.json", "prepares.py").code == 2
    code, said, err = command("--changed-ok", "edited.json", "prepares.py")
    assert (code, said) == (0, "Classifier\n"), err


def test_an_edited_plan_is_refused_and_its_file_of_code_is_not_needed(
    folder: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = json.loads((folder / "one.json").read_text())
    document["workload"] |= {"kind": "function", "reference": "/nowhere/train.py:workload"}
    (folder / "elsewhere.json").write_text(json.dumps(document))
    code, _, err = command("elsewhere.json", "train.py")
    assert code == 2 and "edited" in err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")  # the only rank of a torchrun starts too
    assert command("elsewhere.json", "train.py", "--changed-ok").code == 0


def test_a_plan_sets_no_variable_that_is_code(folder: Path, command: Any) -> None:
    document = json.loads((folder / "one.json").read_text())
    document["environment"]["variables"] = {"LD_PRELOAD": "/tmp/evil.so", "PYTORCH_ALLOC_CONF": "a\\nb:/tmp/x"}
    document["seal"] = {}
    (folder / "evil.json").write_text(json.dumps(document))
    code, out, err = command("evil.json", "train.py")
    assert code == 0 and "LD_PRELOAD" not in json.loads(out)["env"] and "LD_PRELOAD=/tmp/evil.so" in err


UNASKED = "note: train.py never asked for the plan"


CHILD = "import os, sys; os.system(f'{sys.executable} -c \"import autoplan; autoplan.current_plan()\"')"
SCRIPTS = [
    ("one.json", "print('trained')", True),
    ("one.json", "import autoplan", True),
    ("one.json", "import sys; sys.exit(0)", True),
    ("one.json", "import sys; sys.exit(3)", False),
    ("one.json", "raise ValueError('no batch')", False),
    ("one.json", "import autoplan; autoplan.current_plan()", False),
    ("one.json", "import autoplan, os; autoplan.load_plan(os.environ['AUTOPLAN_PLAN'])", False),
    ("one.json", CHILD, False),
    ("one.json", "# Made by autoplan 0.1.0 from a plan found on 2026-01-01", False),
    ("two.json", "print('trained')", True),
    ("two.json", "import autoplan; autoplan.current_plan()", False),
]


@pytest.mark.parametrize(("plan", "text", "unasked"), some(SCRIPTS, [SCRIPTS[number] for number in (0, 4, 7, 9)]))
def test_a_script_that_never_asks_for_the_plan_is_told_so(
    folder: Path, command: Any, plan: str, text: str, unasked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "train.py").write_text(text)
    (folder / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", str(folder / "tmp"))
    err = command(plan, "train.py").err
    assert err.count(UNASKED) == unasked
    assert not unasked or "plan = autoplan.current_plan()" in err
    assert not list((folder / "tmp").glob("autoplan-*"))


AS_PYTHON = """
import json, os, pickle, runpy, sys
from multiprocessing import get_context

class Own:
    pass

def square(value):
    return value * value

if __name__ == "__main__":
    import beside
    own = {"argv": sys.argv, "file": __file__, "path": sys.path[0], "spec": __spec__, "beside": beside.NAME}
    own |= {"main": sys.modules["__main__"].__dict__ is globals(), "package": __package__, "doc": __doc__}
    own["pickled"] = type(pickle.loads(pickle.dumps(Own()))) is Own
    with get_context("spawn").Pool(1) as pool:
        own["spawned"] = pool.map(square, [3])
    print(json.dumps(own))
"""


def test_the_script_runs_as_python_runs_it(folder: Path, command: Any) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "own.py").write_text(AS_PYTHON)
    (folder / "sub" / "beside.py").write_text("NAME = 'beside'")
    (folder / "link.py").symlink_to(folder / "sub" / "own.py")
    words = [sys.executable, "link.py", "--lr", "1"]
    wanted = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    code, out, err = command("one.json", "link.py", "--", "--lr", "1")
    assert code == 0 and json.loads(out) == json.loads(wanted.stdout), err


def test_more_threads_than_cores_are_said(folder: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr(cli_run, "start", lambda *given: 0)  # before the ranks: nothing of them is needed
    make_plan(TrainingConfig(micro_batch=4, threads=cores + 1)).save(folder / "many.json")
    make_plan(TrainingConfig(micro_batch=4, threads=cores, dp_replicate=2)).save(folder / "ranks.json")
    code, _, err = command("many.json", "train.py")
    assert code == 2 and f"the plan has {cores + 1} threads per rank" in err  # edited: no machine of this plan has them
    _, _, err = command("ranks.json", "train.py")
    assert err.count(f"the plan runs 2 ranks of {cores} threads each, and there are {cores} core(s)") == 1
    for plan in ("one.json", "two.json")[: min(cores, 2)]:
        assert "core(s)" not in command(plan, "train.py").err


def test_outside_a_run_there_is_no_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import autoplan

    monkeypatch.delenv("AUTOPLAN_PLAN", raising=False)
    assert autoplan.current_plan() is None
    monkeypatch.setenv("AUTOPLAN_PLAN", str(tmp_path / "gone.json"))
    with pytest.raises(autoplan.PlanError, match="gone.json"):
        autoplan.current_plan()
