"""Ranks on two nodes of a real SLURM, a real cluster of Ray, and two real torchruns, all on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from autoplan.planner.records.plan import PlanNodes
from autoplan.probes.nodes import NodesProfile
from autoplan.probes.run import read_host_profile
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import make_spec
from tests.engines.cluster import free_port
from tests.engines.slurm import running_slurm
from tests.recorded import make_plan

ROOT = Path(__file__).parents[2]
MET = [[3, [str(rank), "0", "2", "1", "lo", None]] for rank in (0, 1)]
TIME_S = 240.0


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "AUTOPLAN_ADDRESS": "127.0.0.1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def check(folder: Path, *, by_planner: bool = True) -> None:
    """What the planner said; its agents are gone."""
    said: dict[str, Any] = json.loads((folder / "said.json").read_text())
    assert said["met"] == MET, said
    assert said["failed"] == ["rank_failed", 1], said
    assert said["then"] == ["finished", [0, 1]], said
    assert said["lost"] == (["node_lost"] if by_planner else [])
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if "autoplan.processes.agent" in line or "autoplan-rank" in line]


def test_slurm() -> None:
    with tempfile.TemporaryDirectory() as name, running_slurm(Path(name)) as slurm:
        folder = Path(name, "work")
        folder.mkdir()
        command = f"{sys.executable} -m tests.engines.launch slurm {folder}"
        slurm.environment |= environment(PATH=slurm.environment["PATH"])
        job = ["sbatch", "--wait", "--nodes=2", f"--output={name}/job.log", "--wrap", command]
        done = subprocess.run(job, env=slurm.environment, cwd=ROOT, timeout=TIME_S)
        assert done.returncode == 0, Path(name, "job.log").read_text()
        check(folder)


def test_commands_on_two_nodes_of_slurm() -> None:
    """`run` trains a plan over both, `probe` measures both: real steps, real links."""
    model = f"{ROOT / 'examples' / 'image_classifier.py'}:tiny_classifier"
    nodes = PlanNodes(count=2, ranks_per_node=1, launcher="slurm", kind=read_host_profile().kind)
    config = TrainingConfig(micro_batch=4, dp_replicate=2)
    workload = make_spec(model=model, global_batch=16)
    with tempfile.TemporaryDirectory() as name, running_slurm(Path(name)) as slurm:
        folder = Path(name, "work")
        folder.mkdir()
        make_plan(config, nodes=nodes, workload=workload, hardware=read_host_profile()).save(folder / "plan.json")
        autoplan = f"{sys.executable} -m autoplan"
        command = f"{autoplan} run {folder}/plan.json --model {model} --launcher slurm --json > {folder}/run.json"
        command += f" && {autoplan} probe --launcher slurm --nodes 2x1 --device cpu --json > {folder}/probe.json"
        slurm.environment |= environment(PATH=slurm.environment["PATH"])
        job = ["sbatch", "--wait", "--nodes=2", f"--output={name}/job.log", "--wrap", command]
        done = subprocess.run(job, env=slurm.environment, cwd=ROOT, timeout=TIME_S)
        assert done.returncode == 0, Path(name, "job.log").read_text()
        assert len(json.loads((folder / "run.json").read_text())["steps"]) == 5
        found = NodesProfile.model_validate_json((folder / "probe.json").read_text())
        assert len(found.nodes) == 2 and len(found.links[0].readings) == 2, found.notes


def test_ray(tmp_path: Path) -> None:
    try:
        from ray.cluster_utils import Cluster
    except ImportError as error:
        pytest.fail(f"Ray is not installed here: pip install 'autoplan[ray]' ({error})")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        cluster.add_node(num_cpus=2)
        command = [sys.executable, "-m", "tests.engines.launch", "ray", str(tmp_path)]
        more = environment(RAY_ADDRESS=cluster.address, RAY_USAGE_STATS_ENABLED="0")
        done = subprocess.run(command, env=more, cwd=ROOT, timeout=TIME_S, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        check(tmp_path)
    finally:
        cluster.shutdown()


def run_torchruns(tmp_path: Path, *how: str) -> list[int]:
    """The exit codes of two torchruns, which start both again once."""
    port = free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test"]
    program = ["-m", "tests.engines.launch", "elastic", str(tmp_path), *how]
    running = []
    for number in (1, 2):
        log = (tmp_path / f"torchrun{number}.log").open("wb")
        one = [*command, f"--local-addr=127.0.0.{number}", *program]
        running.append(subprocess.Popen(one, env=environment(), cwd=ROOT, stdout=log, stderr=log))
    try:
        return [process.wait(TIME_S) for process in running]
    finally:
        for process in running:
            process.terminate()


def logs(folder: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in folder.glob("torchrun*.log"))


def test_torch_elastic(tmp_path: Path) -> None:
    """The agent's end makes torchrun start both again, once: the planner goes on by itself."""
    assert run_torchruns(tmp_path) == [0, 0], logs(tmp_path)
    check(tmp_path, by_planner=False)


def test_torchrun_starts_again_what_failed_and_says_so(tmp_path: Path) -> None:
    """No agent ends before its planner: torchrun would wait for it. Both torchruns fail, after one more try."""
    began = time.monotonic()
    codes = run_torchruns(tmp_path, "fail")
    assert all(codes), logs(tmp_path)
    assert (tmp_path / "met").read_text().split() == ["finished", "finished"], logs(tmp_path)
    assert time.monotonic() - began < 150.0, logs(tmp_path)
