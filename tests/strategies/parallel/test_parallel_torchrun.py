"""plan.prepare in scripts that torchrun starts: one node, two nodes on loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from autoplan.planner.plan.plan import Plan
from autoplan.strategies.config import TrainingConfig
from autoplan.strategies.run import TrainingRun
from autoplan.strategies.workloads.sources import make_spec
from tests.recorded import make_plan
from tests.strategies.tiny import GPT2

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import json, os, sys, warnings
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from autoplan.planner.plan.plan import Plan

warnings.simplefilter("ignore")
plan = Plan.load(sys.argv[1])
run = plan.prepare()
if len(sys.argv) > 2:  # go on from a state that another layout saved
    state = run.state_dict()
    dcp.load(state, checkpoint_id=sys.argv[2])
    run.load_state_dict(state)
losses = []
for _ in range(2):
    batch = run.workload.make_batch(run.workload.global_batch, run.steps)
    losses.append(float(run.step(run.local_share(batch)).loss))
if int(os.environ.get("RANK", "0")) == 0:
    print("LOSSES", json.dumps(losses), run.steps)
if dist.is_initialized():
    dist.destroy_process_group()
"""


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    paths = [str(ROOT), kept.get("PYTHONPATH", "")]
    return kept | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(paths)}


def write(folder: Path, config: TrainingConfig, name: str = "plan.json") -> tuple[Path, Path]:
    """A script, and a plan of a tiny GPT-2 with that config."""
    model, script = folder / "config.json", folder / "train.py"
    model.write_text(json.dumps(GPT2 | {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}))
    script.write_text(SCRIPT)
    spec = make_spec(model=str(model), sequence_length=32, global_batch=4)
    plan = make_plan(config, workload=spec, accumulation=config.accumulation(4))
    return script, plan.save(folder / name)


def torchrun(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *map(str, arguments)]


def losses(text: str) -> list[float]:
    line = next(line for line in text.splitlines() if line.startswith("LOSSES"))
    return list(json.loads(line.removeprefix("LOSSES").rpartition("]")[0] + "]"))


def run(command: list[str], deadline_s: float = 180.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=deadline_s)


def two_steps(run: TrainingRun) -> list[float]:
    batches = (run.workload.make_batch(run.workload.global_batch, run.steps) for _ in range(2))
    return [float(run.step(batch).loss) for batch in batches]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_script_under_torchrun_goes_on_where_one_process_stopped(tmp_path: Path) -> None:
    script, plain = write(tmp_path, TrainingConfig(micro_batch=4), "plain.json")
    _, shared = write(tmp_path, TrainingConfig(micro_batch=1, tp=2), "tp.json")
    first = Plan.load(plain).prepare()
    two_steps(first)
    dcp.save(first.state_dict(), checkpoint_id=tmp_path / "state")
    split = run(torchrun("--standalone", "--nproc-per-node", "2", script, shared, tmp_path / "state"))
    assert split.returncode == 0, split.stderr[-3000:]
    assert "] 4" in split.stdout  # four steps in all
    assert losses(split.stdout) == pytest.approx(two_steps(first), rel=1e-4)


@pytest.mark.exhaustive
def test_two_nodes_meet_on_loopback(tmp_path: Path) -> None:
    script, shared = write(tmp_path, TrainingConfig(micro_batch=1, dp_shard=2), "two.json")
    _, plain = write(tmp_path, TrainingConfig(micro_batch=2), "plain.json")
    with socket.socket() as probe:  # a port that is free now
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agent = torchrun(
        *("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "autoplan-test"),
        *("--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1", script, shared),
    )
    agents = [
        subprocess.Popen(agent, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        ended = [agent.communicate(timeout=180) for agent in agents]
    finally:
        for process in agents:
            process.kill()
    assert [process.returncode for process in agents] == [0, 0], "\n".join(error[-2000:] for _, error in ended)
    together = "\n".join(out for out, _ in ended)
    alone = run([sys.executable, str(script), str(plain)])
    assert losses(together) == pytest.approx(losses(alone.stdout), rel=1e-4)
