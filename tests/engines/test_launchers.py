"""Ranks on two nodes of a real SLURM, a real cluster of Ray, and two real torchruns, all on this machine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from autoplan.planner.plan.plan import Plan
from autoplan.planner.records.plan import PlanNodes
from autoplan.probes.nodes import NodesProfile
from autoplan.probes.run import read_host_profile
from autoplan.processes.agent import TOKEN_VARIABLE
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.workloads.sources import make_spec
from tests.engines.slurm import Slurm, running_slurm
from tests.engines.ways import (
    ROOT,
    are_gone,
    as_text,
    logs,
    ours,
    ray_cluster,
    run_at_login,
    run_here,
    run_in_job,
    run_torchruns,
    slurm_environment,
)
from tests.recorded import make_plan

MET = [[3, [str(rank), "0", "2", "1", "lo", None]] for rank in (0, 1)]
LAUNCH = ("-m", "tests.engines.launch")


def check(folder: Path, *, by_planner: bool = True) -> None:
    """What the planner said; its agents are gone."""
    said: dict[str, Any] = json.loads((folder / "said.json").read_text())
    assert said["met"] == MET, said
    assert said["failed"] == ["rank_failed", 1], said
    assert said["then"] == ["finished", [0, 1]], said
    assert said["lost"] == (["node_lost"] if by_planner else [])
    assert are_gone(5.0)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with tempfile.TemporaryDirectory() as name, running_slurm(Path(name)) as found:
        yield found


@pytest.mark.parametrize("where", [run_in_job, run_at_login])
def test_slurm(slurm: Slurm, where: Callable[..., None]) -> None:
    with tempfile.TemporaryDirectory() as name:
        where(slurm, as_text([*LAUNCH, "slurm", name]))
        check(Path(name))


@pytest.mark.parametrize("where", [run_in_job, run_at_login])
def test_commands_on_two_nodes_of_slurm(slurm: Slurm, where: Callable[..., None]) -> None:
    """`run` trains a plan over both, `probe` measures both: real steps, real links."""
    model = f"{ROOT / 'examples' / 'image_classifier.py'}:tiny_classifier"
    nodes = PlanNodes(count=2, ranks_per_node=1, launcher="slurm", kind=read_host_profile().kind)
    config = TrainingConfig(micro_batch=4, dp_replicate=2)
    workload = make_spec(model=model, global_batch=16)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_plan(config, nodes=nodes, workload=workload, hardware=read_host_profile()).save(folder / "plan.json")
        autoplan = as_text(["-m", "autoplan"])
        command = f"{autoplan} run {folder}/plan.json --model {model} --launcher slurm --json > {folder}/run.json"
        command += f" && {autoplan} probe --launcher slurm --nodes 2x1 --device cpu --json > {folder}/probe.json"
        where(slurm, command)
        assert len(json.loads((folder / "run.json").read_text())["steps"]) == 5
        found = NodesProfile.model_validate_json((folder / "probe.json").read_text())
        assert len(found.nodes) == 2 and len(found.links[0].readings) == 2, found.notes


def test_a_search_on_a_login_node(slurm: Slurm) -> None:
    """All of it is on the nodes of its job: probes, trace, trials of one rank and of two, parity, claim."""
    model = f"{ROOT}/tests/planner/data/faulty.py:make_sound"
    command = ["-m", "tests.time_box", "search", "--model", model, "--device", "cpu", "--budget", "240s"]
    command += ["--max-trials", "4", "--fix", "compile=off", "--fix", "dp_replicate=2"]
    with tempfile.TemporaryDirectory() as name:
        out = Path(name, "plan.json")
        command += ["--launcher", "slurm", "--nodes", "2x1", "--store", f"{name}/store", "--out", str(out)]
        run_at_login(slurm, as_text(command))
        plan = Plan.load(out)
    assert plan.claim is not None and plan.parity.passed
    assert {trial.config.world_size for trial in plan.evidence} == {1, 2}  # the plain run has one
    assert any("searched over 2 nodes" in note for note in plan.notes), plan.notes


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_the_job_ends_with_its_planner_and_nobody_reads_the_token(slurm: Slurm, end: signal.Signals) -> None:
    """Ctrl-C cancels the job; if the planner is killed, the agents end, and the job with them."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, *LAUNCH, "slurm", name, "hang"]
        planner = subprocess.Popen(command, env=slurm_environment(slurm), cwd=ROOT)
        try:
            give_up_at = time.monotonic() + 120.0
            while not Path(name, "hanging1").exists() and time.monotonic() < give_up_at:
                time.sleep(0.2)
            assert Path(name, "hanging1").exists(), "the ranks do not run"
            agents = ours("autoplan.processes.agent")
            tokens = {one.environ().get(TOKEN_VARIABLE, "") for one in agents} - {""}
            assert len(agents) >= 2 and len(tokens) == 1, "all agents have the one token"
            (token,) = tokens
            assert not [one for one in psutil.process_iter(["cmdline"]) if token in " ".join(one.info["cmdline"] or ())]
            assert token not in slurm.run("scontrol", "show", "job", "--details")
        finally:
            planner.send_signal(end)
            planner.wait(60.0)
        assert not slurm.jobs(within_s=60.0)
        assert are_gone()


@pytest.mark.parametrize("nodes", [2, 4])
def test_ray(tmp_path: Path, nodes: int) -> None:
    """Of four nodes two are nobody's; the agent that is lost is started again."""
    try:
        with ray_cluster(nodes) as more:
            run_here([*LAUNCH, "ray", str(tmp_path)], **more)
            check(tmp_path)
            assert json.loads((tmp_path / "said.json").read_text())["agents"] == 1, "no more nodes than are needed"
    except ImportError as error:
        pytest.fail(f"Ray is not installed here: pip install 'autoplan[ray]' ({error})")


def test_torch_elastic(tmp_path: Path) -> None:
    """The agent's end makes torchrun start both again, once: the planner goes on by itself."""
    assert run_torchruns(tmp_path, [*LAUNCH, "elastic", str(tmp_path)]) == [0, 0], logs(tmp_path)
    check(tmp_path, by_planner=False)


def test_torchrun_starts_again_what_failed_and_says_so(tmp_path: Path) -> None:
    """No agent ends before its planner: torchrun would wait for it. Both torchruns fail, after one more try."""
    began = time.monotonic()
    codes = run_torchruns(tmp_path, [*LAUNCH, "elastic", str(tmp_path), "fail"])
    assert all(codes), logs(tmp_path)
    assert (tmp_path / "met").read_text().split() == ["finished", "finished"], logs(tmp_path)
    assert time.monotonic() - began < 150.0, logs(tmp_path)
