"""The exported PyTorch script trains as a plain loop does, on one rank and on several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autoplan.planner.export.run import export_plan
from autoplan.planner.plan.plan import Plan
from tests.cases import some
from tests.exports import script_runner
from tests.exports.six_steps import BATCH_NORM, WORKLOAD, SixSteps, compare, make_plan, plain_loop, prepared
from tests.exports.workloads import STEPS
from tests.recorded import make_hardware, named

Run = Callable[..., SixSteps]


@pytest.fixture(scope="module")
def run_script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Exports a plan, perhaps changes the text, and runs six steps of it where autoplan cannot be imported."""
    folder = tmp_path_factory.mktemp("scripts")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    command = [sys.executable, script_runner.__file__]
    running = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert running.stdin is not None and running.stdout is not None
    number = 0

    def run(plan: Plan, change: tuple[str, str] | None = None, ranks: int | None = None) -> SixSteps:
        nonlocal number
        assert running.stdin is not None and running.stdout is not None
        number += 1
        (path,) = export_plan(plan, "pytorch", folder / f"train{number}.py", workload=named(plan)).paths
        if change is not None:
            text = path.read_text()
            assert text.count(change[0]) == 1, f"{change[0]} is there {text.count(change[0])} times"
            path.write_text(text.replace(*change))
        record, ranks = folder / f"record{number}.pt", ranks or plan.config.world_size
        print(json.dumps([str(path), str(record), ranks, STEPS]), file=running.stdin, flush=True)
        codes = json.loads(running.stdout.readline())
        said = "\n".join(Path(f"{record}.{rank}.txt").read_text()[-1500:] for rank in range(ranks))
        assert codes == [0] * ranks, said
        return SixSteps.load(record)

    yield run
    running.stdin.close()
    running.wait()
    running.stdout.close()


CASES: dict[str, dict[str, Any]] = {
    "one": {},
    "one_full": {"checkpointing": "full", "optimizer_step": "foreach", "micro_batch": 4},
    "ddp": {"dp_replicate": 2},
    "fsdp": {"dp_shard": 2, "checkpointing": "full"},
    "fsdp_every": {"dp_shard": 2, "gradient_sync": "every", "reshard_after_forward": False, "micro_batch": 1},
    "tp": {"tp": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "tp_dp": {"tp": 2, "dp_replicate": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", some(CASES, ("one", "ddp", "fsdp", "tp")))
def test_a_language_model_trains_as_a_plain_loop_does(case: str, run_script: Run) -> None:
    plan = make_plan(WORKLOAD, **CASES[case])
    wanted = plain_loop(plan)
    assert min(wanted.grad_norms) > 2 * 0.1, "clipping would change nothing"
    assert compare(run_script(plan), wanted) == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", some(("one", "dp_replicate", "dp_shard"), ("dp_replicate",)))
def test_running_statistics_are_those_of_a_plain_loop(ranks: str, run_script: Run) -> None:
    plan = make_plan(BATCH_NORM, **({} if ranks == "one" else {ranks: 2}))
    got = run_script(plan)
    assert compare(got, plain_loop(plan)) == []
    assert any("running_var" in name for name in got.buffers)


@pytest.mark.slow
@pytest.mark.parametrize("case", some(("one", "ddp", "fsdp"), ("ddp",)))
def test_the_script_is_the_plans_own_run(case: str, run_script: Run) -> None:
    """Against plan.prepare the code is the same, and so are the numbers, but for the last bit of a loss's division."""
    plan = make_plan(WORKLOAD, **CASES[case])
    wanted, scale = prepared(plan), plain_loop(plan)
    wanted.start.update(scale.start)
    assert compare(run_script(plan), wanted, relative=2e-6) == []


@pytest.mark.slow
def test_a_script_for_cuda_has_what_it_calls(run_script: Run) -> None:
    """Its own code for batches and masks, run on a CPU: no two of the copied functions have one name."""
    plan = make_plan(WORKLOAD)
    on_cuda = plan.model_copy(update={"device": "cuda", "hardware": make_hardware(gpu=True)})
    assert compare(run_script(on_cuda), plain_loop(plan)) == []


PLANTED = {
    "gradients of one rank of two": ("return self._gradients.ranks / divisor", "return 1 / divisor"),
    "the same samples on both ranks": ("rank * LOCAL_BATCH, (rank + 1) * LOCAL_BATCH", "0, LOCAL_BATCH"),
    "the count of one rank": ("return self._gradients.sum_over_ranks(divisor)", "return divisor"),
    "no exchange of gradients": ("self._hooks.set_sync(sync)", "self._hooks.set_sync(False)"),
    "no clipping": ("norm = self._gradients.clip(self._parameters, self._max_grad_norm)", "norm = torch.ones(())"),
    "no schedule": ("None if workload.build_schedule is None else workload.build_schedule(optimizer),", "None,"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", some(PLANTED, ("gradients of one rank of two", "the same samples on both ranks")))
def test_a_planted_mistake_is_seen(what: str, run_script: Run) -> None:
    plan = make_plan(WORKLOAD, dp_replicate=2)
    assert compare(run_script(plan, PLANTED[what]), plain_loop(plan))


@pytest.mark.slow
def test_torchrun_starts_the_script(tmp_path: Path) -> None:
    """As a person would start it."""
    plan = make_plan(WORKLOAD, dp_shard=2)
    (path,) = export_plan(plan, "pytorch", tmp_path / "train.py", workload=named(plan)).paths
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, path, "--steps", str(STEPS)], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    wanted = plain_loop(plan)
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in done.stdout.splitlines() if "loss " in line]
    assert losses == pytest.approx(wanted.losses, rel=1e-5)


def test_without_torchrun_the_script_says_the_command(run_script: Run) -> None:
    with pytest.raises(AssertionError, match="torchrun --nproc-per-node 2"):
        run_script(make_plan(WORKLOAD, dp_shard=2), ranks=1)
