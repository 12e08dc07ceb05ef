"""What `--launcher slurm` starts, outside of an allocation and in one; the programs of SLURM are small scripts here.

`tests/engines` has the same with a real SLURM.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from autoplan.errors import DeviceError, UsageError
from autoplan.processes import engines
from autoplan.processes.agent import PLANNER_VARIABLE, TOKEN_VARIABLE
from autoplan.processes.engines import ENGINES, JOB_SCRIPT, Slurm, SlurmJob, is_outside, job_command, parse_state
from autoplan.processes.nodes import Wanted

TOKEN = "the-token-of-the-test"

# Each writes what it was given; what it answers is in a file that the test changes.
PROGRAM = """#!/bin/sh
echo "$0 $*" >> {folder}/said
case "$0" in
  *sbatch) cat > {folder}/script; env > {folder}/environment; count=$(grep -c /sbatch {folder}/said); echo "$count" ;;
  *) cat {folder}/$(basename "$0").answer 2> /dev/null ;;
esac
cat {folder}/$(basename "$0").error >&2 2> /dev/null
exit $(cat {folder}/$(basename "$0").code 2> /dev/null || echo 0)
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the scripts, and with what they were given."""
    for name in ("sbatch", "squeue", "scancel", "sinfo", "srun", "scontrol"):
        (tmp_path / name).write_text(PROGRAM.format(folder=tmp_path))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(engines, "QUEUE_LOOK_S", 0.0)
    (tmp_path / "squeue.answer").write_text("RUNNING None\n")
    (tmp_path / "sinfo.answer").write_text("gpu:h100:8(S:0-1)\n")
    return tmp_path


def given(slurm: Path, name: str) -> list[list[str]]:
    """What a program was called with, each time."""
    said = (slurm / "said").read_text().splitlines() if (slurm / "said").exists() else []
    return [line.split()[1:] for line in said if line.split()[0].endswith(f"/{name}")]


def wanted(on_note: list[str] | None = None) -> Wanted:
    notes = [] if on_note is None else on_note
    return Wanted(planner="10.0.0.1:4000", token=TOKEN, agents=4, on_note=notes.append)


def test_a_job_has_whole_nodes_and_the_token_is_in_no_command_line(slurm: Path) -> None:
    job = ENGINES["slurm"](8)
    assert isinstance(job, SlurmJob) and not job.here
    job.ensure(wanted())
    job.ensure(wanted())
    (command,) = given(slurm, "sbatch")
    assert {"--nodes=4", "--gpus-per-node=8", "--exclusive", "--mem=0", "--parsable"} <= set(command)
    script, environment = (slurm / "script").read_text(), (slurm / "environment").read_text()
    assert script == JOB_SCRIPT and "autoplan.processes.agent" in script and "--kill-on-bad-exit=1" in script
    assert f"{PLANNER_VARIABLE}=10.0.0.1:4000" in environment and f"{TOKEN_VARIABLE}={TOKEN}" in environment
    assert TOKEN not in (slurm / "said").read_text() + script
    (slurm / "squeue.answer").write_text("COMPLETED None\n")
    job.close()
    name = next(text for text in command if text.startswith("--job-name=")).partition("=")[2]
    assert given(slurm, "scancel") == [["--quiet", f"--name={name}"]]


def test_gpus_are_asked_for_where_there_are_any(slurm: Path) -> None:
    (slurm / "sinfo.answer").write_text("(null)\n")
    SlurmJob(8).ensure(wanted())
    assert not [text for text in given(slurm, "sbatch")[0] if text.startswith("--gpus")]
    assert "--gpus-per-node=2" in job_command("a", 1, 2, Path("log"))


def test_it_waits_for_as_long_as_the_queue_is_and_says_why(slurm: Path) -> None:
    (slurm / "squeue.answer").write_text("PENDING Resources\n")
    job, notes = SlurmJob(), list[str]()
    timer = threading.Timer(0.5, (slurm / "squeue.answer").write_text, ["RUNNING None\n"])
    timer.start()
    began = time.monotonic()
    job.ensure(wanted(notes))
    assert time.monotonic() - began > 0.4
    assert notes == ["job 1 of SLURM waits for 4 node(s): Resources"]


def test_ctrl_c_in_the_queue_cancels_the_job(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autoplan.processes.nodes import Nodes

    (slurm / "squeue.answer").write_text("PENDING Priority\n")
    monkeypatch.setenv("AUTOPLAN_ADDRESS", "127.0.0.1")

    sleep = time.sleep

    def interrupt(seconds: float) -> None:
        """Once: where the machine is busy, a wait for a program sleeps too."""
        monkeypatch.setattr(engines.time, "sleep", sleep)
        raise KeyboardInterrupt

    monkeypatch.setattr(engines.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Nodes(SlurmJob(), nodes=4, ranks_per_node=1).start()
    assert len(given(slurm, "sbatch")) == len(given(slurm, "scancel")) == 1


def test_a_job_that_has_ended_is_made_again_and_one_that_slurm_says_nothing_of_is_not(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "SHORT_S", 0.0)
    job = SlurmJob()
    job.ensure(wanted())
    (slurm / "squeue.answer").write_text("")
    (slurm / "squeue.code").write_text("1")
    (slurm / "squeue.error").write_text("slurm_load_jobs error: Unable to contact slurm controller\n")
    job.ensure(wanted())
    assert len(given(slurm, "sbatch")) == 1, "it may run"
    (slurm / "squeue.error").write_text("slurm_load_jobs error: Invalid job id specified\n")
    job.ensure(wanted())
    assert len(given(slurm, "sbatch")) == 2
    (slurm / "squeue.code").write_text("0")
    (slurm / "squeue.answer").write_text("NODE_FAIL None\n")
    job.ensure(wanted())
    assert len(given(slurm, "sbatch")) == 3


def test_jobs_that_end_at_once_are_an_error_with_what_they_said(slurm: Path) -> None:
    (slurm / "squeue.answer").write_text("FAILED NonZeroExitCode\n")
    job = SlurmJob()
    job.ensure(wanted())
    (log,) = [Path(text.partition("=")[2]) for text in given(slurm, "sbatch")[0] if text.startswith("--output=")]
    log.write_text("srun: launching\nsrun: error: execve(): /opt/python: No such file or directory\n")
    with pytest.raises(DeviceError, match=r"3 jobs of SLURM ended at once.*execve\(\): /opt/python: No such file"):
        for _ in range(5):
            job.ensure(wanted())
    assert len(given(slurm, "sbatch")) == 3


def test_what_slurm_refuses_is_said(slurm: Path) -> None:
    (slurm / "sbatch.code").write_text("1")
    (slurm / "sbatch.error").write_text("sbatch: error: invalid account or account/partition combination specified\n")
    with pytest.raises(DeviceError, match="invalid account") as caught:
        SlurmJob().ensure(wanted())
    assert "SBATCH_ACCOUNT" in (caught.value.hint or "")


def test_only_outside_of_an_allocation_a_job_is_made(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_outside("slurm") and not is_outside("ray")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert not is_outside("slurm")
    with pytest.raises(UsageError, match="none of its nodes"):
        ENGINES["slurm"](0)
    with pytest.raises(UsageError):
        Slurm()


def test_in_an_allocation_an_agent_that_ends_at_once_is_started_again_after_a_pause(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    (slurm / "scontrol.code").write_text("1")
    with pytest.raises(DeviceError, match="does not name the nodes"):
        ENGINES["slurm"](0)
    (slurm / "scontrol.code").unlink()
    (slurm / "scontrol.answer").write_text("n1\nn2\nn3\n")
    engine = ENGINES["slurm"](0)
    assert isinstance(engine, Slurm)
    for count in (2, 4):
        for _ in range(3):
            engine.ensure(wanted())
            for process in engine._running.values():
                process.wait(10.0)
        commands = given(slurm, "srun")
        assert sorted(text for command in commands for text in command if text.startswith("--nodelist")) == sorted(
            ["--nodelist=n2", "--nodelist=n3"] * (count // 2)
        )
        monkeypatch.setattr(engines, "_is_early", lambda started_at: len(given(slurm, "srun")) >= 4)
    assert all({"--overlap", "--cpu-bind=none", "--mem=0"} <= set(command) for command in commands)
    assert TOKEN not in (slurm / "said").read_text()
    engine.close()


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("", None),
        ("PENDING (Resources)\n", ("PENDING", "(Resources)")),
        ("RUNNING None\nRUNNING None\n", ("RUNNING", "None")),
        ("COMPLETING None", None),
        ("TIMEOUT TimeLimit", None),
        ("CANCELLED None", None),
    ],
)
def test_states(text: str, state: tuple[str, str] | None) -> None:
    assert parse_state(text) == state


def test_sbatch_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceError, match="sbatch of SLURM is not on the PATH"):
        SlurmJob()
