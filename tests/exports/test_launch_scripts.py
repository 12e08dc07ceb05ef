"""The exported launchers: bash itself runs them, torchrun's parser reads them, and they start real ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from autoplan.errors import ExportError, UsageError
from autoplan.planner.export import launch
from autoplan.planner.export.base import Export
from autoplan.planner.export.run import export_plan, load_target
from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.plan import PlanNodes
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import make_spec
from tests.recorded import make_hardware, make_plan
from tests.strategies.tiny import GPT2

ROOT = Path(__file__).parents[2]
DUMP = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
# What stands for a program of the cluster: srun passes its own options over and runs the command in this node.
SRUN = '#!/usr/bin/env bash\nwhile [[ "$1" == --* ]]; do echo "srun $1" >&2; shift; done\nexec "$@"\n'
SCONTROL = "#!/usr/bin/env bash\necho localhost\necho other\n"
ONE_NODE = {
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_JOB_NODELIST": "localhost",
    "SLURM_JOB_ID": "4321",
    "SLURM_CPUS_PER_TASK": "2",
}


def two_ranks(folder: Path, **given: Any) -> Plan:
    """A plan whose workload needs no trust: a model by its configuration."""
    (folder / "config.json").write_text(json.dumps(GPT2))
    spec = make_spec(model=str(folder / "config.json"), global_batch=4, sequence_length=16)
    return make_plan(TrainingConfig(micro_batch=2, dp_replicate=2), workload=spec, accumulation=1, **given)


def with_variables(plan: Plan, **variables: str) -> Plan:
    return plan.model_copy(update={"environment": plan.environment.model_copy(update={"variables": variables})})


def programs(folder: Path, *, torchrun: bool) -> str:
    """A PATH with programs of a cluster; with `torchrun`, one that says what it was given."""
    folder.mkdir(exist_ok=True)
    files = {"srun": SRUN, "scontrol": SCONTROL}
    if torchrun:
        files["torchrun"] = f"#!/usr/bin/env bash\nexec {sys.executable} -S -c '{DUMP}' \"$@\"\n"
    for name, text in files.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def run_bash(
    path: Path, *arguments: str, env: dict[str, str], timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "PLAN")}
    return subprocess.run(
        ["bash", str(path), *arguments],
        env=environment | env,
        cwd=path.parent,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@pytest.fixture(autouse=True)
def parse_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's parser runs in this process, which has torch already, but for the slow tests."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr(launch, "parse_torchrun", lambda words: launch.parse_in_rank(None, words))  # type: ignore[arg-type]


@pytest.mark.parametrize("to", ["torchrun", "slurm"])
def test_bash_starts_the_plans_ranks(to: str, tmp_path: Path) -> None:
    plan = with_variables(
        make_plan(TrainingConfig(micro_batch=2, dp_replicate=2), hardware=make_hardware(cores=6)),
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
        NCCL_ALGO="Ring",
        CUDA_VISIBLE_DEVICES="0,1",
        LD_PRELOAD="/usr/lib/libjemalloc.so",
    )
    exported = export_plan(plan, to, tmp_path / "my plan.sh")
    script, file = exported.paths
    assert Plan.load(file).config == plan.config and not Plan.load(file).edited
    assert "LD_PRELOAD=/usr/lib/libjemalloc.so" in exported.not_carried[0] and "NOT CARRIED" in script.read_text()
    path = programs(tmp_path / "bin", torchrun=True)
    done = run_bash(script, "my train.py", "--lr", "1 2", env={"PATH": path, **(ONE_NODE if to == "slurm" else {})})
    assert done.returncode == 0, done.stderr
    words, seen = json.loads(done.stdout)
    read = launch.parse_in_rank(None, words)  # type: ignore[arg-type]
    assert (read["nproc_per_node"], read["training_script"]) == ("2", "my train.py")
    assert read["training_script_args"] == ["--lr", "1 2"]
    assert read["standalone"] is (to == "torchrun")
    assert seen["OMP_NUM_THREADS"] == "3", "torchrun would set 1"
    assert seen["PYTORCH_ALLOC_CONF"] == seen["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert seen["NCCL_ALGO"] == "Ring" and seen.get("LD_PRELOAD") is None
    assert Path(seen["AUTOPLAN_PLAN"]).resolve() == file.resolve() or seen["AUTOPLAN_PLAN"].endswith(file.name)
    if to == "slurm":
        assert read["rdzv_endpoint"] == "localhost:29821" and read["rdzv_backend"] == "c10d"
        assert "srun --cpus-per-task=2" in done.stderr  # srun does not take it over from sbatch


def test_the_plans_own_workload_runs_without_arguments(tmp_path: Path) -> None:
    script, file = export_plan(two_ranks(tmp_path), "torchrun", tmp_path / "a.sh").paths
    env = {"PATH": programs(tmp_path / "bin", torchrun=True)}
    words, _ = json.loads(run_bash(script, env=env).stdout)
    assert words[-4:] == ["-m", "autoplan", "run", str(file)]
    file.rename(tmp_path / "elsewhere.json")
    lost = run_bash(script, env=env)
    assert lost.returncode == 2 and "There is no" in lost.stderr
    words, _ = json.loads(run_bash(script, env=env | {"PLAN": "elsewhere.json"}).stdout)
    assert words[-1] == "elsewhere.json"


ODD = ("a'b\"c", "$HOME`x`", "a\\", "-x", "#a;b", "a\tb", "é")


@pytest.mark.parametrize(("to", "name"), [*(("torchrun", name) for name in ODD), ("slurm", ODD[0]), ("slurm", "-x")])
def test_bash_finds_the_plan_whatever_its_name_is(to: str, name: str, tmp_path: Path) -> None:
    script, file = export_plan(two_ranks(tmp_path), to, tmp_path / f"{name}.sh").paths
    path = programs(tmp_path / "bin", torchrun=True)
    done = run_bash(script, env={"PATH": path, **(ONE_NODE if to == "slurm" else {})})
    assert done.returncode == 0, done.stderr
    assert Path(json.loads(done.stdout)[0][-1]).name == file.name == f"{name}.plan.json"


@pytest.mark.parametrize("name", ["a\nb", "a\rb", "a\x1b[2Jb", "a\u2028b", "a\u202eb", "a\udc80"])
@pytest.mark.parametrize("to", ["torchrun", "pytorch"])
def test_a_name_of_several_lines_is_refused(to: str, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    with pytest.raises(UsageError, match="--out|out names the file") as caught:
        export_plan(make_plan(), to, folder / f"{name}{load_target(to).suffix}")
    assert str(caught.value).isprintable() or "\n  Nothing was written" in str(caught.value)
    assert not list(folder.iterdir())


def test_a_plan_of_objects_needs_a_script(tmp_path: Path) -> None:
    spec = make_plan().workload.model_copy(update={"kind": "object"})
    script, _ = export_plan(make_plan(workload=spec), "torchrun", tmp_path / "a.sh").paths
    env = {"PATH": programs(tmp_path / "bin", torchrun=True)}
    assert run_bash(script, env=env).returncode == 2
    assert json.loads(run_bash(script, "train.py", env=env).stdout)[0][-1] == "train.py"


def test_nodes_that_ranks_do_not_divide_over_are_refused(tmp_path: Path) -> None:
    config = TrainingConfig(micro_batch=2, dp_replicate=2, tp=2)
    script, _ = export_plan(make_plan(config), "slurm", tmp_path / "a.sh").paths
    env = {"PATH": programs(tmp_path / "bin", torchrun=True)} | ONE_NODE
    two = run_bash(script, "train.py", env=env | {"SLURM_JOB_NUM_NODES": "2"})
    read = launch.parse_in_rank(None, json.loads(two.stdout)[0])  # type: ignore[arg-type]
    assert (read["nnodes"], read["nproc_per_node"]) == ("2", "2")
    for nodes in ("3", "4"):  # 4 ranks over 3; a node with half of a tensor
        assert run_bash(script, "train.py", env=env | {"SLURM_JOB_NUM_NODES": nodes}).returncode == 2


def test_the_options_of_a_job_are_those_of_the_plan(tmp_path: Path) -> None:
    hardware = make_hardware(cores=16, gpu=True)
    plan = make_plan(TrainingConfig(micro_batch=4), hardware=hardware, device="cuda")
    script, _ = export_plan(plan, "slurm", tmp_path / "a.sh").paths
    options = launch.read_script(script.read_text()).options
    assert options["gpus-per-node"] == "1" and options["cpus-per-task"] == "16" and options["ntasks-per-node"] == "1"
    assert options["signal"] == "B:TERM@120" and options["exclusive"] is None and options["mem"] == "0"
    first = script.read_text().splitlines().index("set -euo pipefail")
    assert not any(line.startswith("#SBATCH") for line in script.read_text().splitlines()[first:])


def of_nodes(config: TrainingConfig, *, device: str = "cpu", count: int = 2) -> Plan:
    nodes = PlanNodes(count=count, ranks_per_node=8, launcher="slurm", kind="0123456789abcdef")
    return make_plan(config, nodes=nodes, device=device, hardware=make_hardware(cores=16, gpu=True))


@pytest.mark.parametrize("to", ["torchrun", "slurm"])
def test_a_plan_of_several_nodes_starts_on_them(to: str, tmp_path: Path) -> None:
    plan = of_nodes(TrainingConfig(micro_batch=1, dp_replicate=8, tp=2))
    script, _ = export_plan(plan, to, tmp_path / "a.sh").paths
    env = {"PATH": programs(tmp_path / "bin", torchrun=True)}
    if to == "torchrun":
        lost = run_bash(script, "train.py", env=env)
        assert lost.returncode == 2 and "FIRST=host" in lost.stderr
    job = ONE_NODE | {"SLURM_JOB_NUM_NODES": "2"} if to == "slurm" else {"FIRST": "node7"}
    words, seen = json.loads(run_bash(script, "train.py", env=env | job).stdout)
    read = launch.parse_in_rank(None, words)  # type: ignore[arg-type]
    assert (read["nnodes"], read["nproc_per_node"], read["rdzv_backend"]) == ("2", "8", "c10d")
    assert read["rdzv_endpoint"] == {"torchrun": "node7:29400", "slurm": "localhost:29821"}[to]
    assert seen["OMP_NUM_THREADS"] == "2" and not read["standalone"], "8 ranks share the 16 cores of a node"
    assert "2 nodes with up to 8 rank(s) on each (slurm)" in script.read_text()


def test_a_job_has_the_nodes_of_the_plan_and_gpus_on_each(tmp_path: Path) -> None:
    plan = of_nodes(TrainingConfig(micro_batch=1, dp_replicate=16), device="cuda")
    script, _ = export_plan(plan, "slurm", tmp_path / "a.sh").paths
    options = launch.read_script(script.read_text()).options
    assert (options["nodes"], options["gpus-per-node"]) == ("2", "8")
    assert "measured on 2 nodes" in script.read_text() and "measured on one node" not in script.read_text()


@pytest.mark.parametrize("to", ["torchrun", "slurm"])
@pytest.mark.parametrize(("degrees", "count"), [({"dp_replicate": 16}, 3), ({"dp_replicate": 4, "tp": 4}, 8)])
def test_nodes_with_other_numbers_of_ranks_are_refused(
    to: str, degrees: dict[str, int], count: int, tmp_path: Path
) -> None:
    plan = of_nodes(TrainingConfig.model_validate({"micro_batch": 1, **degrees}), count=count)
    with pytest.raises(ExportError, match=f"do not divide over its {count} nodes") as error:
        export_plan(plan, to, tmp_path / "a.sh")
    assert "--launcher slurm" in str(error.value.flag_hint) and not list(tmp_path.iterdir())


PLANTED = {
    "torchrun": [
        ("--nproc-per-node 2", "--nproc-per-node 4"),
        ("--nproc-per-node", "--nprocs-per-node"),
        ("--standalone", "--nnodes 1"),
        ("OMP_NUM_THREADS=1", "OMP_NUM_THREADS=2"),
        ("then\n", "than\n"),
        ("FILE=a.plan.json", "FILE=b.plan.json"),
    ],
    "slurm": [
        ("--cpus-per-task=2\n", "--cpus-per-task=1\n"),
        ("#SBATCH --exclusive", "# SBATCH --exclusive"),
        ("RANKS=2", "RANKS=1"),
        ("--rdzv-backend c10d", "--rdzv-backend static"),
        ("--rdzv-id", "--rdzv-job"),
        ("B:TERM@120", "TERM@120"),
    ],
}


@pytest.mark.parametrize(("to", "change"), [(to, change) for to, changes in PLANTED.items() for change in changes])
def test_a_planted_mistake_is_seen(to: str, change: tuple[str, str], tmp_path: Path) -> None:
    plan = make_plan(TrainingConfig(micro_batch=2, dp_replicate=2))
    target = load_target(to)
    export = target.render(plan, "a")
    assert target.check(plan, export) == ()
    text = export.files["a.sh"]
    assert change[0] in text
    with pytest.raises((ExportError, ValueError)) as error:
        target.check(plan, Export(files={**export.files, "a.sh": text.replace(change[0], change[1], 1)}))
    assert "torchrun does not take" in str(error.value) or isinstance(error.value, ExportError)


@pytest.mark.parametrize("cluster", [False, True])
def test_sbatch_is_asked_where_a_cluster_answers(cluster: bool, tmp_path: Path, monkeypatch) -> None:
    answers = {"scontrol": f"exit {0 if cluster else 1}", "sbatch": "echo no such partition >&2; exit 1"}
    for name, text in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    plan, target = make_plan(TrainingConfig(micro_batch=2, dp_replicate=2)), load_target("slurm")
    said = ("sbatch --test-only says: no such partition",) if cluster else ()
    assert target.check(plan, target.render(plan, "a")) == said


HOSTILE = (
    "x; touch MARK",
    "$(touch MARK)",
    "`touch MARK`",
    "'\ntouch MARK\n'",
    '"\ntouch MARK',
    "x\n#SBATCH --wrap=touch",
)


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("to", ["torchrun", "slurm"])
def test_values_of_a_plan_stay_data(to: str, text: str, tmp_path: Path) -> None:
    variables = {"OMP_NUM_THREADS": text, "NCCL_ALGO": text, f"NCCL_{text}": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    plan = with_variables(make_plan(created=text, study=text), **variables)
    spec = plan.workload.model_copy(update={"name": text})
    script, _ = export_plan(plan.model_copy(update={"workload": spec}), to, tmp_path / "a.sh").paths
    env = {"PATH": programs(tmp_path / "bin", torchrun=True)} | ONE_NODE
    _, seen = json.loads(run_bash(script, "train.py", env=env).stdout)
    assert "NCCL_ALGO" not in seen and seen["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert not list(tmp_path.glob("MARK*"))
    assert "wrap" not in launch.read_script(script.read_text()).options


RANK = """
import json, os, pathlib, sys, time
names = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "AUTOPLAN_PLAN")
mark = pathlib.Path(sys.argv[1], f"rank{os.environ['RANK']}.json")
mark.with_suffix(".part").write_text(json.dumps({name: os.environ[name] for name in names} | {"pid": os.getpid()}))
mark.with_suffix(".part").rename(mark)
time.sleep(float(sys.argv[2]))
sys.exit(int(sys.argv[3]))
"""


@pytest.mark.slow
def test_the_ranks_of_a_job_are_started_and_ended(tmp_path: Path) -> None:
    """With the real torchrun: each rank has the plan, and TERM to the batch script reaches them."""
    script, file = export_plan(two_ranks(tmp_path, hardware=make_hardware(cores=6)), "slurm", tmp_path / "a.sh").paths
    (tmp_path / "rank.py").write_text(RANK)
    env = {**os.environ, "PATH": programs(tmp_path / "bin", torchrun=False), **ONE_NODE}
    env.pop("OMP_NUM_THREADS", None)
    command = ["bash", script, "rank.py", str(tmp_path)]
    failed = subprocess.run([*command, "0", "3"], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    seen = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert [one["RANK"] for one in seen] == ["0", "1"] and seen[0]["WORLD_SIZE"] == "2"
    assert seen[0]["OMP_NUM_THREADS"] == "3" and (tmp_path / seen[0]["AUTOPLAN_PLAN"]).samefile(file)
    assert failed.returncode != 0, "the code of a rank that fails is lost"
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.json").unlink()
    running = subprocess.Popen([*command, "100", "0"], env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 90
    while not all((tmp_path / f"rank{rank}.json").exists() for rank in (0, 1)):
        assert time.monotonic() < deadline and running.poll() is None
        time.sleep(0.1)
    pids = [json.loads((tmp_path / f"rank{rank}.json").read_text())["pid"] for rank in (0, 1)]
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=60)
    assert running.returncode != 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.exhaustive  # each part of it: the tests above, tests/cli/test_cli_run.py
def test_a_plan_of_two_ranks_trains_by_its_script(tmp_path: Path) -> None:
    script, _ = export_plan(two_ranks(tmp_path), "torchrun", tmp_path / "a.sh").paths
    env = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = run_bash(script, env=env | {"HF_HUB_OFFLINE": "1"}, timeout_s=170)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "tokens/s" in done.stdout and done.stderr.count("step 1: loss") == 1
